"""The model card of a published bundle: front matter, and the section of README.md that the toolkit writes.  Pure.

The keys of the front matter are those of the hub's model cards (`license`, `base_model`, `base_model_relation`, ..); the
metadata keys `general.license*` and `general.base_model.0.*` are those of the GGUF specification.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from bel.formats.errors import BadInputError, UsageError, printable

BEGIN = "<!-- bel-repack: begin.  What stands from here to the end mark is written anew by `bel-repack publish` -->"
END = "<!-- bel-repack: end -->"
TAGS = ("gguf", "moe", "expert-offload", "bel")
CARD_NAME = "README.md"
_FIXED: dict[str, Any] = {
    "base_model_relation": "quantized",
    "library_name": "gguf",
    "pipeline_tag": "text-generation",
    "tags": list(TAGS),
}
_TERMS = ("license", "license_name", "license_link", "base_model")
_BEGIN = re.compile(r"<!-- bel-repack: begin\b.*?-->", re.DOTALL)
_FRONT = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_MODEL_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_HUB_URL = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?", re.ASCII)

Text = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model comes from and on which terms; None where that is not known."""

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    base_model: str | None = None


def origin_of_metadata(text: Text) -> Origin:
    """What a GGUF says of its origin.  `text` gives the string of a metadata key, or None."""
    return Origin(
        _license_id(text("general.license")),
        text("general.license.name"),
        text("general.license.link"),
        _base_model(text),
    )


def _license_id(text: str | None) -> str | None:
    return text.strip().lower() if text and text.strip() else None


def _base_model(text: Text) -> str | None:
    """ORG/NAME of the first base model: from its address on the hub, else from organisation and name."""
    match = _HUB_URL.fullmatch((text("general.base_model.0.repo_url") or "").strip())
    if match:
        return match.group(1)
    parts = [text("general.base_model.0.organization"), text("general.base_model.0.name")]
    named = "/".join(re.sub(r"\s+", "-", part.strip()) for part in parts if part)
    return named if _MODEL_ID.fullmatch(named) else None


def read_card(text: str, path: str) -> dict[str, Any]:
    """The front matter of a README.md, empty where it has none.  Raises BadInputError where it is not a YAML mapping."""
    match = _FRONT.match(text)
    if match is None:
        return {}
    try:
        front = yaml.safe_load(match.group(1))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        at = f" (line {error.problem_mark.line + 2})" if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else ""
        what = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise BadInputError(f"the front matter is not valid YAML: {what}{at}", path=path, hint="Mend README.md") from None
    if front is None:
        return {}
    if not isinstance(front, dict) or not all(isinstance(key, str) for key in front):
        raise BadInputError("the front matter is not a YAML mapping of names to values", path=path, hint="Mend README.md")
    return front


def complete(front: Mapping[str, Any], given: Origin, metadata: Origin) -> dict[str, Any]:
    """The whole front matter: what README.md has stands, then the options, then the metadata.

    Raises UsageError for an option that contradicts README.md, and for a licence or base model that nobody names.
    """
    whole = dict(front)
    for key in _TERMS:
        option, stands = getattr(given, key), front.get(key)
        if option is not None and stands is not None and option not in (stands, [stands]) and stands != [option]:
            raise UsageError(
                f"README.md says {key} '{stands}', the option '{option}'", hint="README.md stands; change one of the two"
            )
    if whole.get("license") is None:
        whole["license"] = given.license or metadata.license
    if whole.get("base_model") is None:
        whole["base_model"] = given.base_model or metadata.base_model
    if whole["license"] == "other":
        for key in ("license_name", "license_link"):
            if whole.get(key) is None:
                whole[key] = getattr(given, key) or getattr(metadata, key)
    _check(whole)
    return whole | {key: value for key, value in _FIXED.items() if whole.get(key) is None}


def _check(front: Mapping[str, Any]) -> None:
    if front["license"] is None:
        raise UsageError(
            "the licence is not known: neither README.md nor the source's metadata (general.license) names it",
            hint="Give --license ID (apache-2.0, mit, .. or other, as the hub writes them)",
        )
    for text in front["license"] if isinstance(front["license"], list) else [front["license"]]:
        if not isinstance(text, str) or not _LICENSE_ID.fullmatch(text):
            raise UsageError(
                f"'{printable(str(text))}' is not the id of a licence as the hub writes them",
                hint="Give --license ID (apache-2.0, mit, ..), or --license other with --license-name and --license-link",
            )
    lacking = [key for key in ("license_name", "license_link") if front["license"] == "other" and not front.get(key)]
    if lacking:
        raise UsageError(
            f"the licence is 'other', and {' and '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} not known",
            hint="Give " + " and ".join("--" + key.replace("_", "-") for key in lacking),
        )
    if front["base_model"] is None:
        raise UsageError(
            "the base model is not known: neither README.md nor the source's metadata (general.base_model.0.*) names it",
            hint="Give --base-model ORG/NAME",
        )
    for text in front["base_model"] if isinstance(front["base_model"], list) else [front["base_model"]]:
        if not isinstance(text, str) or not _MODEL_ID.fullmatch(text):
            raise UsageError(f"'{printable(str(text))}' is not a model as ORG/NAME", hint="Give --base-model ORG/NAME")


def compose(text: str, front: Mapping[str, Any], section: str, path: str) -> str:
    """README.md with the missing keys added to its front matter and its marked section replaced, or put at its end.

    All else of a hand-written text stays as it is, comments of the front matter included.  Raises BadInputError where a
    mark stands alone.
    """
    match = _FRONT.match(text)
    old = read_card(text, path)
    added = {key: value for key, value in front.items() if old.get(key) is None}
    lines = [match.group(1).rstrip("\r\n")] if match and match.group(1).strip() else []
    if any(key in old for key in added):  # a key with an empty value: YAML may not hold it twice
        lines, added = [], dict(front)
    if added:
        lines.append(yaml.safe_dump(added, sort_keys=False, allow_unicode=True).rstrip("\n"))
    return "---\n" + "\n".join(lines) + "\n---\n" + _with_section(text[match.end() :] if match else text, section, path)


def is_generated(text: str) -> bool:
    """Whether a README.md is `compose`'s alone: made where there was none before, and nothing of anybody's added since."""
    begin, end = _BEGIN.search(text), text.rfind(END)
    try:
        front = read_card(text, CARD_NAME)
    except BadInputError:
        return False
    fixed = all(front.get(key) == value for key, value in _FIXED.items())
    if begin is None or end < begin.end() or not fixed or not set(front) <= {*_FIXED, *_TERMS}:
        return False
    return compose("", front, text[begin.end() : end], CARD_NAME) == text


def _with_section(body: str, section: str, path: str) -> str:
    block = f"{BEGIN}\n{section.strip()}\n{END}"
    begin = _BEGIN.search(body)
    end = body.find(END, begin.end() if begin else 0)
    if (begin is None) != (end < 0):
        raise BadInputError(
            "one of the two marks of the generated section is missing", path=path, expected=f"{BEGIN[:23]} ..--> and {END}"
        )
    if begin is None:
        return body.rstrip("\r\n") + ("\n\n" if body.strip() else "\n") + block + "\n"
    return body[: begin.start()] + block + body[end + len(END) :]
