"""Corpora whose manifest, files or path are wrong are refused with file and place, and the exit code of bad data.

tests/unit/data/corpus/test_corpus.py has damage inside the index, and sizes that contradict each other.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from bad_inputs.refusals import assert_refused, start_checks
from commands import ENVIRONMENT, run
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus

from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.errors import DataError


def check_all(corpus):
    """Run the checks of `neobert validate --full` and of the start of a run."""
    opened = Corpus(corpus.prefix)
    opened.check_tokenizer(numbered_tokenizer(100))
    check_content(opened)


def test_sound_corpus_passes_every_check_and_another_tokenizer_than_its_own_does_not(corpus):
    check_all(corpus)
    start_checks(*corpus.flags)
    sentence = r"written with tokenizer [0-9a-f]{12} \(100 ids\).* \(101 ids\)"
    with pytest.raises(DataError, match=sentence):
        Corpus(corpus.prefix).check_tokenizer(numbered_tokenizer(101))


def edited(**values):
    """Return a change of entries of the manifest; a dictionary changes an entry, or the first corpus shard."""

    def change(text):
        manifest = json.loads(text)
        for name, value in values.items():
            if isinstance(value, dict) and name in manifest:
                (manifest["volumes"][0] if name == "volumes" else manifest[name]).update(value)
            else:
                manifest[name] = value
        return json.dumps(manifest)

    return change


MANIFESTS = {
    "empty": (lambda text: "", "not a manifest"),
    "deep nesting": (lambda text: "[" * 100_000, "not a manifest"),
    "long version": (edited(format_version="2" * 9999), "format_version 2, found"),
    "wrong type": (edited(tokens=True), "Expected `int`, got `bool` - at `$.tokens`"),
    "no shards": (edited(volumes=[]), "Expected `array` of length >= 1 - at `$.volumes`"),
    "vocab 2^33": (edited(vocab_size=2**33), "Expected `int` <= 2147483648 - at `$.vocab_size`"),
    "vocab + 1": (edited(vocab_size=101), "expected vocab_size 100 of tokenizer"),
    "special id 400": (edited(special_ids=[0, 1, 2, 3, 400]), "400] are not all below vocab_size"),
    "mask is pad": (edited(special_tokens={"mask": 0}), "expected special_tokens"),
    "dtype uint8": (edited(dtype="uint8"), "expected dtype uint16 as in small.idx, found uint8"),
    "no sha256": (edited(volumes={"bin": {"bytes": 20, "sha256": "0"}}), "expected sha256 0 as in"),
}


@pytest.mark.parametrize(("change", "words"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifest_that_is_damaged_or_lies_is_refused(corpus, change, words):
    path = corpus.prefix.with_suffix(".json")
    path.write_text(change(path.read_text()))
    assert_refused(lambda: check_all(corpus), 65, "small", words)


def test_manifest_as_large_as_a_corpus_is_not_read(corpus):
    with corpus.prefix.with_suffix(".json").open("r+b") as file:
        file.truncate(1 << 40)
    assert_refused(lambda: check_all(corpus), 65, "small.json", "1,099,511,627,776 bytes are more than a manifest has")


def test_manifest_cannot_lead_to_a_file_outside_its_folder(corpus):
    path = corpus.prefix.with_suffix(".json")
    path.write_text(edited(volumes={"name": "../../elsewhere"})(path.read_text()))
    assert [volume.bin.name for volume in Corpus(corpus.prefix).volumes] == ["small.bin"]


def test_index_of_another_corpus_of_equal_size_is_refused_by_the_full_check(corpus):
    write_corpus(corpus.folder / "other", random_documents([1, 3, 2, 4], 100), numbered_tokenizer(100))
    (corpus.folder / "other.idx").replace(corpus.prefix.with_suffix(".idx"))
    assert_refused(lambda: check_all(corpus), 65, "small.idx, byte 0: expected sha256")


@pytest.mark.parametrize("end", [".bin", ".idx", ".json"])
@pytest.mark.parametrize("put", [lambda path: None, Path.mkdir, lambda path: path.symlink_to(path.name)])
def test_corpus_one_of_whose_files_is_gone_or_something_else_is_incomplete(corpus, end, put):
    path = corpus.prefix.with_suffix(end)
    path.unlink()
    put(path)
    assert_refused(lambda: Corpus(corpus.prefix), 65, f"small{end} missing beside the rest")


@pytest.mark.parametrize(
    ("prefix", "exit_code", "words"),
    [
        ("{folder}", 66, "no corpus"),
        ("", 66, "no corpus"),
        ("{folder}/small.bin", 66, "did you mean 'small'?"),
        ("{folder}/small.bin/deeper", 66, "no corpus"),
        ("{folder}/" + "x" * 300, 74, "File name too long"),
        ("a\0b", 66, "no corpus"),
    ],
)
def test_prefix_that_leads_to_no_corpus_is_a_missing_input(corpus, prefix, exit_code, words):
    assert_refused(lambda: Corpus(prefix.format(folder=corpus.folder)), exit_code, words)


def test_corpus_in_a_folder_with_spaces_and_other_scripts_is_read(corpus, tmp_path):
    folder = tmp_path / "mit Leerzeichen, 日本語 ' \" $HOME ünïcode"
    shutil.copytree(corpus.folder, folder)
    start_checks(*corpus.flags, "--data-path", f"{folder}/../{folder.name}/small")
    start_checks(*corpus.flags, "--tokenizer-model", str(folder / "tokenizer"), "--save", str(folder / "runs"))


def test_corpus_whose_path_is_no_text_is_checked_and_named_with_escapes(corpus, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(corpus.folder, folder)
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "utf-8:strict"}
    code, output, errors = run("validate", folder / "small", env=environment)
    assert (code, errors) == (0, "") and "caf\\udce9/small is sound" in output
