"""A web server that stands for object storage, with range requests and faults."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, NamedTuple

# "503" is the status; "cut" ends the connection within the body; "short" announces and sends one byte less.
Fault = Literal["503", "cut", "short", None]


class Request(NamedTuple):
    """A request for a range of a file, and the number of bytes in the answer's body."""

    method: str
    name: str
    begin: int
    bytes: int


@dataclass
class ObjectServer:
    """A server of the files in a folder, which records all requests."""

    folder: Path
    # Called with the method and the name of the file of each request.
    fault_of: Callable[[str, str], Fault] = lambda method, name: None
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    has_ranges: bool = True  # False: requests for a range are answered with the whole file

    @contextmanager
    def running(self) -> Iterator["ObjectServer"]:
        """Answer in threads of this process until the block ends."""
        handler = type("Handler", (_Handler,), {"object_server": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    object_server: ObjectServer
    # With this version, connections stay open.
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.object_server
        path = server.folder / self.path.partition("?")[0].lstrip("/")
        fault = server.fault_of(self.command, path.name)
        if fault == "503" or not path.is_file():
            server.requests.append(Request(self.command, path.name, 0, 0))
            self.send_response(503 if fault else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = path.stat()
        begin, end = 0, status.st_size
        requested = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if server.has_ranges else None
        if requested:
            begin, end = int(requested[1]), min(int(requested[2]) + 1, end)
        with path.open("rb") as file:
            file.seek(begin)
            body = file.read(end - begin) if self.command == "GET" else b""
        size = end - begin
        if fault == "short":
            body = body[:-1]
            size -= 1
        server.requests.append(Request(self.command, path.name, begin, len(body)))
        self.send_response(206 if requested else 200)
        for name, value in (
            ("Content-Length", str(size)),
            ("Accept-Ranges", "bytes" if server.has_ranges else "none"),
            ("ETag", f'"{status.st_size}-{status.st_mtime_ns}"'),
        ):
            self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)

    do_HEAD = do_GET
