"""The hub: the only module that touches huggingface_hub.

Uploads are `HfApi.upload_folder`, which its guide names for large folders too: with Xet it commits in batches, and the same
call resumes after an interruption (`upload_large_folder` went in huggingface_hub 2).  A hub without Xet is served with the
environment variable HF_HUB_DISABLE_XET=1.  Credentials are the client's own (`hf auth login`, HF_TOKEN).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bel.formats.errors import BadInputError, MachineError, UsageError, printable_line
from bel.formats.signals import signals_deferred

LISTEN_SECONDS = 0.2
ENDPOINT_VARIABLE = "HF_ENDPOINT"
_SAID_CHARS = 1500


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository.  `sha256` is None for one that is kept in git itself, and `git_oid` is that of its content."""

    size_bytes: int | None
    sha256: str | None
    git_oid: str | None

    def holds(self, data: bytes) -> bool:
        """Whether the file's content is `data`, as far as the hub tells."""
        if self.sha256 is not None:
            return self.sha256 == hashlib.sha256(data).hexdigest()
        return self.git_oid in (None, hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one commit (40 hex digits).  `is_private` None: the hub does not say."""

    repo_id: str
    commit: str
    is_private: bool | None
    files: dict[str, RemoteFile]


class Hub:
    """One hub.  `endpoint` None is the client's default (HF_ENDPOINT, or the public hub)."""

    def __init__(self, endpoint: str | None, *, show_progress: bool) -> None:
        need_client(endpoint)
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not show_progress:
            disable_progress_bars()
        self._api = HfApi(endpoint=endpoint, library_name="bel-toolkit")

    def create(self, repo_id: str, *, private: bool) -> str:
        """Make a model repository, or take the one that exists; its address."""
        with _hub_errors(f"making the repository {repo_id}"):
            return str(self._api.create_repo(repo_id, private=private or None, repo_type="model", exist_ok=True))

    def upload(self, repo_id: str, folder: Path, names: Sequence[str], message: str, *, withdraw: Sequence[str] = ()) -> None:
        """Upload these files of a folder under their own names; `withdraw` are files of the repository to delete with it."""
        with _hub_errors(f"the upload to {repo_id}"):
            _interruptible(
                lambda: self._api.upload_folder(
                    repo_id=repo_id,
                    folder_path=folder,
                    allow_patterns=[glob.escape(name) for name in names],
                    delete_patterns=[glob.escape(name) for name in withdraw] or None,
                    commit_message=message,
                    repo_type="model",
                )
            )

    def snapshot(self, repo_id: str, revision: str | None) -> Snapshot:
        """The commit that a revision (None: the main branch) names, and its files."""
        with _hub_errors(f"looking up {repo_id}"):
            info = self._api.model_info(repo_id, revision=revision, files_metadata=True)
        files = {
            row.rfilename: RemoteFile(row.size, None if row.lfs is None else row.lfs.sha256, row.blob_id)
            for row in info.siblings or []
        }
        if info.sha is None:
            raise MachineError(f"the hub names no commit of {repo_id}")
        return Snapshot(repo_id, info.sha, info.private, files)

    def download(self, snapshot: Snapshot, names: Sequence[str], folder: Path) -> None:
        """Download these files into a folder.  Those that are there whole already are not fetched again."""
        with _hub_errors(f"the download of {snapshot.repo_id}"):
            _interruptible(
                lambda: self._api.snapshot_download(
                    snapshot.repo_id,
                    revision=snapshot.commit,
                    local_dir=folder,
                    allow_patterns=[glob.escape(name) for name in names],
                )
            )


def _interruptible(call: Callable[[], object]) -> None:
    """Run a long call of the client in a thread of its own, so that Ctrl-C is heard at once.

    The client's pools wait for their workers before they let a KeyboardInterrupt through: for gigabytes, or for the end of
    a rate limit.  Those workers go on until the process ends.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with signals_deferred():  # which waits in a way that an exception of a handler breaks
        thread.start()
    while thread.is_alive():
        thread.join(LISTEN_SECONDS)  # a signal that another thread took does not end a wait without a limit
    if failed:
        raise failed[0]


def need_client(endpoint: str | None = None) -> None:
    """Raise MachineError, naming the extra, where huggingface_hub is not installed, UsageError for an address that is none."""
    if endpoint is not None:
        _check_address(endpoint, "--endpoint")
    if ENDPOINT_VARIABLE in os.environ:  # the client reads it when it is imported, and may fail at that
        _check_address(os.environ[ENDPOINT_VARIABLE], ENDPOINT_VARIABLE)
    try:
        import huggingface_hub  # noqa: F401
        import yaml  # noqa: F401
    except ModuleNotFoundError as error:
        raise MachineError(
            f"this command needs {error.name}, which is not installed", hint="Install it with: pip install 'bel-toolkit[hub]'"
        ) from None


def _check_address(address: str, given_by: str) -> None:
    """Raise UsageError for what no client can reach, before its library fails in words of its own."""
    try:
        parts = urlsplit(address)
        host = parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        host = None
    if not host:
        raise UsageError(
            f"'{printable_line(address)}' is not the address of a hub",
            expected="one that begins with https:// or http://",
            hint=f"Mend {given_by}, or leave it out for the public hub",
        )


def check_repo_id(repo_id: str) -> None:
    """Raise UsageError for what is not ORG/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not in its __all__

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"'{printable_line(repo_id)}' is not the name of a repository: {_one_line(str(error))}") from None
    if "/" not in repo_id:
        raise UsageError(f"'{repo_id}' lacks its owner", expected="ORG/NAME")


