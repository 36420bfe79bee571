"""The model card: front matter from README.md, options and metadata; a hand-written text stays, its marked section does not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import synth
from bel.formats.bundle import open_bundle
from bel.formats.errors import BadInputError, UsageError
from bel.formats.manifest import Manifest
from bel.repack.card import BEGIN, END, TAGS, Origin, complete, compose, origin_of_metadata, read_card
from bel.repack.card_section import section
from bel.repack.hub import validate_card
from bel.repack.upload_plan import UploadFile
from exactness import repack

WHOLE = Origin("mit", None, None, "Org/Base")
NONE = Origin()


def metadata(**values: str) -> Origin:
    return origin_of_metadata({f"general.{k.replace('__', '.')}": v for k, v in values.items()}.get)


def test_the_origin_comes_from_the_metadata() -> None:
    found = metadata(
        license="Apache-2.0", license__name="N", license__link="L", base_model__0__repo_url="https://huggingface.co/Org/Base"
    )
    assert found == Origin("apache-2.0", "N", "L", "Org/Base")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"base_model__0__organization": "Org", "base_model__0__name": "My Base 7B"}, "Org/My-Base-7B"),
        ({"base_model__0__repo_url": "https://elsewhere.example/Org/Base"}, None),
        ({"base_model__0__name": "Base"}, None),
        ({"base_model__0__organization": "Org/x", "base_model__0__name": "Base"}, None),
        ({}, None),
    ],
)
def test_a_base_model_is_org_and_name(values: dict[str, str], expected: str | None) -> None:
    assert metadata(**values).base_model == expected


def test_readme_wins_then_options_then_metadata() -> None:
    front = complete({"license": "mit"}, Origin(base_model="A/Option"), Origin("apache-2.0", None, None, "A/Metadata"))
    assert (front["license"], front["base_model"]) == ("mit", "A/Option")
    assert front["base_model_relation"] == "quantized" and front["library_name"] == "gguf" and front["tags"] == list(TAGS)
    assert complete({"tags": ["own"]}, WHOLE, NONE)["tags"] == ["own"]


@pytest.mark.parametrize(
    ("front", "given", "source", "message"),
    [
        ({}, NONE, Origin(base_model="A/B"), "--license"),
        ({}, NONE, Origin(license="mit"), "--base-model"),
        (
            {"license": "other"},
            NONE,
            Origin(base_model="A/B"),
            "license_name and license_link are not known.*--license-name and --license-link",
        ),
        ({"license": "other", "license_name": "x"}, NONE, Origin(base_model="A/B"), "license_link is not known"),
        ({"license": "mit"}, Origin(license="gpl-3.0"), WHOLE, "README.md says license 'mit'"),
        ({}, NONE, Origin("My own terms", None, None, "A/B"), "not the id of a licence.*--license"),
        ({"license": 3}, NONE, WHOLE, "not the id of a licence"),
        ({"base_model": "no owner"}, NONE, WHOLE, "ORG/NAME"),
        ({"base_model": ["A/B", "B"]}, NONE, WHOLE, "ORG/NAME"),
    ],
)
def test_what_is_missing_is_refused_by_the_name_of_its_option(
    front: dict[str, Any], given: Origin, source: Origin, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        complete(front, given, source)


def test_lists_and_equal_options_are_fine() -> None:
    front = complete({"license": ["mit"], "base_model": ["A/B"]}, Origin("mit", None, None, "A/B"), NONE)
    assert front["license"] == ["mit"] and front["base_model"] == ["A/B"]


@pytest.mark.parametrize(
    "text",
    [
        "---\nlicense: mit\ntitle: a: b: c\n---\nx\n",
        "---\n- a list\n---\n",
        "---\n1: 2\n---\n",
        "---\n\tlicense: mit\n---\n",
        "---\n'open\n---\n",
        "---\nlicense: 2026-13-45\n---\n",
        "---\n" + "[" * 5000 + "\n---\n",
    ],
)
def test_bad_front_matter_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="front matter"):
        read_card(text, "README.md")


@pytest.mark.parametrize(
    "text", ["", "# no front matter\n", "---\n---\nbody\n", "text\n---\nlicense: mit\n---\n", "---\nnever closed\n"]
)
def test_no_front_matter_is_none(text: str) -> None:
    assert read_card(text, "README.md") == {}


def made(text: str, section: str = "SECTION", origin: Origin = WHOLE) -> str:
    return compose(text, complete(read_card(text, "r"), NONE, origin), section, "r")


def test_a_hand_written_card_stays_as_it_is() -> None:
    text = "---\n# a comment\nlicense: mit   # mine\n---\n\n# Title\n\nWords --- and more.\n"
    card = made(text)
    assert card.startswith("---\n# a comment\nlicense: mit   # mine\nbase_model: Org/Base\n")
    assert "\n# Title\n\nWords --- and more.\n" in card
    assert card.endswith(f"{BEGIN}\nSECTION\n{END}\n")


def test_only_the_marked_section_is_replaced() -> None:
    text = "---\nlicense: mit\n---\nBefore.\n<!-- bel-repack: begin of an older kind -->\nold\n" + END + "\nAfter.\n"
    card = made(text)
    assert card[card.index("Before") :] == f"Before.\n{BEGIN}\nSECTION\n{END}\nAfter.\n"


@pytest.mark.parametrize("text", [f"{BEGIN}\nx\n", f"x\n{END}\n", f"{END}\n{BEGIN}\n"])
def test_a_mark_that_stands_alone_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="mark"):
        made(text)


# Hypothesis draws constants of the sources too: the marks themselves have tests of their own.
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40).filter(
    lambda text: "bel-repack" not in text and "SECTION" not in text
)


@given(st.lists(WORDS, max_size=6), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_a_second_publish_changes_nothing(lines: list[str], has_front: bool, newline: str) -> None:
    front = "---\nlicense: mit\nlanguage: [en, de]\n---\n" if has_front else ""
    text = (front + "# T\n" + "".join(f"{line}\n" for line in lines)).replace("\n", newline)
    once = made(text)
    assert made(once) == once
    assert made(once, "OTHER") == once.replace("SECTION", "OTHER")
    assert all(line in once for line in lines)


@given(
    st.dictionaries(st.sampled_from(["language", "metrics", "thumbnail", "x"]), WORDS | st.none() | st.booleans(), max_size=4)
)
def test_the_hubs_own_classes_read_every_card(extra: dict[str, Any]) -> None:
    import yaml

    card = made("---\n" + yaml.safe_dump({"license": "mit", **extra}) + "---\nbody\n")
    front = validate_card(card, "README.md")
    assert front["license"] == "mit" and front["base_model"] == "Org/Base" and front["base_model_relation"] == "quantized"
    assert front["tags"] == list(TAGS) and front["library_name"] == "gguf" and front["pipeline_tag"] == "text-generation"


HOSTILE = st.text(min_size=1, max_size=30) | st.sampled_from(
    ["a\nb", "```", "` | x", f"{END}", "<!--", "## x", "|", "$(touch x)", "a\r\n---\n", "\\", "\u2028"]
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("card")
    return open_bundle(repack(synth.moe().write(folder / "m.gguf"), folder / "m.bel")).manifest


@given(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
def test_no_name_of_a_file_breaks_out_of_its_place(manifest: Manifest, name: str, model: str, arch: str, source: str) -> None:
    """Names in a GGUF are arbitrary: none makes a line, a column, or an end mark of its own."""

    def lines(name: str, model: str, arch: str, source: str) -> list[str]:
        renamed = replace(manifest, model_name=model, arch=arch, sources=(replace(manifest.sources[0], name=source),))
        return section(renamed, "org/tiny", [UploadFile(name, 5)]).splitlines()

    plain, odd = lines("n", "m", "a", "s"), lines(name, model, arch, source)
    assert len(odd) == len(plain)
    assert [re.sub(r"\\\|", "", line).count("|") for line in odd] == [line.count("|") for line in plain]
    assert not [line for line in odd if END in line or BEGIN in line]
    assert made(made("", "\n".join(odd)), "X") == made("", "X")


def test_the_card_tells_what_fits_where(manifest: Manifest) -> None:
    """A dense part of 9 GiB and 20 GiB of experts: nothing on 8 GB, a twentieth on 12, a quarter on 16, 65 % on 24."""
    gib = 1 << 30
    layer = replace(manifest.layers[0], n_expert=20, stride_bytes=gib)
    large = replace(manifest, dense=replace(manifest.dense, size_bytes=9 * gib), layers=(layer,))
    text = section(large, "org/tiny", [])
    assert "| 8 GB | the dense part does not fit |" in text
    assert [f"| {card} GB | {share} of the experts |" in text for card, share in ((12, "5%"), (16, "25%"), (24, "65%"))] == [
        True
    ] * 3


def test_a_key_without_value_is_filled_once() -> None:
    card = made("---\nlicense:\nbase_model: A/B\n---\n", origin=WHOLE)
    assert card.count("license:") == 1 and read_card(card, "r")["license"] == "mit"


def test_the_hubs_classes_refuse_a_wrong_model_index() -> None:
    with pytest.raises(BadInputError, match="metadata of the model card is refused"):
        validate_card("---\nlicense: mit\nmodel-index: 3\n---\n", "README.md")
