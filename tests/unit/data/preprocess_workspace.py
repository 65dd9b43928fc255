"""A folder with a tokenizer and input files, for tests that preprocess."""

import gzip
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.corpus.format import Counts
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.inputs.recognise import split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.data.preprocessing import run as run_module
from megatron_neobert.data.preprocessing.run import PreprocessSettings, plan_preprocessing, preprocess
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.runtime.jobs import JobOptions

WORDS = ["hello", "world", "mask", "sep", "[", "]", "xy", "##z", "zy"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
LETTERS += [f"##{letter}" for letter in LETTERS]


class Workspace:
    """A folder with vocab.txt, input files in `inputs`, and corpora in `out`; the default name of a corpus is `run`."""

    def __init__(self, folder, pieces=WORDS):
        self.folder = folder
        self.vocab = write_vocabulary(folder / "vocab.txt", pieces)
        self.inputs = folder / "inputs"
        self.inputs.mkdir()

    def settings(self, name="run", **changes) -> PreprocessSettings:
        read, jobs = (
            {key.name: changes.pop(key.name) for key in fields(options) if key.name in changes}
            for options in (ReadSettings, JobOptions)
        )
        defaults = {
            "inputs": (str(self.inputs),),
            "output_prefix": str(self.folder / "out" / name),
            "tokenizer_model": str(self.vocab),
            "max_error_rate": 1.0,
        }
        return PreprocessSettings(**{**defaults, **changes}, read=ReadSettings(**read), jobs=JobOptions(**jobs))

    def run(self, name="run", **changes) -> Counts:
        return preprocess(plan_preprocessing(self.settings(name, **changes)))

    def corpus(self, name="run") -> Corpus:
        return Corpus(self.folder / "out" / f"{name}_content_document")

    def contents(self, name="run") -> dict[str, bytes]:
        """Return the content of all files of a corpus, by the end of the file name."""
        files = sorted((self.folder / "out").glob(f"{name}_content_document*"))
        return {file.name.removeprefix(f"{name}_"): file.read_bytes() for file in files}

    def add_lines(self, name, *lines):
        (self.inputs / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def add_texts(self, name, *texts):
        self.add_lines(name, *(json.dumps({"content": text}) for text in texts))


def decoded(workspace, name="run"):
    """Return the texts of all documents of a corpus."""
    tokenizer, corpus = load_tokenizer(workspace.vocab), workspace.corpus(name)
    return [tokenizer.decode(corpus.document(number)) for number in range(len(corpus))]


def add_mixed_inputs(workspace):
    """Add seven input files of three formats, with some malformed records."""
    generator = np.random.default_rng(0)
    for number in range(7):
        texts = [" ".join(generator.choice(WORDS[:4], tokens)) for tokens in generator.integers(1, 60, 40)]
        lines = [json.dumps({"content": text}) for text in texts]
        path = workspace.inputs / f"{number}"
        if number % 3 == 0:
            pq.write_table(pa.table({"content": [*texts, None]}), path.with_suffix(".parquet"), row_group_size=7)
        elif number % 3 == 1:
            bad_lines = ["broken", '{"content": "\\ud800 hello"}', json.dumps({"content": " "})]
            workspace.add_lines(f"{number}.jsonl", *lines, *bad_lines)
        else:
            path.with_suffix(".jsonl.gz").write_bytes(gzip.compress("\n".join(["{}", *lines]).encode()))


def cut_small(monkeypatch, chunk_bytes):
    """Make input files of a few kB have several chunks."""
    monkeypatch.setattr(
        run_module, "split_into_chunks", lambda path, read: split_into_chunks(path, read, chunk_bytes=chunk_bytes)
    )


def arguments_of(folder: Path, *more: object) -> tuple[object, ...]:
    """Return the arguments of a preprocessing that writes run_content_document in the folder of a workspace."""
    given = {"--input": folder / "inputs", "--output-prefix": folder / "run", "--tokenizer-model": folder / "vocab.txt"}
    return (*(word for pair in given.items() if pair[0] not in more for word in pair), *more)
