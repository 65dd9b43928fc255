"""Fixtures that several test folders share."""

import gc
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests_tiny import TinyCorpus, build_corpus

# A job that a shell starts in the background ignores Ctrl-C, and so would every process that these tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGPIPE)
os.environ.pop("HF_HUB_OFFLINE", None)  # exported on many clusters; tests that need it set it
os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it when it is imported: before a command, which starts a cluster so
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores, several processes: one thread each

PUBLISHED = Path(__file__).with_name("published")


def pytest_collection_finish() -> None:
    """What was imported stays: a garbage collection that looks at it takes longer than many a test."""
    gc.freeze()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A command that a test calls in this process sets handlers, which would receive the signals of later tests."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def bert_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.txt of bert-base-uncased for the texts in tests/published; other pieces are unused entries."""
    rows = (PUBLISHED / "bert_base_uncased_pieces.tsv").read_text(encoding="utf-8").splitlines()
    pieces = {int(number): piece for number, piece in (row.split("\t") for row in rows)}
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text(
        "".join(f"{pieces.get(number, f'[unused{number}]')}\n" for number in range(30_522)), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    """600 documents of 1 to 160 words, Zipf-like, written by the real tools."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    texts = [
        " ".join(rng.choices(words, weights, k=min(160, int(rng.lognormvariate(3.2, 0.8)) + 1))) for _ in range(600)
    ]
    return build_corpus(tmp_path_factory.mktemp("tiny_corpus"), texts, name="tiny", vocab_size=300)


@pytest.fixture
def only_remote_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers as it is where this project is not installed: it knows NeoBERT by a folder's own code alone.

    Registering a class cannot be taken back, and a test before this one may have done so.
    """
    from transformers.models.auto import auto_factory, configuration_auto, modeling_auto

    mappings = [one for one in vars(modeling_auto).values() if isinstance(one, auto_factory._LazyAutoMapping)]
    for mapping in (configuration_auto.CONFIG_MAPPING, *mappings):
        monkeypatch.setattr(mapping, "_extra_content", {})


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """The groups of one rank, in this process."""
    from megatron_neobert.config.schema import Settings
    from megatron_neobert.runtime import distributed

    distributed.initialize(Settings())
    yield
    _leave_groups()


@pytest.fixture
def no_process_group_left() -> Iterator[None]:
    """A run that fails leaves its process group, and the next test could not form one."""
    yield
    _leave_groups()


def _leave_groups() -> None:
    import torch

    from megatron_neobert.runtime import distributed

    if torch.distributed.is_initialized():
        distributed.shut_down()
    gc.collect()  # a model's cycles keep groups, whose threads poll: of fifteen runs they take a fifth of a core
