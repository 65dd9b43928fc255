"""How long does training wait for batches of a corpus that lies in object storage, beside one on a local disk?

    python benchmarks/benchmark_object_storage.py

A web server in a process of its own stands for the storage: ranges, latency, one bandwidth for all answers. A corpus of
web-like lengths, large enough that no window reads all of it, is read by the loader of training with one worker; the
loop that takes its batches sleeps for as long as a GPU would compute. Every line begins with an empty cache folder, but
for "again". Tests use the same server, with faults.
"""

import argparse
import multiprocessing
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.cli import Parser
from megatron_neobert.errors import run_command

DOCUMENTS = 12_288  # made up, and repeated up to the size that is asked for
_PIECE_BYTES = 64 << 10  # sent at a time, so that simultaneous answers share the bandwidth
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
    latency_seconds: float = 0.0  # before each answer
    bytes_per_second: float = float("inf")  # of all answers together
    fault_of: Callable[[str, str], Fault] = lambda method, name: None
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    _free_at: float = 0.0  # when what was sent so far has left
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_for_bandwidth(self, size: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_second
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))

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
        time.sleep(served.latency_seconds)
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
        for first in range(0, len(body), _PIECE_BYTES):
            piece = body[first : first + _PIECE_BYTES]
            served.wait_for_bandwidth(len(piece))
            self.wfile.write(piece)


def main() -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--latency-ms", type=float, default=50.0, metavar="N", help="before each answer (%(default)s)")
    add("--megabytes-per-second", type=float, default=100.0, metavar="N", help="of all answers (%(default)s)")
    add("--tokens-per-second", type=float, default=300e3, metavar="N", help="that training takes (%(default)s)")
    add("--corpus-megabytes", type=int, default=2000, metavar="N", help="size of the .bin (%(default)s)")
    add("--document-block-size", type=int, nargs="+", default=[1, 256, 1024, 4096], metavar="N", help="%(default)s")
    add("--block-kib", type=int, metavar="N", help="of the cache; default as in training")
    add("--batch-size", type=int, default=128, metavar="N", help="rows of 1,024 tokens (%(default)s)")
    add("--steps", type=int, default=40, metavar="N", help="of each line (%(default)s)")
    add("--output", type=Path, metavar="FILE", help="write all figures there as JSON")
    arguments = parser.parse_args()
    from benchmarks.shared import describe_machine, print_table, write_figures
    from megatron_neobert.data.corpus import object_storage
    from megatron_neobert.data.corpus.object_storage import ObjectStorage
    from megatron_neobert.data.corpus.reader import Corpus

    if arguments.block_kib:
        object_storage.BLOCK_BYTES = arguments.block_kib << 10
    table = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        prefix, tokenizer = write_large_corpus(folder, megabytes=arguments.corpus_megabytes)
        with served(folder, arguments.latency_ms / 1e3, arguments.megabytes_per_second * 1e6) as url:
            for size in arguments.document_block_size:
                cache = folder / f"cache{size}"
                for where, again in (("local", ""), (url, ""), (url, ", again")):
                    storage = ObjectStorage(cache) if where == url else None
                    start = time.perf_counter()
                    corpus = Corpus(prefix if storage is None else f"{url}/{Path(prefix).name}", storage)
                    opening = time.perf_counter() - start
                    line = f"{'remote' if storage else 'local'}{again}, blocks of {size:,} documents"
                    table.append(
                        {"line": line, "opening s": opening, **measure(corpus, tokenizer, size, arguments, cache)}
                    )
                    print(table[-1], flush=True)
    print_table(table)
    write_figures(
        arguments.output, {"machine": describe_machine(("torch", "numpy", "fsspec", "aiohttp")), "table": table}
    )
    return 0


def write_large_corpus(folder: Path, *, megabytes: int) -> tuple[str, Any]:
    """A made-up corpus, repeated to a .bin of this size; its prefix and its tokenizer."""
    from msgspec import structs

    from benchmarks.shared import write_corpus
    from megatron_neobert.data.corpus.format import Volume, corpus_files, write_manifest
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.corpus.volumes import write_index
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
    from megatron_neobert.runtime.new_file import NewFile

    prefix, vocabulary = write_corpus(
        folder, documents=DOCUMENTS, median_tokens=368, longest=100_000, vocab_size=30_522
    )
    small = Corpus(prefix)
    times = -(-megabytes * 10**6 // small.volumes[0].end)
    ids, lengths, manifest = small.files.bin.read_bytes(), small.volumes[0].lengths, small.manifest
    counts = {name: getattr(manifest, name) * times for name in ("records", "documents", "tokens", "unknown_tokens")}
    with NewFile(folder / "P.bin") as bin_, NewFile(folder / "P.idx") as idx:
        for content in repeat(ids, times):
            bin_.write(content)
        write_index(idx, lambda: repeat(lengths, times), counts["documents"], small.dtype)
        volume = Volume(counts["documents"], counts["tokens"], bin_.commit(), idx.commit())
    replaced = structs.replace(manifest, inputs={}, volumes=[volume], **counts)
    write_manifest(corpus_files(folder / "P").manifest, replaced)
    return str(folder / "P"), load_tokenizer(vocabulary)


@contextmanager
def served(folder: Path, latency_seconds: float, bytes_per_second: float) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    context = multiprocessing.get_context("fork")  # before torch has threads
    answer, question = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(folder, latency_seconds, bytes_per_second, question), daemon=True)
    process.start()
    try:
        yield answer.recv()
    finally:
        process.terminate()
        process.join()


def _serve(folder: Path, latency_seconds: float, bytes_per_second: float, question: Any) -> None:
    with ObjectServer(folder, latency_seconds=latency_seconds, bytes_per_second=bytes_per_second).running() as server:
        question.send(server.url)
        threading.Event().wait()


def measure(corpus: Any, tokenizer: Any, block_size: int, arguments: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Takes steps at the rate of training; the first, which nothing can be read ahead of, is shown by itself."""
    from benchmarks.benchmark_loader import Job, our_stream
    from megatron_neobert.data.batches.loader import build_loader

    stream = our_stream(Job(corpus, tokenizer, 1024, arguments.batch_size, cache))
    stream = replace(stream, settings=replace(stream.settings, document_block_size=block_size))
    before, waits, tokens, began = list(cache.glob("blocks/*/*[0-9]")), [], 0, time.perf_counter()
    steps = islice(iter(build_loader(stream, num_workers=1)), arguments.steps)
    while True:
        asked = time.perf_counter()
        if (step := next(steps, None)) is None:
            break
        waits.append(time.perf_counter() - asked)
        tokens += step.real_tokens
        time.sleep(step.real_tokens / arguments.tokens_per_second)
    total = time.perf_counter() - began - waits[0]
    fetched = [path.stat().st_size for path in set(cache.glob("blocks/*/*[0-9]")) - set(before)]
    return {
        "first step s": waits[0],
        "% waiting": 100 * sum(waits[1:]) / total,
        "longest wait s": max(waits[1:]),
        "blocks": len(fetched),
        "bytes/token": sum(fetched) / tokens,
    }


if __name__ == "__main__":
    run_command(main)
