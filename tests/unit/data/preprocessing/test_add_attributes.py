"""`neobert add-attributes`: values, refusals, kills at every moment, and runs that continue after an addition."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ENVIRONMENT, call, run_forked
from processes import run_command
from unit.data.preprocess_workspace import Workspace, decoded, random_text

from megatron_neobert.data.corpus.attributes import ChosenDocuments, choose_documents, read_attributes
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.data.preprocessing import add_attributes

DOCUMENTS = 50
FUNCTIONS = """
import math, re
import numpy as np

def score(record):
    words = record.text.split()
    return {"words": len(words), "quality": np.float64(len(words)) / 3 if record.fields["score"] else None}

def tripled(record):
    return {"tripled": 3 * record.fields["words"], "where_from": record.shard[-7:]}

def broken(record): return {"ratio": 1 / (record.fields["number"] - 7)}
def other_names(record): return {"a" if record.fields["number"] < 7 else "b": 1}
def no_dict(record): return 0.5
def nothing(record): return {}
def float32(record): return {"a": np.float32(1)}
def derived(record): return {"length": 1}
def keyword(record): return {"class": 1}
"""


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    """A corpus of 50 documents in several corpus shards, with the attributes number and score, and FUNCTIONS."""
    workspace, generator = Workspace(tmp_path), np.random.default_rng(0)
    for name in ("a.jsonl", "b.jsonl"):
        texts = [random_text(generator, tokens) for tokens in generator.integers(1, 9, DOCUMENTS // 2)]
        fields = [{"content": text, "number": number, "score": number % 3} for number, text in enumerate(texts)]
        workspace.add_lines(name, *map(json.dumps, fields))
    workspace.run(record_keys=("number", "score"), shard_size=100)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return workspace


def add(workspace, function, *more, run=call):
    place = workspace.folder
    return run(
        "add-attributes", workspace.corpus().prefix, "--function", f"{place}/functions.py:{function}",
        "--tokenizer-model", workspace.vocab, *more,
    )  # fmt: skip


@pytest.mark.parametrize(("chunk", "workers"), [(1 << 14, 1), (7, 1), (7, 2)])
def test_values_equal_those_of_a_plain_loop_and_choose_documents(workspace, monkeypatch, chunk, workers):
    monkeypatch.setattr(add_attributes, "CHUNK_DOCUMENTS", chunk)
    before = workspace.contents()
    code, output, errors = add(workspace, "score", "--workers", workers)
    assert (code, output) == (0, f"{workspace.corpus().prefix}: 50 documents have words, quality\n"), errors
    code, _, errors = add(workspace, "tripled", "--workers", workers)
    assert code == 0, errors
    corpus = workspace.corpus()
    check_content(corpus)
    expected = []
    for number, text in enumerate(decoded(workspace)):
        words, record = len(text.split()), number % 25
        expected.append({
            "number": record, "score": record % 3, "words": words, "quality": words / 3 if record % 3 else None,
            "tripled": 3 * words, "where_from": "a.jsonl" if number < 25 else "b.jsonl",
            "length": corpus.document(number).size, "input": str(workspace.inputs / f"{'ab'[number // 25]}.jsonl"),
        })  # fmt: skip
    assert list(read_attributes(corpus, range(DOCUMENTS))) == expected
    assert list(read_attributes(corpus, range(20, 31))) == expected[20:31]
    chosen = ChosenDocuments(choose_documents(corpus, ["quality>1 and number<20 and tripled>0"]), range(DOCUMENTS))
    matching = [n for n, row in enumerate(expected) if (row["quality"] or 0) > 1 and row["number"] < 20]
    assert chosen.numbers(np.arange(len(chosen))).tolist() == matching and matching
    after = workspace.contents()
    assert {name for name in before if before[name] != after[name]} == {"content_document.json"}
    added = {f"content_document.attributes_0000{number}.parquet" for number in range(2)}
    assert after.keys() - before.keys() == added


REFUSED = [
    ("broken", 65, "functions:broken, document 7 of .*ZeroDivisionError: division by zero; correct the function"),
    ("other_names", 65, r"document 7 of .* returned the attributes \['b'\] instead of \['a'\], those of document 0"),
    ("no_dict", 65, "document 0 of .* returned float instead of a dict"),
    ("nothing", 65, "returned no attribute"),
    ("float32", 65, "returned 'a' as float32 instead of bool, int, float, str or None"),
    ("derived", 2, "has the attribute length already"),
    ("keyword", 2, "'class' cannot name an attribute"),
    ("missing", 2, "--function "),
]


@pytest.mark.parametrize(("function", "code", "message"), REFUSED)
def test_function_that_fails_or_returns_something_else_is_refused_and_leaves_no_file(
    workspace, function, code, message
):
    before = workspace.contents()
    ended = add(workspace, function)
    assert ended[0] == code and re.search(message, ended[2]) and "Traceback" not in ended[2]
    assert workspace.contents() == before


KILLED = """
import os, signal, sys
from megatron_neobert.data.preprocessing import add_attributes
add_attributes.CHUNK_DOCUMENTS, calls, sync = 20, 0, os.fsync
compute = add_attributes.compute_attributes
def count():
    global calls
    calls += 1
    if calls == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
