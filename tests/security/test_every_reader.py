"""Every command that reads files, with every hostile input of the kinds that it reads.

No code in the files runs, no command connects to the network, hangs or ends in a traceback, and no control sequence
reaches the terminal. `READERS` has every command that reads files of users, and `OTHERS` the rest; a new command must
be added to one of them.
"""

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import good_inputs as good
import pytest
import transformers
import yaml
from good_inputs import Inputs, Reader
from hostile_inputs import HOSTILE, Hostile
from processes import Ended, run_command
from tests_tiny import TinyCorpus
from torch.distributed.checkpoint import FileSystemReader
from unit.data.small_corpus import random_documents, write_corpus

from megatron_neobert.__main__ import NAMES
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

PRELOADED = "reading_preloaded"
LIMIT_SECONDS = 120  # beyond it, a command waits for a pipe; the slowest took 15 s
REFUSALS = (2, 65, 66, 78)

_TRAIN = f"{good.TRAINING} --data-path {{prefix}} --tokenizer-model {{tokenizer}} --config {{settings}}/train.yaml"
_TINY_FINE_TUNING = (
    "--epochs 1 --batch-size 8 --learning-rate 1e-3 --weight-decay 0 --seeds 0 --device cpu --max-length 16"
)
_EVALUATE = "--model {model} --data-dir {dataset} --output {output}"
READERS = (
    Reader("preprocess", ("texts", "tokenizer"),
           "--input {texts} --output-prefix {output}/P --tokenizer-model {tokenizer}"),
    Reader("train-tokenizer", ("texts",), "--input {texts} --output {output} --vocab-size 120"),
    Reader("validate", ("corpus",), "{prefix} --full"),
    Reader("inspect data", ("corpus", "tokenizer"), "{prefix} --document 0 --tokenizer-model {tokenizer}"),
    Reader("find-duplicates", ("corpus",), "{prefix} --output {output}/list"),
    Reader("find-overlaps", ("corpus",), "{prefix} --against {settings}/evaluated --output {output}/list"),
    Reader("train", ("checkpoint", "corpus", "tokenizer", "settings"),
           f"{_TRAIN} --load {{checkpoint}} --save {{output}}"),
    Reader("train --dry-run", ("checkpoint", "corpus", "tokenizer", "settings"),
           f"{_TRAIN} --continue-from {{checkpoint}} --train-iters 3", opens_checkpoints=False),
    Reader("plot", ("checkpoint",), "{checkpoint} --output {output}", opens_checkpoints=False),
    Reader("inspect batch", ("checkpoint", "corpus", "settings"),
           f"--load {{checkpoint}} --iteration 2 {_TRAIN}", opens_checkpoints=False),
    Reader("replay", ("checkpoint",), "--load {checkpoint} --iteration 2 --train-iters 2"),
    Reader("average", ("checkpoint",), "--load {checkpoint} --last 1 --output {output}/mean"),
    Reader("convert megatron-to-hf", ("checkpoint",), "--load {checkpoint} --output {output}/hf --no-verification"),
    Reader("convert hf-to-megatron", ("model",), "--load {model} --output {output}/save"),
    Reader("verify", ("checkpoint",), "{checkpoint} {checkpoint}"),
    Reader("verify", ("model",), "{model} {model}"),
    Reader("export-onnx", ("model",), "--model {model} --output {output}/onnx"),
    Reader("evaluate glue", ("model", "dataset"), f"{_EVALUATE} --tasks rte --no-transfer {_TINY_FINE_TUNING}"),
    Reader("evaluate classify", ("model", "dataset"), f"{_EVALUATE} --tasks rte {_TINY_FINE_TUNING}"),
    Reader("evaluate ner", ("model", "dataset"), f"{_EVALUATE} --tasks tagged {_TINY_FINE_TUNING}"),
    Reader("evaluate mteb", ("model", "dataset", "settings"),
           f"{_EVALUATE} --tasks BIOSSES --device cpu --instructions {{settings}}/instructions.yaml"),
    Reader("evaluate ppl", ("model", "dataset"), "--model {model} --data {dataset}/texts.jsonl --text-key text "
           "--output {output} --batch-tokens 64 --min-length 2"),
    Reader("evaluate throughput", ("model",),
           "--model {model} --output {output} --lengths 16 --batch-sizes 1 --steps 1 --warmup 1"),
    Reader("train-embedder", ("model", "dataset", "settings"),
           f"{_EVALUATE} --config {{settings}}/contrastive.yaml --device cpu"),
    Reader("report", ("records",), "--results {records} --output {output}"),
)  # fmt: skip
OTHERS = {
    "sample-corpus": "reads the installed packages",
    "adopt": "writes a manifest beside the user's own files; the files of a corpus are tested with the other commands",
    "fetch mteb": "reads the Hub",
    "check environment": "reads this machine", "check parity": "draws its own weights", "recipe": "reads no file",
}  # fmt: skip
RANK = "megatron_neobert.pretrain"


def must_refuse(reader: Reader, hostile: Hostile) -> bool:
    if hostile.refused_by is None:
        return hostile.kind != "checkpoint" or reader.opens_checkpoints
    return reader.command in hostile.refused_by


