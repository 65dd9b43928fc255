"""Every command that reads files of strangers, given each hostile kind of them.

Nothing in the files runs, nothing is asked of the network, nothing hangs, no control sequence reaches the terminal, and
no command ends in a traceback. `READERS` has every command that reads such files and `OTHERS` every other; a new
command must be added to one of the two.
"""

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import good_inputs as good
import pytest
import torch
import transformers
import yaml
from good_inputs import Inputs, Reader
from hostile import Canary
from hostile_inputs import HOSTILE, SECRET, Hostile
from processes import Ended, run_command
from tests_tiny import TinyCorpus
from torch.distributed.checkpoint import FileSystemReader

from megatron_neobert.__main__ import FUNCTIONS

PRELOADED = "reading_preloaded"
LIMIT_SECONDS = 120  # a command that is not done by then waits for a pipe; the slowest took 15 s
REFUSALS = (2, 65, 66, 78)

_TINY_FINE_TUNING = (
    "--epochs 1 --batch-size 8 --learning-rate 1e-3 --weight-decay 0 --seeds 0 --device cpu --max-length 16"
)
READERS = (
    Reader("preprocess", ("texts", "tokenizer"), lambda the, out: [
        "--input", the.texts, "--output-prefix", out / "P", "--tokenizer-model", the.tokenizer]),
    Reader("train-tokenizer", ("texts",), lambda the, out: [
        "--input", the.texts, "--output", out, "--vocab-size", 120]),
    Reader("validate", ("corpus",), lambda the, out: [good.prefix_in(the.corpus), "--full"]),
    Reader("inspect data", ("corpus", "tokenizer"), lambda the, out: [
        good.prefix_in(the.corpus), "--document", 0, "--tokenizer-model", the.tokenizer]),
    Reader("find-duplicates", ("corpus",), lambda the, out: [good.prefix_in(the.corpus), "--output", out / "list"]),
    Reader("train", ("checkpoint", "corpus", "tokenizer", "settings"), lambda the, out: [
        *good.TRAINING.split(), "--data-path", good.prefix_in(the.corpus), "--tokenizer-model", the.tokenizer,
        "--config", the.settings / "train.yaml", "--load", the.checkpoint, "--save", out]),
    Reader("train --dry-run", ("checkpoint", "corpus", "tokenizer", "settings"), lambda the, out: [
        *good.TRAINING.split(), "--data-path", good.prefix_in(the.corpus), "--tokenizer-model", the.tokenizer,
        "--config", the.settings / "train.yaml", "--continue-from", the.checkpoint, "--train-iters", 3],
        opens_checkpoints=False),
    Reader("plot", ("checkpoint",), lambda the, out: [the.checkpoint, "--output", out], opens_checkpoints=False),
    Reader("inspect batch", ("checkpoint", "corpus", "settings"), lambda the, out: [
        "--load", the.checkpoint, "--iteration", 2, "--data-path", good.prefix_in(the.corpus),
        "--config", the.settings / "train.yaml", *good.TRAINING.split(), "--tokenizer-model", the.tokenizer],
        opens_checkpoints=False),
    Reader("replay", ("checkpoint",), lambda the, out: [
        "--load", the.checkpoint, "--iteration", 2, "--train-iters", 2]),
    Reader("average", ("checkpoint",), lambda the, out: [
        "--load", the.checkpoint, "--last", 1, "--output", out / "mean"]),
    Reader("convert megatron-to-hf", ("checkpoint",), lambda the, out: [
        "--load", the.checkpoint, "--output", out / "hf", "--no-verification"]),
    Reader("convert hf-to-megatron", ("model",), lambda the, out: ["--load", the.model, "--output", out / "save"]),
    Reader("verify", ("checkpoint",), lambda the, out: [the.checkpoint, the.checkpoint]),
    Reader("verify", ("model",), lambda the, out: [the.model, the.model]),
    Reader("model-card", ("model",), lambda the, out: ["--model", the.model]),
    Reader("export-onnx", ("model",), lambda the, out: ["--model", the.model, "--output", out / "onnx"]),
    Reader("evaluate glue", ("model", "dataset"), lambda the, out: [
        "--model", the.model, "--data-dir", the.dataset, "--output", out, "--tasks", "rte", "--no-transfer",
        *_TINY_FINE_TUNING.split()]),
    Reader("evaluate ner", ("model", "dataset"), lambda the, out: [
        "--model", the.model, "--data-dir", the.dataset, "--output", out, "--tasks", "tagged",
        *_TINY_FINE_TUNING.split()]),
    Reader("evaluate mteb", ("model", "dataset", "settings"), lambda the, out: [
        "--model", the.model, "--data-dir", the.dataset, "--output", out, "--tasks", "local:classes", "--device", "cpu",
        "--instructions", the.settings / "instructions.yaml"]),
    Reader("evaluate ppl", ("model", "dataset"), lambda the, out: [
        "--model", the.model, "--data", the.dataset / "texts.jsonl", "--text-key", "text", "--output", out,
        "--batch-tokens", 64, "--min-length", 2]),
    Reader("evaluate throughput", ("model",), lambda the, out: [
        "--model", the.model, "--output", out, "--lengths", 16, "--batch-sizes", 1, "--steps", 1, "--warmup", 1]),
    Reader("finetune", ("model", "dataset", "settings"), lambda the, out: [
        "--model", the.model, "--config", the.settings / "contrastive.yaml", "--data-dir", the.dataset,
        "--output", out, "--device", "cpu"]),
    Reader("report", ("records",), lambda the, out: ["--results", the.records, "--output", out]),
)  # fmt: skip
OTHERS = {
    "sample-corpus": "reads the installed packages",
    "adopt": "writes a manifest beside the user's own files; the files of a corpus are tested with the other commands",
    "fetch mteb": "reads the Hub", "fetch contrastive": "reads the Hub",
    "check environment": "reads this machine", "check parity": "draws its own weights",
}  # fmt: skip
RANK = "megatron_neobert.pretrain"  # the launcher would start torchrun


