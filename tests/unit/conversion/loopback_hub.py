"""A Hub on this machine: models whose branches hold files; uploads in git-lfs's protocol or in commits."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class LoopbackHub:
    """What it holds, and whether it is out of order."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Files]] = {}  # by name and branch
        self.private: set[str] = set()
        self.uploads: list[str] = []  # sha256 of large files, as they came
        self.objects: dict[str, bytes] = {}
        self.token = "hf_right"
        self.fails_on: str | None = None  # a word of the path
        self.address = ""

    @contextmanager
    def serve(self) -> Iterator["LoopbackHub"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if self.fails_on and self.fails_on in path:
            return 403, {"error": "this is closed"}
        if path.startswith("/objects/"):
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.uploads.append(oid)
            self.objects[oid] = body
            return 200, {}
        if path == "/api/validate-yaml":  # of a model card
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.models[name] = {"main": {".gitattributes": b""}}
            if asked.get("private") or asked.get("visibility") == "private":
                self.private.add(name)
            return 200, {"url": f"{self.address}/{name}"}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._object(one) for one in json.loads(body)["objects"]]}
        _, _, _, owner, name, *rest = path.split("/")
        branches = self.models.get(f"{owner}/{name}")
        if branches is None:
            return 404, {"error": "Repository not found"}
        match method, rest:
            case "GET", []:
                return 200, {"id": f"{owner}/{name}"}
            case "POST", ["branch", branch]:
                if branch in branches:
                    return 409, {"error": "Reference already exists"}
                branches[branch] = dict(branches["main"])
                return 200, {}
            case "GET", ["tree", branch]:
                return 200, [
                    {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
                    for path, content in branches[branch].items()
                ]
            case "POST", ["preupload", _]:
                modes = [
                    {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                     "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]  # fmt: skip
                return 200, {"files": modes}
            case "POST", ["commit", branch]:
                for line in body.splitlines():
                    self._apply(json.loads(line), branches[branch])
                url = f"{self.address}/{owner}/{name}/commit/{branch}"
                return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": url}
        raise AssertionError((method, path))

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.objects:
            return asked
        return asked | {"actions": {"upload": {"href": f"{self.address}/objects/{asked['oid']}"}}}

    def _apply(self, line: dict[str, Any], files: Files) -> None:
        value = line["value"]
        match line["key"]:
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            case "deletedFile":
                del files[value["path"]]


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        status, content = 401, {"error": "Invalid username or password."}
        if path.startswith("/objects/") or self.headers.get("Authorization") == f"Bearer {self.hub.token}":
            status, content = self.hub.answer(self.command, path, body)
        text = json.dumps(content).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = _answer

    def log_message(self, *_: object) -> None:
        """Quiet."""
