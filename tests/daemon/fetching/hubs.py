"""Provides servers for the client libraries of Hugging Face and of Google's storage, with as much as those libraries read."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class Hub:
    """Serves files over HTTP while a block runs, and notes which paths were asked for."""

    def __init__(self, handler: type[Files], files: dict[str, bytes]) -> None:
        self.files = files
        #: Paths of requests, in their order, with the part that was asked for: "GET /x bytes=0-9".
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class Files(BaseHTTPRequestHandler):
    """Answers with JSON, with a file or a part of it, or with an error."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".rstrip())
        asked = dict(urllib.parse.parse_qsl(url.query)) | {"body": body.decode()}
        self.answer([urllib.parse.unquote(part) for part in url.path.split("/")[1:]], asked)

    def answer(self, path: list[str], asked: dict[str, str]) -> None:
        """Answers a request.

        ``path``: the parts of its path. ``asked``: the parameters of its query, and its ``body``.
        """
        raise NotImplementedError

    def tell(self, said: Any, status: int = 200, **headers: str) -> None:
        """Answers with JSON."""
        self._send(status, json.dumps(said).encode(), {"Content-Type": "application/json", **headers})

    def give(self, content: bytes, **headers: str) -> None:
        """Answers with a file, or the part of it that is asked for."""
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is None:
            self._send(200, content, headers)
            return
        begin, end = int(part[1]), min(int(part[2]) + 1, len(content))
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self._send(206, content[begin:end], headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Writes no log."""


class HuggingFace(Files):
    """Serves one repository, ``me/models``, of one revision. Its files are LFS files, as weights are there."""

    revision = "0123456789abcdef0123456789abcdef01234567"

    def answer(self, path: list[str], asked: dict[str, str]) -> None:
        match path:
            case ["api", "models", "me", "models", *rest]:
                self._api(rest, asked)
            case ["me", "models", "resolve", _, *rest] if (name := "/".join(rest)) in self.hub.files:
                content = self.hub.files[name]
                self.give(content, ETag=f'"{_sha(content)}"', X_Repo_Commit=self.revision)
            case ["me", "models", *_]:
                self.tell({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            case _:
                self.tell({"error": "Invalid username or password."}, 401, X_Error_Code="RepoNotFound")

    def _api(self, path: list[str], asked: dict[str, str]) -> None:
        match path:
            case [] | ["revision", _]:
                self.tell({"id": "me/models", "sha": self.revision, "siblings": [], "tags": [], "private": False})
            case ["tree", _, *rest]:
                found = self._entries("/".join(rest))
                if found:
                    self.tell(found)
                else:
                    self.tell({"error": "does not exist"}, 404, X_Error_Code="EntryNotFound")
            case ["paths-info", _]:
                wanted = urllib.parse.parse_qs(asked["body"])["paths"]
                self.tell([entry for entry in self._entries("") if entry["path"] in wanted])
            case _:
                self.tell({"error": "not found"}, 404)

    def _entries(self, folder: str) -> list[dict[str, Any]]:
        """Returns the entries of all files and folders below a folder."""
        within = f"{folder}/" if folder else ""
        entries, folders = [], set()
        for name, content in self.hub.files.items():
            if name.startswith(within):
                sha = _sha(content)
                lfs = {"oid": sha, "size": len(content), "pointerSize": 130}
                entries.append({"type": "file", "oid": sha[:40], "size": len(content), "path": name, "lfs": lfs})
                parts = name.split("/")[:-1]
                folders |= {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        entries += [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
            for name in sorted(folders)
            if name.startswith(within)
        ]
        return entries


class GoogleStorage(Files):
    """Serves one bucket, ``bucket``; lists two objects a page, where the real one lists a thousand."""

    def answer(self, path: list[str], asked: dict[str, str]) -> None:
        match path:
            case ["storage", "v1", "b", "bucket", "o"]:
                self._list(asked)
            case ["storage" | "download", *_, "b", "bucket", "o", name] if name in self.hub.files:
                content = self.hub.files[name]
                if asked.get("alt") == "media" or path[0] == "download":
                    self.give(content, ETag=f'"{_sha(content)}"')
                else:
                    self.tell(_object(name, content))
            case _:
                self.tell({"error": {"code": 404, "message": "Not found"}}, 404)

    def _list(self, asked: dict[str, str]) -> None:
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        names = sorted(name for name in self.hub.files if name.startswith(prefix))
        folders = set()
        if delimiter:
            folders = {
                prefix + name.removeprefix(prefix).partition(delimiter)[0] + delimiter
                for name in names
                if delimiter in name.removeprefix(prefix)
            }
            names = [name for name in names if delimiter not in name.removeprefix(prefix)]
        begin = int(asked.get("pageToken", 0))
        said: dict[str, Any] = {"kind": "storage#objects"}
        if folders:
            said["prefixes"] = sorted(folders)
        if items := [_object(name, self.hub.files[name]) for name in names[begin : begin + 2]]:
            said["items"] = items
        if begin + 2 < len(names):
            said["nextPageToken"] = str(begin + 2)
        self.tell(said)


def _object(name: str, content: bytes) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "bucket": "bucket",
        "name": name,
        "size": str(len(content)),
        "etag": _sha(content),
        "generation": "1",
        "updated": "2026-11-26T00:00:00.000Z",
        "timeCreated": "2026-11-26T00:00:00.000Z",
    }


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
