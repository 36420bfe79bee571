"""A hub on this machine: a real HTTP server that speaks what huggingface_hub's client uses, with faults on demand.

It serves the routes of models that the client calls for creating, pre-upload, LFS upload, commit and download (Xet off),
as huggingface_hub 2.4.0 calls them.  What is committed, and which requests came, can be looked at.

As a program, for the examples: it prints its address and serves until its standard input ends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_BYTES = 4096  # larger files go by LFS; the true hub has 10 MB, and tests have small files


@dataclass
class Fault:
    """What goes wrong with requests whose "METHOD /path" the pattern finds; `times` of them, after `skip` that are served."""

    pattern: str
    status: int | None = None
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    cut_bytes: int | None = None  # reset the connection after so many bytes of the body
    flip_byte: int | None = None  # serve another byte at this offset
    times: int = 1
    skip: int = 0


@dataclass
class Commit:
    """One commit: its id and its files, name to content."""

    oid: str
    files: dict[str, bytes]
    summary: str


class Hub:
    """The state of the server."""

    def __init__(self) -> None:
        self.repos: dict[str, list[Commit]] = {}
        self.blobs: dict[str, bytes] = {}
        self.private: set[str] = set()
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.url = ""

    def files(self, repo_id: str) -> dict[str, bytes]:
        """The files of the main branch."""
        return self.repos[repo_id][-1].files

    def commit(self, repo_id: str, files: dict[str, bytes], summary: str) -> Commit:
        """Add a commit."""
        history = self.repos[repo_id]
        rows = "".join(f"{name}\0{hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(files.items()))
        made = Commit(hashlib.sha1(f"{len(history)}{summary}{rows}".encode()).hexdigest(), files, summary)
        history.append(made)
        return made

    def asked(self, pattern: str) -> int:
        """How many requests a pattern finds."""
        return sum(1 for line in self.requests if re.search(pattern, line))

    def fault_of(self, line: str) -> Fault | None:
        """The fault that is due for a request."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, line):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: the second would wait 40 ms for an acknowledgement
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - names of http.server

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        with self.hub.lock:
            self.hub.requests.append(line)
        fault = self.hub.fault_of(line)
        if fault is not None and fault.cut_bytes is not None and self.command in ("PUT", "POST"):
            self.rfile.read(fault.cut_bytes)
            self._reset()
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault is not None and fault.status is not None:
            self._send(fault.status, {"error": fault.message}, headers=fault.headers)
            return
        for method, pattern, answer in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                answer(self, fault, body, **match.groupdict())
                return
        self._send(404, {"error": f"no route {line}"})

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _send(self, status: int, body: Any = None, *, headers: dict[str, str] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self._send_bytes(status, data, {"Content-Type": "application/json", **(headers or {})})

    def _send_bytes(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _commit_of(self, repo_id: str, revision: str) -> Commit | None:
        history = self.hub.repos.get(repo_id)
        if history is None:
            self._send(404, {"error": "Repository not found"}, headers={"X-Error-Code": "RepoNotFound"})
            return None
        for commit in history:
            if commit.oid == revision:
                return commit
        if revision == "main":
            return history[-1]
        self._send(404, {"error": f"Invalid rev id: {revision}"}, headers={"X-Error-Code": "RevisionNotFound"})
        return None

    def create(self, _fault: Fault | None, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked['organization']}/{asked['name']}"
        if repo_id in self.hub.repos:
            self._send(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"})
            return
        self.hub.repos[repo_id] = []
        if asked.get("visibility") == "private":
            self.hub.private.add(repo_id)
        self.hub.commit(repo_id, {".gitattributes": b"*.bin filter=lfs\n"}, "initial commit")
        self._send(200, {"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": repo_id})

    def validate(self, _fault: Fault | None, _body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def preupload(self, _fault: Fault | None, body: bytes, repo_id: str, revision: str) -> None:
        commit = self._commit_of(repo_id, revision)
        if commit is None:
            return
        rows = []
        for row in json.loads(body)["files"]:
            lfs, there = row["size"] > LFS_BYTES, commit.files.get(row["path"])
            oid = None if there is None else _sha256(there) if len(there) > LFS_BYTES else _git_oid(there)
            rows.append({"path": row["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid})
        self._send(200, {"files": rows, "commitOid": commit.oid})

    def batch(self, _fault: Fault | None, body: bytes, repo_id: str) -> None:
        objects: list[dict[str, Any]] = []
        for row in json.loads(body)["objects"]:
            there = row["oid"] in self.hub.blobs
            action = {"upload": {"href": f"{self.hub.url}/lfs/{repo_id}/{row['oid']}"}}
            objects.append({**row, "authenticated": True} | ({} if there else {"actions": action}))
        self._send(200, {"transfer": "basic", "objects": objects})

    def put(self, _fault: Fault | None, body: bytes, repo_id: str, oid: str) -> None:
        if _sha256(body) != oid:
            self._send(422, {"error": f"{repo_id}: the content is not {oid}"})
            return
        self.hub.blobs[oid] = body
        self._send(200)

    def commit(self, fault: Fault | None, body: bytes, repo_id: str, revision: str) -> None:
        base = self._commit_of(repo_id, revision)
        if base is None:
            return
        files, summary = dict(base.files), ""
        for line in body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "header":
                summary = value["summary"]
            elif row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            else:
                files.pop(value["path"])
        if fault is not None and fault.flip_byte is not None:
            name = max(files, key=lambda n: len(files[n]))
            files[name] = _flipped(files[name], fault.flip_byte)
        made = self.hub.commit(repo_id, files, summary)
        self._send(200, {"success": True, "commitOid": made.oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{made.oid}"})

    def info(self, _fault: Fault | None, _body: bytes, repo_id: str, revision: str | None = None) -> None:
        commit = self._commit_of(repo_id, revision or "main")
        if commit is not None:
            siblings = [{"rfilename": n, "size": len(d), "blobId": _git_oid(d)} | _lfs(d) for n, d in commit.files.items()]
            private = repo_id in self.hub.private
            self._send(200, {"id": repo_id, "sha": commit.oid, "private": private, "siblings": siblings})

    def tree(self, _fault: Fault | None, _body: bytes, repo_id: str, revision: str) -> None:
        commit = self._commit_of(repo_id, revision)
        if commit is not None:
            rows = [{"type": "file", "path": n, "size": len(d), "oid": _git_oid(d)} | _lfs(d) for n, d in commit.files.items()]
            self._send(200, rows)

    def resolve(self, fault: Fault | None, _body: bytes, repo_id: str, revision: str, name: str) -> None:
        commit = self._commit_of(repo_id, revision)
        if commit is None:
            return
        if name not in commit.files:
            self._send(404, {"error": "Entry not found"}, headers={"X-Error-Code": "EntryNotFound"})
            return
        data = commit.files[name]
        etag = _sha256(data) if len(data) > LFS_BYTES else _git_oid(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        status, start = 200, 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked and self.command == "GET":
            status, start = 206, int(asked.group(1))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if fault is not None and fault.flip_byte is not None:
            data = _flipped(data, fault.flip_byte)
        part = data[start:]
        if fault is None or fault.cut_bytes is None or self.command == "HEAD":
            self._send_bytes(status, part, headers)
            return
        self.send_response(status)
        for key, value in {"Content-Length": str(len(part)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(part[: fault.cut_bytes])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


_REPO = r"(?P<repo_id>[^/]+/[^/]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Any]] = [
    (("POST",), r"/api/repos/create", _Handler.create),
    (("POST",), r"/api/validate-yaml", _Handler.validate),
    (("POST",), rf"/api/models/{_REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (("PUT",), rf"/lfs/{_REPO}/(?P<oid>[0-9a-f]+)", _Handler.put),
    (("POST",), rf"/api/models/{_REPO}/commit/(?P<revision>.+)", _Handler.commit),
    (("GET",), rf"/api/models/{_REPO}", _Handler.info),
    (("GET",), rf"/api/models/{_REPO}/revision/(?P<revision>.+)", _Handler.info),
    (("GET",), rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)/?", _Handler.tree),
    (("GET", "HEAD"), rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _lfs(data: bytes) -> dict[str, Any]:
    if len(data) <= LFS_BYTES:
        return {}
    return {"lfs": {"oid": _sha256(data), "sha256": _sha256(data), "size": len(data), "pointerSize": 134}}


def client_environment(hub: Hub, home: Path) -> dict[str, str]:
    """The environment of a command that is to talk to this hub, with a token and a home of its own, and Xet off."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    return {**os.environ, **own}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that listens on 127.0.0.1 while the block runs; its address is `url`."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with serving() as served, suppress(KeyboardInterrupt):
        print(served.url, flush=True)
        sys.stdin.buffer.read()