def validate_card(text: str, path: str) -> dict[str, Any]:
    """The front matter as the hub's own card classes read it, offline.  Raises BadInputError where they refuse it."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        card: Any = ModelCard(text)
        front: dict[str, Any] = card.data.to_dict()
    except (ValueError, TypeError, YAMLError) as error:
        raise BadInputError(f"the metadata of the model card is refused: {_one_line(str(error))}", path=path) from None
    return front


@contextlib.contextmanager
def _hub_errors(doing: str) -> Iterator[None]:
    """Whatever the client raises becomes a MachineError with what the hub said.  The block holds calls of the client alone."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not hasattr(error, "response"):  # the disk or the network stack, with its own message
            raise
        raise _failed(doing, error) from error
    except Exception as error:
        raise _failed(doing, error) from error


_HINTS = {
    401: "Log in with `hf auth login`, or set HF_TOKEN",
    403: "The token has no permission for this repository",
    404: "Check the name; a private repository needs a login (`hf auth login`)",
    413: "The hub refuses the size; see its limits on storage",
    429: "The hub's rate limit is reached; run the same command again later, it goes on where it stopped",
}


_NOT_REACHED = ("ConnectError", "ConnectTimeout")  # of httpx, which the client uses


def _failed(doing: str, error: Exception) -> MachineError:
    """The error with the hub's status and words, which stand in the first of its causes that has a response."""
    cause: BaseException = error
    while getattr(cause, "response", None) is None and cause.__cause__ is not None:
        cause = cause.__cause__
    response = getattr(cause, "response", None)
    status = getattr(response, "status_code", None)
    said = _one_line(str(cause))
    words = getattr(cause, "server_message", None)
    if words and words not in said:
        said += f": {_one_line(words)}"
    answered = f"the hub answered {status}: " if status is not None else f"{type(cause).__name__}: "
    hint = _HINTS.get(status or 0, "Run the same command again: it goes on where it stopped")
    if status is None and type(cause).__name__ in _NOT_REACHED:
        hint = "The hub cannot be reached: check the network and its address (--endpoint, HF_ENDPOINT), then run this again"
    if status is None and "xet" in said.lower():
        hint = "A hub without Xet needs the environment variable HF_HUB_DISABLE_XET=1"
    return MachineError(f"{doing} failed: {answered}{said[:_SAID_CHARS]}", hint=hint)


def _one_line(text: str) -> str:
    return printable_line(" ".join(text.split()))