def cases() -> Iterator[Any]:
    """Yield every hostile input with every command that reads its kind.

    `make test` runs each command with one hostile input of each kind, and each hostile input with one command that must
    refuse it; `make test-all` runs all pairs.
    """
    first = {hostile.kind: hostile for hostile in reversed(HOSTILE) if not hostile.refused_by}
    for number, hostile in enumerate(HOSTILE):
        readers = [reader for reader in READERS if hostile.kind in reader.kinds]
        refusing = [reader for reader in readers if must_refuse(reader, hostile)] or readers
        for reader in readers:
            is_quick = hostile is first[hostile.kind] or reader is refusing[number % len(refusing)]
            marks = [] if is_quick else [pytest.mark.slow]
            yield pytest.param(reader, hostile, id=f"{reader.command}, {hostile.kind}: {hostile.name}", marks=marks)


@pytest.fixture
def proxy() -> Iterator[socket.socket]:
    """Socket of an HTTP proxy that accepts no connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def assert_no_connection(proxy: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        proxy.accept()


@pytest.fixture(scope="session")
def inputs(tiny_corpus: TinyCorpus, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Valid inputs of every kind."""
    folder = tmp_path_factory.mktemp("inputs")
    inputs = Inputs(
        model=good.write_model(folder / "model"),
        checkpoint=trained,
        corpus=Path(tiny_corpus.prefix).parent,
        dataset=good.write_dataset(folder / "dataset"),
        records=folder / "records",
        texts=good.write_texts(folder / "texts"),
        tokenizer=Path(tiny_corpus.tokenizer),
        settings=good.write_settings(folder / "settings"),
    )
    texts = random_documents([30, 40], tiny_corpus.vocab_size)
    write_corpus(inputs.settings / "evaluated", texts, load_tokenizer(Path(tiny_corpus.tokenizer)))
    for reader in READERS:
        if reader.command in ("evaluate ppl", "evaluate throughput"):
            arguments = (*reader.command.split(), *reader.arguments(inputs, inputs.records))
            ended = run_command("megatron_neobert.__main__", *arguments, preload=PRELOADED)
            assert ended.code == 0, ended.output
    return inputs


@pytest.fixture
def start(inputs: Inputs, tmp_path: Path, proxy: socket.socket) -> Callable[..., Ended]:
    """Return a function that runs a reader on the valid inputs, except those that replace them."""

    def run(reader: Reader, **replaced: Path) -> Ended:
        environment = dict.fromkeys(("HF_HOME", "HF_DATASETS_CACHE"), str(tmp_path / "hf"))
        environment |= {"no_proxy": "", "NO_PROXY": "", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"}
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
            environment |= {name: address, name.upper(): address}
        command = reader.command.split()
        # `neobert train` would become another process, so the module of a rank is started instead.
        module, words = (RANK, []) if reader.command == "train" else ("megatron_neobert.__main__", command)
        words += reader.arguments(inputs._replace(**replaced), tmp_path / "output")
        return run_command(module, *words, environment=environment, preload=PRELOADED, limit_seconds=LIMIT_SECONDS)

    return run


def test_every_command_is_in_one_of_the_two_tables_and_every_kind_has_a_hostile_input():
    assert {reader.command.removesuffix(" --dry-run") for reader in READERS} | set(OTHERS) == set(NAMES)
    assert {hostile.kind for hostile in HOSTILE} == {kind for reader in READERS for kind in reader.kinds}
    assert {kind for reader in READERS for kind in reader.kinds} == set(Inputs._fields)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.command)
def test_command_reads_valid_inputs_without_a_connection(reader, start, proxy):
    ended = start(reader)
    assert_no_connection(proxy)
    assert ended.code == 0, ended.output


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
    "format of megatron.core": lambda folder: FileSystemReader(next(folder.glob("iter_*"))).read_metadata(),
    "record that calls": lambda folder: yaml.unsafe_load(next(folder.glob("iter_*/settings.yaml")).read_text()),
}


@pytest.mark.parametrize(
    "hostile", [hostile for hostile in HOSTILE if hostile.name in TRUSTING], ids=lambda hostile: hostile.name
)
def test_control_reader_that_trusts_the_input_runs_the_canary(hostile, inputs, canary, tmp_path):
    shutil.copytree(getattr(inputs, hostile.kind), tmp_path / "copy")
    hostile.spoil(tmp_path / "copy", canary)
    with suppress(Exception):  # the unpickled object is not a model
        TRUSTING[hostile.name](tmp_path / "copy")
    assert canary.has_run


@pytest.mark.parametrize(("reader", "hostile"), list(cases()))
def test_hostile_input_runs_no_code_opens_no_connection_and_is_refused_in_one_sentence(
    reader, hostile, inputs, start, proxy, canary, tmp_path
):
    original = getattr(inputs, hostile.kind)
    copy = tmp_path / "strangers" / original.name
    shutil.copytree(original, copy)
    hostile.spoil(copy, canary)
    ended = start(reader, **{hostile.kind: copy})
    assert not canary.has_run
    assert_no_connection(proxy)
    assert ended.code in REFUSALS or (ended.code == 0 and not must_refuse(reader, hostile)), ended.output
    assert "Traceback" not in ended.output
    assert "\x1b" not in ended.output
    output = tmp_path / "output"
    written = [path for path in output.rglob("*") if path.is_file()]
    if ended.code:
        assert ended.errors, ended.output
        assert written or not output.exists(), "a refusal leaves no empty folder"
