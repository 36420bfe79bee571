"""Split sets: which files belong to a model, going by the name of any one of them.

Source: `llama_split_path` and the loader's checks in llama.cpp src/llama-model-loader.cpp; gguf-split.  Names count from
1, `split.no` from 0.  A link is never resolved before its siblings are looked for: in a Hugging Face cache the links
carry the shard names and their targets do not.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from bel.formats.errors import BadInputError
from bel.formats.gguf_header import GgufHeader

SHARD_NAME = re.compile(r"^(?P<base>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z", re.DOTALL | re.ASCII)


@dataclass(frozen=True, slots=True)
class SplitKeys:
    """The `split.*` keys of one file.  `count` is 0 where the file is not part of a set."""

    number: int | None
    count: int
    tensors: int | None


def model_base_name(path: Path) -> str:
    """The model's name: the file's name as given, without `.gguf` and without a shard suffix."""
    shard = SHARD_NAME.match(path.name)
    if shard and shard["base"]:
        return shard["base"]
    name = path.name.removesuffix(".gguf")
    return name if name.strip(".") else path.name


def split_keys(header: GgufHeader) -> SplitKeys:
    """The split keys of a header.  A set of one file counts as no set."""
    count = header.integer("split.count") or 0
    return SplitKeys(header.integer("split.no"), count if count > 1 else 0, header.integer("split.tensors.count"))


def check_file(path: Path) -> None:
    """Raise BadInputError, saying what is wrong, where `path` is not a readable regular file."""
    if path.is_symlink() and not path.exists():
        raise BadInputError(
            f"the file is a link to {os.readlink(path)}, which does not exist",
            path=str(path),
            hint="In a Hugging Face cache this is an unfinished or deleted download",
        )
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise BadInputError("no such file", path=str(path)) from None
    if stat.S_ISDIR(mode):
        what = "this is a bundle already, and a directory" if (path / "manifest.json").exists() else "this is a directory"
        raise BadInputError(f"{what}; name the .gguf file itself", path=str(path))
    if not stat.S_ISREG(mode):
        raise BadInputError("this is not a regular file", path=str(path))


def shard_paths(path: Path, keys: SplitKeys) -> list[Path]:
    """The paths of the set that `path` belongs to, in order; [path] where it stands alone.

    Raises BadInputError where a shard is missing, or where name and keys of the file contradict each other.
    """
    name = SHARD_NAME.match(path.name)
    if keys.count == 0:
        if name and int(name["count"]) > 1:
            raise BadInputError(
                f"the file is named like shard {int(name['number'])} of {int(name['count'])} but its header has no split.count",
                path=str(path),
                hint="Give it a name without -NNNNN-of-NNNNN if it is a whole model",
            )
        return [path]
    expected = f"NAME-{(keys.number or 0) + 1:05d}-of-{keys.count:05d}.gguf"
    if name is None:
        raise BadInputError(
            "the file is one shard of a split set but is not named like one, so the others cannot be found",
            path=str(path),
            found=f"split.no {keys.number}, split.count {keys.count}",
            expected=f"a name of the form {expected}",
            hint="Rename every shard of the set to its original name",
        )
    if int(name["count"]) != keys.count:
        raise BadInputError(
            "the shard's name and its split.count disagree",
            path=str(path),
            found=f"split.count {keys.count}",
            expected=f"split.count {int(name['count'])}, going by the name",
        )
    if keys.number != int(name["number"]) - 1 or not 0 <= keys.number < keys.count:
        raise BadInputError(
            "the shard's split.no does not match its name: shards were swapped or renamed",
            path=str(path),
            found=f"split.no {keys.number}",
            expected=f"split.no {int(name['number']) - 1} (it counts from 0)",
        )
    paths = [path.with_name(f"{name['base']}-{i + 1:05d}-of-{keys.count:05d}.gguf") for i in range(keys.count)]
    missing = [p.name for p in paths if not os.path.lexists(p)]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise BadInputError(
            f"the split set is incomplete: {len(missing)} of {keys.count} shards missing beside it: {shown}", path=str(path)
        )
    return paths
