"""A folder with a tokenizer and shards, for tests that preprocess."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.inputs.recognise import split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.data.preprocessing import plan as plan_module
from megatron_neobert.data.preprocessing.plan import PreprocessSettings, plan_preprocessing
from megatron_neobert.data.preprocessing.run import PreprocessReport, preprocess
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

WORDS = ["hello", "world", "mask", "sep", "[", "]", "xy", "##z", "zy"]


class Place:
    """A folder with a tokenizer and shards, where runs go to `run` by default."""

    def __init__(self, folder):
        self.folder = folder
        self.vocab = write_vocabulary(folder / "vocab.txt", WORDS)
        self.shards = folder / "shards"
        self.shards.mkdir()

    def settings(self, name="run", **changes) -> PreprocessSettings:
        read = {
            key: changes.pop(key)
            for key in ("text_key", "text_separator", "max_document_bytes", "record_keys")
            if key in changes
        }
        defaults = {
            "inputs": (str(self.shards),),
            "output_prefix": str(self.folder / "out" / name),
            "tokenizer_model": str(self.vocab),
            "max_error_rate": 1.0,
        }
        return PreprocessSettings(**{**defaults, **changes}, read=ReadSettings(**read))

    def run(self, name="run", **changes) -> PreprocessReport:
        return preprocess(plan_preprocessing(self.settings(name, **changes)))

    def corpus(self, name="run", *, end="") -> Corpus:
        return Corpus(self.folder / "out" / f"{name}_content_document{end}")

    def contents(self, name="run") -> dict[str, bytes]:
        """Of all files of a corpus, by the end of the name."""
        files = sorted((self.folder / "out").glob(f"{name}_content_document*"))
        return {file.name.removeprefix(f"{name}_"): file.read_bytes() for file in files}

    def add_lines(self, name, *lines):
        (self.shards / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def add_texts(self, name, *texts):
        self.add_lines(name, *(json.dumps({"content": text}) for text in texts))


def decoded(place, name="run", *, end=""):
    tokenizer, corpus = load_tokenizer(place.vocab), place.corpus(name, end=end)
    return [tokenizer.decode(corpus.document(number)) for number in range(len(corpus))]


def random_text(generator, tokens):
    return " ".join(["hello", "world", "zy", "xyz"][choice] for choice in generator.integers(0, 4, tokens))


def add_mixed_shards(place):
    """Seven shards of three formats, dirty here and there."""
    generator = np.random.default_rng(0)
    for number in range(7):
        texts = [random_text(generator, tokens) for tokens in generator.integers(1, 60, 40)]
        lines = [json.dumps({"content": text}) for text in texts]
        if number % 3 == 0:
            pq.write_table(pa.table({"content": [*texts, None]}), place.shards / f"{number}.parquet", row_group_size=7)
        elif number % 3 == 1:
            place.add_lines(
                f"{number}.jsonl", *lines, "broken", '{"content": "\\ud800 hello"}', json.dumps({"content": " "})
            )
        else:
            (place.shards / f"{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(["{}", *lines]).encode()))


def cut_small(monkeypatch, chunk_bytes):
    """Shards of a few kB in several parts each."""
    monkeypatch.setattr(
        plan_module, "split_into_chunks", lambda shard, read: split_into_chunks(shard, read, chunk_bytes=chunk_bytes)
    )
