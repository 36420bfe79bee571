"""What of a folder is uploaded and what is not, and the limits of the hub.  Pure.

The hub takes files of up to 50 GB, and its client refuses a larger one without Xet (huggingface_hub 2.4.0,
`MAX_HTTP_DOWNLOAD_SIZE`; read in November 2026).  GB is 10^9 bytes there: 49 GiB are too much.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bel.formats.errors import BadInputError, UsageError, printable

GB = 10**9
MAX_FILE_BYTES = 50 * GB
SUMS_NAME, PROFILE_NAME, PLAN_NAME = "SHA256SUMS", "profile.json", "plan.json"
LICENSE_NAMES = ("LICENSE", "LICENSE.md", "LICENSE.txt")
MAX_NAMED = 20  # a person reads no more names of stray files
_PLACES = "bin|data|etc|home|media|mnt|opt|private|root|run|scratch|srv|tmp|usr|Users|var|Volumes|work|workspace"
_LOCAL_PATH = re.compile(
    rf"(?<![\w./~-])/(?:{_PLACES})/[^\s\"'`)<>,;]+|(?<![\w.])[A-Za-z]:\\+[^\s\"'`)<>]+|file://[^\s\"'`)<>]+"
)


@dataclass(frozen=True, slots=True)
class UploadFile:
    """One file: its name in the repository and its size."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """Everything that is uploaded: `data` first; `front`, which holds the manifest, last.

    A repository without manifest is no bundle, so that an upload which ends early leaves nothing that `fetch` accepts.
    """

    data: tuple[UploadFile, ...]
    front: tuple[UploadFile, ...]
    warnings: tuple[str, ...]

    @property
    def files(self) -> tuple[UploadFile, ...]:
        """All files, in the order of their upload."""
        return self.data + self.front

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


def plan_upload(data: Mapping[str, int], front: Mapping[str, int], present: Iterable[str]) -> UploadPlan:
    """The plan of a bundle.  `data` and `front` are sizes by name; `present` are the names in its folder.

    Raises UsageError for a file over the limit.  Each present file that is not of the bundle makes a warning.
    """
    check_limits({**data, **front})
    strays = sorted(set(present) - set(data) - set(front))
    warnings = [f"{printable(name)} is not uploaded: {_why(name)}" for name in strays[:MAX_NAMED]]
    if len(strays) > MAX_NAMED:
        warnings.append(f"{len(strays) - MAX_NAMED} more files of the folder are not uploaded: they are no part of the bundle")
    return UploadPlan(_rows(data), _rows(front), tuple(warnings))


def too_big(sizes: Mapping[str, int]) -> list[str]:
    """The names whose size is over the limit of the hub."""
    return [name for name, size in sizes.items() if size > MAX_FILE_BYTES]


def check_limits(sizes: Mapping[str, int]) -> None:
    """Raise UsageError where a file is larger than the hub takes."""
    over = too_big(sizes)
    if over:
        raise UsageError(
            f"{', '.join(map(printable, over))}: larger than the 50 GB (50 * 10^9 bytes) that the hub takes for a file",
            found=", ".join(f"{sizes[name]} bytes" for name in over),
            expected=f"at most {MAX_FILE_BYTES}",
            hint="Repack with --shard-size 45GB",
        )


def check_private(name: str, text: str, folders: Iterable[str] = ()) -> None:
    """Raise BadInputError where a text that is to be uploaded holds a path of this machine.

    `folders` are absolute paths that may stand nowhere; besides, what looks like a path below a usual folder of a system.
    """
    for number, line in enumerate(text.splitlines(), 1):
        match = _LOCAL_PATH.search(line)
        found = match.group() if match else next((folder for folder in folders if folder in line), None)
        if found is not None:
            raise BadInputError(
                f"line {number} holds a path of a machine, which is not for the public",
                path=name,
                found=found,
                hint="Remove it",
            )


def sums_line(digest: str, name: str) -> str:
    """A line of SHA256SUMS as `sha256sum` writes it: a name with a backslash or line break is escaped, and so marked."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"


def sums_bytes(names: Iterable[str]) -> int:
    """The size that SHA256SUMS of these files will have."""
    return sum(len(sums_line("0" * 64, name).encode("utf-8", "surrogateescape")) for name in names)


def _why(name: str) -> str:
    if any(part.startswith(".") for part in name.split("/")):
        return "it is hidden, and no part of the bundle"
    if name.endswith((".partial", ".incomplete", ".part", ".tmp", "~")):
        return "it is a partial or temporary file"
    return "it is no part of the bundle"


def _rows(sizes: Mapping[str, int]) -> tuple[UploadFile, ...]:
    return tuple(UploadFile(name, size) for name, size in sizes.items())
