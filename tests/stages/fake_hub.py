"""The Hub's endpoints that a push needs, on loopback: repositories, LFS objects, commits, a tree.

It keeps what it is sent, checks each object's digest, and fails where a test tells it to.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """State of the Hub.

    Attributes:
        files: Path -> content of the last commit.
        objects: Stored LFS objects by digest.
        commits: How many commits were made.
        uploads: How many objects were sent.
        requests: Method and path of every request.
        fail: Asked before each request; a status to answer with instead, or 0. -1 drops the
            connection.
        token: The one that may write.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.repos: dict[str, bool] = {}
        self.commits = self.uploads = 0
        self.requests: list[str] = []
        self.fail: Callable[[str], int] = lambda request: 0
        self.token = "hf_right"
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of a request."""
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if name in self.repos else 200
            self.repos.setdefault(
                name, asked.get("visibility") == "private" or bool(asked.get("private"))
            )
            return status, {"url": f"{self.url}/{name}", "id": name, "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/objects/") and method == "PUT":
            self.uploads += 1
            digest = path.removeprefix("/objects/")
            if hashlib.sha256(body).hexdigest() != digest:
                return 400, {"error": "wrong digest"}
            self.objects[digest] = body
            return 200, {}
        found = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(/.*)?", path)
        if found and found[1] in self.repos:
            return self._repo(found[1], found[2] or "", body)
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"objects": [self._object(o) for o in json.loads(body)["objects"]]}
        return 404, {"error": "not found"}

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.objects:
            return found
        return {**found, "actions": {"upload": {"href": f"{self.url}/objects/{asked['oid']}"}}}

    def _repo(self, name: str, what: str, body: bytes) -> tuple[int, Any]:
        if what.startswith("/preupload"):
            rows = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            return 200, {"files": rows}
        if what.startswith("/commit"):
            self._commit([json.loads(line) for line in body.splitlines() if line])
            url = f"{self.url}/{name}/commit/{self.commits}"
            return 200, {"commitUrl": url, "commitOid": str(self.commits), "success": True}
        if what.startswith("/tree"):
            return 200, [
                {"type": "file", "path": path, "size": len(data), "oid": "0"}
                for path, data in self.files.items()
            ]
        card = {"id": name, "siblings": [{"rfilename": path} for path in self.files]}
        return 200, {**card, "private": self.repos[name], "tags": [], "downloads": 0, "sha": "0"}

    def _commit(self, rows: list[dict[str, Any]]) -> None:
        files = dict(self.files)
        for row in rows:
            if row["key"] == "file":
                files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
            elif row["key"] == "lfsFile":
                files[row["value"]["path"]] = self.objects[row["value"]["oid"]]
            elif row["key"] == "deletedFile":
                del files[row["value"]["path"]]
        self.files, self.commits = files, self.commits + 1


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a Hub on a free port."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = f"{self.command} {self.path}"
            hub.requests.append(request)
            status = hub.fail(request)
            if status < 0:
                self.close_connection = True
                return
            value: Any = {"error": "made to fail"}
            is_object = self.path.startswith("/objects/")
            if not is_object and self.headers.get("Authorization") != f"Bearer {hub.token}":
                status = 401
            if not status:
                status, value = hub.answer(self.command, self.path, body)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _handle  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