def must_refuse(reader: Reader, hostile: Hostile) -> bool:
    if hostile.refused_by is None:
        return hostile.kind != "checkpoint" or reader.opens_checkpoints
    return reader.command in hostile.refused_by


def cases() -> Iterator[Any]:
    """Yield every hostile input with every command that reads its kind.

    `make test` gives each command one hostile input of each kind, and each hostile input to one command that must
    refuse it; `make test-all` has all pairs.
    """
    first = {kind: next(one for one in HOSTILE if one.kind == kind and not one.refused_by) for kind in Inputs._fields}
    for number, hostile in enumerate(HOSTILE):
        readers = [reader for reader in READERS if hostile.kind in reader.kinds]
        refusing = [reader for reader in readers if must_refuse(reader, hostile)] or readers
        for reader in readers:
            is_quick = hostile is first[hostile.kind] or reader is refusing[number % len(refusing)]
            marks = [] if is_quick else [pytest.mark.slow]
            yield pytest.param(reader, hostile, id=f"{reader.command}, {hostile.kind}: {hostile.name}", marks=marks)


class Network:
    """A proxy on the loopback interface that counts connections and answers none."""

    def __init__(self) -> None:
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed
                return
            self.connections += 1
            connection.close()

    @property
    def environment(self) -> dict[str, str]:
        address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "all_proxy")
        proxies = {spelling: address for name in names for spelling in (name, name.upper())}
        return {**proxies, "no_proxy": "", "NO_PROXY": "", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.listener.close()


@pytest.fixture(scope="session")
def inputs(tiny_corpus: TinyCorpus, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Valid inputs of every kind."""
    place = tmp_path_factory.mktemp("inputs")
    texts = good.write_texts(place / "texts")
    corpus = place / "corpus"
    corpus.mkdir()
    prefix = Path(tiny_corpus.prefix)
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        shutil.copy(path, corpus)
    inputs = Inputs(
        model=good.write_model(place / "model"),
        checkpoint=trained,
        corpus=corpus,
        dataset=good.write_dataset(place / "dataset"),
        records=place / "records",
        texts=texts,
        tokenizer=Path(tiny_corpus.tokenizer),
        settings=good.write_settings(place / "settings"),
    )
    for reader in READERS:
        if reader.command in ("evaluate ppl", "evaluate throughput"):
            words = (*reader.command.split(), *reader.words(inputs, inputs.records))
            result = run_command("megatron_neobert.__main__", *words, preload=PRELOADED)
            assert result.code == 0, result.output
    return inputs


@pytest.fixture
def start(inputs: Inputs, tmp_path: Path, network: Network) -> Callable[..., Ended]:
    """Run a reader on the valid inputs but for those that are given."""

    def run(reader: Reader, **changed: Path) -> Ended:
        environment = {
            **network.environment,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_DATASETS_CACHE": str(tmp_path / "hf"),
        }
        words = reader.words(inputs._replace(**changed), tmp_path / "output")
        if reader.command == "train":
            module = RANK
        else:
            module, words = "megatron_neobert.__main__", [*reader.command.split(), *words]
        return run_command(module, *words, environment=environment, preload=PRELOADED, limit_seconds=LIMIT_SECONDS)

    return run


def test_every_command_is_tested_or_reads_nothing_of_strangers():
    assert {reader.command.removesuffix(" --dry-run") for reader in READERS} | set(OTHERS) == set(FUNCTIONS)
    assert {hostile.kind for hostile in HOSTILE} == {kind for reader in READERS for kind in reader.kinds}
    assert {kind for reader in READERS for kind in reader.kinds} == set(Inputs._fields)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.command)
def test_command_reads_valid_inputs(reader: Reader, start: Callable[..., Ended], network: Network):
    before = network.connections
    result = start(reader)
    assert result.code == 0, result.output
    assert network.connections == before


def load_sentence_transformer(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(str(folder), device="cpu", local_files_only=True, trust_remote_code=False)


def load_with_code(auto_class: str) -> Callable[[Path], object]:
    return lambda folder: getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True)


TRUSTING = {
    "modules: router of a nested model": load_sentence_transformer,
    "settings that allow pickles": load_sentence_transformer,
    "own architecture": load_with_code("AutoModelForMaskedLM"),
    "own code": load_with_code("AutoTokenizer"),
    "state dict that runs code": lambda folder: torch.load(folder / "state_dict.pt", weights_only=False),
    "format of megatron.core": lambda folder: FileSystemReader(next(folder.glob("iter_*"))).read_metadata(),
    "record that calls": lambda folder: yaml.unsafe_load(next(folder.glob("iter_*/settings.yaml")).read_text()),
}


@pytest.mark.parametrize(
    "hostile",
    [one for one in HOSTILE if one.name in TRUSTING],
    ids=lambda hostile: hostile.name,
)
def test_control_reader_that_trusts_the_input_runs_the_canary(
    hostile: Hostile, inputs: Inputs, canary: Canary, tmp_path: Path
):
    shutil.copytree(getattr(inputs, hostile.kind), tmp_path / "copy")
    hostile.spoil(tmp_path / "copy", canary)
    with suppress(Exception):  # what comes out of a pickle is no model
        TRUSTING[hostile.name](tmp_path / "copy")
    assert canary.has_run


@pytest.mark.parametrize(("reader", "hostile"), cases())
def test_hostile_input_runs_nothing_asks_nobody_and_is_refused_in_a_sentence(
    reader: Reader,
    hostile: Hostile,
    inputs: Inputs,
    start: Callable[..., Ended],
    network: Network,
    canary: Canary,
    tmp_path: Path,
):
    original = getattr(inputs, hostile.kind)
    copy = tmp_path / "strangers" / original.name
    shutil.copytree(original, copy)
    hostile.spoil(copy, canary)
    before = network.connections
    result = start(reader, **{hostile.kind: copy})
    assert not canary.has_run
    assert network.connections == before
    assert result.code in REFUSALS or (result.code == 0 and not must_refuse(reader, hostile)), result.output
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output
    output = tmp_path / "output"
    written = [path for path in output.rglob("*") if path.is_file()]
    if result.code:
        assert result.errors, result.output
        assert written or not output.exists(), "a refusal leaves no empty folder"
    assert not any(SECRET.encode() in path.read_bytes() for path in written)
