"""A run that resumes where another one stopped: the same bytes, and nothing done twice without need."""

import pytest
from unit.data.preprocess_place import add_mixed_shards

from megatron_neobert.data.preprocessing import run as run_module
from megatron_neobert.data.preprocessing.chunks import tokenize_chunk
from megatron_neobert.data.preprocessing.plan import is_complete, plan_preprocessing


class StoppedByTest(Exception):
    """Stands for whatever ends a run."""


@pytest.fixture
def done(monkeypatch):
    """Names of the shards whose chunks are tokenized; `done.limit` chunks are, then the run ends."""

    class Done(list):
        limit = None

    names = Done()

    def tokenize(job):
        if names.limit == len(names):
            raise StoppedByTest
        names.append(job.chunk.path.rpartition("/")[2])
        return tokenize_chunk(job)

    monkeypatch.setattr(run_module, "tokenize_chunk", tokenize)
    return names


def stop_after(place, done, chunks, **settings):
    done.clear()
    done.limit = chunks
    with pytest.raises(StoppedByTest):
        place.run(**settings)
    done.limit = None
    done.clear()


@pytest.mark.parametrize("finished", range(7))
def test_resumed_run_does_the_rest_and_ends_with_the_same_bytes(place, done, finished):
    add_mixed_shards(place)
    place.run("whole")
    done.clear()
    stop_after(place, done, finished)
    assert (place.folder / "out" / "run_content_document.partial").exists() == (finished > 0)
    place.run(resume=True)
    assert len(done) == 7 - finished
    assert place.contents() == place.contents("whole")


def test_shards_may_be_added_and_left_out_between_two_runs(place, done):
    for name in ("b", "c", "d"):
        place.add_texts(f"{name}.jsonl", f"hello xyz {name}")
    stop_after(place, done, 2)
    (place.shards / "c.jsonl").unlink()
    place.add_texts("a.jsonl", "world")
    place.run(resume=True)
    assert done == ["a.jsonl", "d.jsonl"]
    place.run("fresh")
    assert place.contents() == place.contents("fresh")


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("ids", lambda content: content[:-2]),
        ("ids", lambda content: bytes(len(content))),  # as some file systems leave it when the machine crashes
        ("lengths", lambda content: bytes(len(content))),
        ("done", lambda content: b""),
        ("done", lambda content: bytes(len(content))),
    ],
)
def test_chunk_whose_files_are_damaged_is_done_again(place, done, kind, spoil):
    add_mixed_shards(place)
    place.run("whole")
    stop_after(place, done, 4)
    spoilt = sorted((place.folder / "out" / "run_content_document.partial").glob(f"*.{kind}"))[0]
    spoilt.write_bytes(spoil(spoilt.read_bytes()))
    place.run(resume=True)
    assert len(done) == 7 - 4 + 1
    assert place.contents() == place.contents("whole")


@pytest.mark.parametrize("change", ["order", "layout", "shard", "attributes", "filters", "more inputs", "newer input"])
def test_corpus_that_is_not_what_is_asked_for_is_not_complete(place, change):
    place.add_texts("a.jsonl", "hello")
    place.add_texts("b.jsonl", "world")
    inputs = tuple(str(place.shards / name) for name in ("a.jsonl", "b.jsonl"))
    place.run(inputs=inputs, shard_size=1)
    same = {"inputs": inputs, "shard_size": 1, "resume": True}
    assert is_complete(plan_preprocessing(place.settings(**same)))
    if change == "order":
        same["inputs"] = inputs[::-1]
    elif change == "layout":
        same["shard_size"] = None
    elif change == "shard":
        (place.folder / "out" / "run_content_document_00001.bin").unlink()
    elif change == "attributes":
        same["record_keys"] = ("from",)
    elif change == "filters":
        same["max_document_bytes"] = 100
    elif change == "more inputs":
        place.add_texts("c.jsonl", "hello")
        same["inputs"] = (*inputs, str(place.shards / "c.jsonl"))
    else:
        place.add_texts("a.jsonl", "hallo")
    assert not is_complete(plan_preprocessing(place.settings(**same)))


@pytest.mark.parametrize("end", ["bin", "idx", "json"])
def test_corpus_whose_validation_documents_are_missing_is_not_complete(place, end):
    place.add_texts("a.jsonl", *(f"hello {'world ' * number}" for number in range(100)))
    settings = {"split_validation": 0.3, "resume": True}
    place.run(**settings)
    assert is_complete(plan_preprocessing(place.settings(**settings)))
    (place.folder / "out" / f"run_content_document_validation.{end}").unlink()
    assert not is_complete(plan_preprocessing(place.settings(**settings)))


def test_overwriting_run_that_is_resumed_is_not_complete_before_its_end(place, done):
    add_mixed_shards(place)
    place.run()
    stop_after(place, done, 3, overwrite=True, max_document_bytes=1000)
    again = {"overwrite": True, "resume": True, "max_document_bytes": 1000}
    assert not is_complete(plan_preprocessing(place.settings(**again)))
    place.run(**again)
    assert len(done) == 4
    assert place.corpus().manifest.filters["max_document_bytes"] == 1000