def fsync(descriptor):
    count()
    sync(descriptor)
def computed(*arguments):
    count()
    return compute(*arguments)
os.fsync, add_attributes.compute_attributes = fsync, computed
prefix, function, tokenizer = sys.argv[1:4]
options = add_attributes.AddSettings(prefix=prefix, function=function, tokenizer_model=tokenizer, resume=True)
add_attributes.print_added_attributes(options)
print(calls)
"""


def run_killed(workspace, at):
    function = f"{workspace.folder}/functions.py:score"
    command = [sys.executable, "-c", KILLED, workspace.corpus().prefix, function, workspace.vocab, str(at)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)


def test_killed_at_any_moment_the_corpus_is_sound_and_resumed_it_is_the_same(workspace):
    out, backup = workspace.folder / "out", workspace.folder / "backup"
    shutil.copytree(out, backup)
    whole = run_killed(workspace, 0)
    assert whole.returncode == 0, whole.stderr
    expected, last = workspace.contents(), int(whole.stdout.split()[-1])
    assert last > 8
    for at in range(1, last + 1):
        shutil.rmtree(out)
        shutil.copytree(backup, out)
        assert run_killed(workspace, at).returncode == -9
        check_content(workspace.corpus())
        code, _, errors = add(workspace, "score", "--resume", run=resumed)
        assert code == 0, (at, errors)
        remains = {path for path in out.iterdir() if "json." in path.name}
        for path in remains:  # a temporary file of the killed process
            path.unlink()
        assert workspace.contents() == expected, at


def resumed(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(add_attributes, "CHUNK_DOCUMENTS", 20)
        return call(*arguments)


def test_second_run_changes_nothing_and_another_function_must_start_anew(workspace, monkeypatch):
    assert add(workspace, "score")[0] == 0
    contents = workspace.contents()
    assert add(workspace, "score", "--resume")[0] == add(workspace, "score")[0] == 0
    assert workspace.contents() == contents
    monkeypatch.setattr(add_attributes, "CHUNK_DOCUMENTS", 5)
    assert add(workspace, "broken")[0] == 65
    # A run that has nothing to do keeps the unfinished work of another function.
    kept = sorted(workspace.folder.glob("out/*.attributes.partial/*"))
    assert add(workspace, "score", "--resume")[0] == 0
    assert sorted(workspace.folder.glob("out/*.attributes.partial/*")) == kept and len(kept) > 2
    (workspace.folder / "functions.py").write_text(FUNCTIONS.replace("- 7", "- 99"))
    code, _, errors = add(workspace, "broken", "--resume")
    assert code == 2 and "belongs to a run with function functions:broken" in errors
    assert add(workspace, "broken", "--overwrite")[0] == 0
    assert "has the attribute words already; choose another name" in add(workspace, "score")[2]
    check_content(workspace.corpus())


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_validate_finds_a_damaged_file_of_added_attributes_and_overwriting_removes_all(workspace, damage):
    add(workspace, "score")
    path = workspace.corpus().files.added_attributes(0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[: -1 if damage == "cut" else None])
    if damage == "missing":
        path.unlink()
    code, _, errors = call("validate", workspace.folder / "out" / "run_content_document", "--full")
    assert code == 65 and path.name in errors
    workspace.run(overwrite=True)
    workspace.run("fresh")
    assert workspace.contents() == workspace.contents("fresh") and len(workspace.contents()) == 3


TRAINING = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 2 --lr-warmup-iters 1 --lr-decay-iters 2 --eval-iters 0 "
    "--num-workers 0 --log-interval 1"
)


def test_a_run_resumes_after_attributes_were_added(tiny_corpus, tmp_path):
    corpus = shutil.copytree(Path(tiny_corpus.prefix).parent, tmp_path / "corpus")
    prefix, save = corpus / Path(tiny_corpus.prefix).name, tmp_path / "save"
    data = ("--data-path", f"{prefix}:where=length>3", "--tokenizer-model", tiny_corpus.tokenizer)

    def train(*more):
        return run_command("megatron_neobert.pretrain", *TRAINING.split(), *data, *more)

    ended = train("--train-iters", "1", "--save", save)
    assert ended.code == 0, ended.output
    (tmp_path / "functions.py").write_text("def words(record): return {'words': len(record.text.split())}")
    ended = run_forked(
        "add-attributes", prefix, "--function", tmp_path / "functions.py:words", *data[2:], "--workers", 2
    )
    assert ended.code == 0, ended.output
    assert Corpus(prefix).manifest.added_attributes
    ended = train("--train-iters", "2", "--load", save)
    assert ended.code == 0 and "iteration 2/2" in ended.output, ended.output
