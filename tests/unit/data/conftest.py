"""Fixtures of the tests of data."""

import functools
import http.server
import threading

import pytest


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Print nothing: a test checks that no output contains the query of a request."""


@pytest.fixture
def server(tmp_path):
    """A web server that ignores range requests and always sends whole files."""
    pytest.importorskip("aiohttp")
    handler = functools.partial(_QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
