"""A Hugging Face hub with one repository, whose files are those of a directory: what huggingface_hub asks of it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

MODEL, COMMIT = "owner/name", "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves ``published`` as the repository :data:`MODEL` while it is entered. ``sent`` counts the bytes of each file
    that were sent."""

    def __init__(self, published: Path) -> None:
        self.published, self.sent = published, Counter[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_POST(self) -> None:
                hub.answer(self)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        path = unquote(urlsplit(request.path).path)
        if path in (
            f"/api/models/{MODEL}",
            f"/api/models/{MODEL}/revision/main",
            f"/api/models/{MODEL}/revision/{COMMIT}",
        ):
            self._json(request, self._info())
        elif found := re.fullmatch(rf"/api/models/{MODEL}/tree/[^/]+/?(.*)", path):
            self._json(request, [self._entry(file) for file in self._files() if self._name(file).startswith(found[1])])
        elif re.fullmatch(rf"/api/models/{MODEL}/paths-info/[^/]+", path):
            names = self._asked_paths(request, body)
            self._json(request, [self._entry(file) for file in self._files() if self._name(file) in names])
        elif found := re.fullmatch(rf"/{MODEL}/resolve/[^/]+/(.+)", path):
            self._file(request, self.published / found[1])
        else:
            self._head(request, 404, {"content-length": "0", "x-error-code": "EntryNotFound"})

    def _asked_paths(self, request: BaseHTTPRequestHandler, body: bytes) -> list[str]:
        if "json" in (request.headers.get("content-type") or ""):
            return list(json.loads(body)["paths"])
        return parse_qs(body.decode())["paths"]

    def _files(self) -> list[Path]:
        return sorted(file for file in self.published.rglob("*") if file.is_file())

    def _name(self, file: Path) -> str:
        return str(file.relative_to(self.published))

    def _info(self) -> dict[str, Any]:
        siblings = [{"rfilename": self._name(file)} for file in self._files()]
        return {"_id": "0", "id": MODEL, "modelId": MODEL, "sha": COMMIT, "private": False, "siblings": siblings}

    def _entry(self, file: Path) -> dict[str, Any]:
        return {"type": "file", "oid": self._etag(file), "size": file.stat().st_size, "path": self._name(file)}

    def _etag(self, file: Path) -> str:
        return hashlib.sha1(self._name(file).encode(), usedforsecurity=False).hexdigest()

    def _json(self, request: BaseHTTPRequestHandler, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self._head(request, 200, {"content-type": "application/json", "content-length": str(len(data))})
        request.wfile.write(data)

    def _file(self, request: BaseHTTPRequestHandler, file: Path) -> None:
        if not file.is_file():
            headers = {"content-length": "0", "x-error-code": "EntryNotFound", "x-repo-commit": COMMIT}
            self._head(request, 404, headers)
            return
        data = file.read_bytes()
        headers = {"etag": f'"{self._etag(file)}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
        status = 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range") or ""):
            first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            headers["content-range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        self._head(request, status, headers | {"content-length": str(len(data))})
        if request.command == "GET":
            self.sent[self._name(file)] += len(data)
            request.wfile.write(data)

    def _head(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
