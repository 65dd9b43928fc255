"""A web server that stands for object storage: ranges and faults."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, NamedTuple

Fault = Literal["503", "cut", "short", None]  # refused; the connection ends in the body; less is sent, and said so


class Request(NamedTuple):
    method: str
    name: str  # of the file
    begin: int  # of the range that was asked for
    bytes: int  # of the answer's body


@dataclass
class ObjectServer:
    """What a server serves, how, and what it was asked for."""

    folder: Path
    fault_of: Callable[[str, str], Fault] = lambda method, name: None
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def running(self, port: int = 0) -> Iterator["ObjectServer"]:
        """Answers in threads of this process until the block ends."""
        served = self

        class Handler(_Handler):
            server_ = served

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server_: ObjectServer
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        served, path = self.server_, self.server_.folder / self.path.lstrip("/")
        fault = served.fault_of(self.command, path.name)
        if fault == "503" or not path.is_file():
            served.requests.append(Request(self.command, path.name, 0, 0))
            self.send_response(503 if fault else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = path.stat()
        begin, end = 0, status.st_size
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            begin, end = int(found[1]), min(int(found[2]) + 1, end)
        with path.open("rb") as file:
            file.seek(begin)
            body = file.read(end - begin) if self.command == "GET" else b""
        size = end - begin
        if fault == "short":
            body = body[:-1]
            size -= 1
        served.requests.append(Request(self.command, path.name, begin, len(body)))
        self.send_response(206 if found else 200)
        for name, value in (
            ("Content-Length", str(size)),
            ("Accept-Ranges", "bytes"),
            ("ETag", f'"{status.st_size}-{status.st_mtime_ns}"'),
        ):
            self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)
