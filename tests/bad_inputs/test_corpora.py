"""Corpora that are not what they say: refused with file and place, with the exit code of bad data.

Damage inside the index, the sizes of .bin and what contradicts them in the manifest are in
tests/unit/data/corpus/test_corpus.py; here is the rest.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from bad_inputs.refusals import assert_refused, outcome_of, start_checks
from commands import ENVIRONMENT, run
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus

from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.errors import DataError


def check_all(corpus):
    """All that validate_data --full and the start of a run look at."""
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
    """Changes entries of the manifest; a dictionary changes entries of the entry, or of the first volume."""

    def change(text):
        manifest = json.loads(text)
        for name, value in values.items():
            if isinstance(value, dict) and name in manifest:
                (manifest["volumes"][0] if name == "volumes" else manifest[name]).update(value)
            else:
                manifest[name] = value
        return json.dumps(manifest)

    return change


def replaced(old, new):
    def change(text):
        assert old in text
        return text.replace(old, new, 1)

    return change


MANIFESTS = [
    pytest.param(lambda text: "", ["not a manifest"], id="empty"),
    pytest.param(lambda text: text[: len(text) // 2], ["not a manifest"], id="truncated"),
    pytest.param(lambda text: "[" * 100_000, ["not a manifest"], id="deep nesting"),
    pytest.param(lambda text: "null", ["format_version 2, found None"], id="null"),
    pytest.param(replaced('"tokens": 10', '"tokens": ' + "1" * 5000), ["not a manifest"], id="5,000 digits"),
    pytest.param(replaced('"tokens": 10', '"tokens": true'), ["Expected `int`, got `bool` - at `$.tokens`"], id="bool"),
    pytest.param(edited(format_version="2" * 9999), ["format_version 2, found"], id="long version"),
    pytest.param(edited(extra=1), ["unknown field `extra`"], id="unknown entry"),
    pytest.param(edited(volumes=[]), ["expected at least one volume, found none"], id="no volumes"),
    pytest.param(
        edited(volumes=["../../etc/passwd"]),
        ["small.json", "Expected `object`, got `str` - at `$.volumes[0]`"],
        id="volume that is a path",
    ),
    pytest.param(edited(part_of=[]), ["at `$.part_of`"], id="part of a list"),
    pytest.param(edited(vocab_size=2**33), ["vocab_size that int32 can number, found 8589934592"], id="vocab 2^33"),
    pytest.param(edited(vocab_size=101), ["expected vocab_size 100 of tokenizer", "found 101"], id="vocab + 1"),
    pytest.param(edited(special_ids=[0, 1, -4]), ["Expected `int` >= 0 - at `$.special_ids[2]`"], id="id below 0"),
    pytest.param(edited(special_ids=[0, 1, 2, 3, 400]), ["400] are not all below vocab_size"], id="special id 400"),
    pytest.param(
        edited(held_out=-1, rejected={"x": 1}), ["Expected `int` >= 0 - at `$.held_out`"], id="held out below 0"
    ),
    pytest.param(
        edited(rejected={"x": -1}, records=3), ["Expected `int` >= 0 - at `$.rejected[...]`"], id="rejected below 0"
    ),
    pytest.param(edited(special_tokens={"mask": 0}), ["expected special_tokens", "found"], id="mask is pad"),
    pytest.param(edited(tokenizer_fingerprint="0" * 64), ["written with tokenizer 000000000000"], id="fingerprint"),
    pytest.param(edited(dtype="uint8"), ["expected dtype uint16 as in small.idx, found uint8"], id="dtype uint8"),
    pytest.param(
        edited(inputs={"a": {"bytes": "1"}}),
        ["at `$.inputs[...]"],
        id="input without sum",
    ),
    pytest.param(edited(volumes={"bin": {"bytes": 20, "sha256": "0"}}), ["sha256 0 as in small.json"], id="no sha256"),
]


@pytest.mark.parametrize(("change", "words"), MANIFESTS)
def test_manifest_that_is_damaged_or_lies_is_refused(corpus, change, words):
    path = corpus.prefix.with_suffix(".json")
    path.write_text(change(path.read_text()))
    assert_refused(lambda: check_all(corpus), 65, "small", *words)


def test_manifest_as_large_as_a_corpus_is_not_read(corpus):
    with corpus.prefix.with_suffix(".json").open("r+b") as file:
        file.truncate(1 << 40)
    assert_refused(lambda: check_all(corpus), 65, "small.json", "1,099,511,627,776 bytes are more than a manifest has")


def test_volumes_are_named_by_the_prefix_whatever_the_manifest_says(corpus):
    """So a manifest can lead to no file outside its folder."""
    path = corpus.prefix.with_suffix(".json")
    path.write_text(edited(volumes={"name": "../../elsewhere"})(path.read_text()))
    assert [volume.bin.name for volume in Corpus(corpus.prefix).volumes] == ["small.bin"]


def take_other_index(corpus):
    """The index of another corpus with as many documents and tokens."""
    write_corpus(corpus.folder / "other", random_documents([1, 3, 2, 4], 100), numbered_tokenizer(100))
    (corpus.folder / "other.idx").replace(corpus.prefix.with_suffix(".idx"))


def swap_volumes(corpus):
    """Two volumes of one document exchange their .bin; the sizes differ."""
    a, b = (corpus.folder / f"volumes_0000{number}.bin" for number in (1, 2))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second), b.write_bytes(first)
    for file in corpus.folder.glob("volumes*"):
        file.replace(corpus.folder / file.name.replace("volumes", "small"))


FILES = [
    pytest.param(take_other_index, ["small.idx, byte 0: expected sha256"], id="index of another corpus"),
    pytest.param(swap_volumes, ["expected 8 bytes for 4 tokens", "found a file of 4 bytes"], id="volumes swapped"),
]


@pytest.mark.parametrize(("change", "words"), FILES)
def test_files_that_are_not_those_of_the_manifest_are_refused_by_the_full_check(corpus, change, words):
    change(corpus)
    assert_refused(lambda: check_all(corpus), 65, *words)


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
        ("{folder}/", 66, ["no corpus", "that is a folder"]),
        ("{folder}", 66, ["no corpus", "that is a folder"]),
        (".", 66, ["that is a folder"]),
        ("/", 66, ["that is a folder"]),
        ("..", 66, ["no corpus ..:"]),
        ("", 66, ["no corpus"]),
        ("~/corpus", 66, ["no corpus ~/corpus"]),
        ("{folder}/small.bin", 66, ["expected small.bin.bin", "did you mean 'small'?"]),
        ("{folder}/small*", 66, ["no corpus"]),
        ("{folder}/small/deeper", 66, ["no corpus"]),
        ("{folder}/small.bin/deeper", 66, ["no corpus"]),
        ("{folder}/" + "x" * 300, 74, ["File name too long"]),
        ("a\0b", 66, ["no corpus"]),
        ("a\nb", 66, ["no corpus"]),
    ],
)
def test_prefix_that_leads_to_no_corpus_is_a_missing_input(corpus, prefix, exit_code, words):
    if "\n" in prefix:
        assert outcome_of(lambda: Corpus(prefix))[0] == exit_code  # its sentence has the line feed of the name
    else:
        assert_refused(lambda: Corpus(prefix.format(folder=corpus.folder)), exit_code, *words)


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
