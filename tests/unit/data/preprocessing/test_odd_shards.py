"""Shards as they are found in the wild: good documents beside odd and bad ones, and nothing is lost uncounted."""

import json
import os
import resource
import subprocess
from functools import partial

import pytest
from unit.data.preprocess_place import WORDS
from unit.data.small_corpus import write_vocabulary
from unit.tools.commands import ENVIRONMENT, arguments_of, command_line

from megatron_neobert.data.corpus.reader import Corpus, check_content

GOOD = [b'{"content": "hello world"}'] * 20
BAD = {  # records without a usable text, and the reasons
    b'{"content": "hel': "malformed JSON",
    b"<html>": "malformed JSON",
    b'["hello"]': "malformed JSON",
    b'{"text": "hello"}': "missing key",
    b'{"content": null}': "null text",
    b'{"content": 17}': "text is not a string",
    b"[" * 100_000: "malformed JSON",
    b'{"\\ud800": "hello"}': "missing key",  # half a character
    b'{"n": 1' + b"0" * 5000 + b', "content": "hello"}': "malformed JSON",  # Python converts no more than 4,300 digits
}
ODD = {  # shards by name, and how many documents each has
    "empty text first": ([b'{"content": ""}', b'{"content": " \\n"}', *GOOD], 20),
    "blank lines": ([b"", *GOOD, b"  ", b""], 20),
    "only zero-width": ([*GOOD, '{"content": "\u200b\u202e"}'.encode()], 20),
    "NUL, zero-width, right-to-left": ([*GOOD, b'{"content": "h\\u0000el\\u200blo \\u202eworld"}'], 21),
    "duplicate keys": ([*GOOD, b'{"content": 1, "content": "hello"}'], 21),
    "NaN and Infinity": ([*GOOD, b'{"score": NaN, "n": -Infinity, "content": "hello"}'], 21),
    "byte order mark": ([b"\xef\xbb\xbf" + GOOD[0], *GOOD], 21),
    "Windows line ends": ([line + b"\r" for line in GOOD], 20),
    "a document of 10 MB": ([*GOOD, b'{"content": "' + b"hello " * 1_700_000 + b'"}'], 21),
}


@pytest.mark.parametrize("bad_first", [True, False])
def test_every_kind_of_bad_record_is_rejected_with_its_line_and_the_others_are_kept(place, bad_first):
    lines = [*BAD, *GOOD] if bad_first else [*GOOD, *BAD]
    (place.shards / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    place.run()
    manifest = place.corpus().manifest
    assert (manifest.records, manifest.documents, manifest.dropped) == (len(lines), 20, {})
    rejects = [json.loads(line) for line in place.settings().files.rejects.read_text(encoding="utf-8").splitlines()]
    before = 0 if bad_first else 20
    assert [(reject["line"], reject["reason"]) for reject in rejects] == [
        (number, reason) for number, reason in enumerate(BAD.values(), start=before + 1)
    ]
    assert [reject["raw"] for reject in rejects] == [line.decode()[: 64 << 10] for line in BAD]


def test_odd_lines_are_kept_or_dropped_by_name(place):
    for name, (lines, _) in ODD.items():
        (place.shards / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    place.run(keep_shards=True, max_error_rate=0.0)
    corpus = place.corpus()
    check_content(corpus)
    assert [volume.documents for volume in corpus.manifest.volumes] == [ODD[name][1] for name in sorted(ODD)]
    assert (corpus.manifest.rejected, corpus.manifest.dropped) == ({}, {"empty text": 2, "no tokens": 1})
    assert max(volume.lengths.max() for volume in corpus.volumes) == 1_700_000


def test_line_of_a_gigabyte_takes_no_memory(place):
    """In a process of its own, whose memory is bounded; over 1 GB without the bound of a document's size."""
    with (place.shards / "a.jsonl").open("wb") as stream:
        stream.write(b"\n".join(GOOD) + b'\n{"content": "')
        stream.seek(1 << 30, os.SEEK_CUR)  # a hole in the file: NUL bytes that need no disk
        stream.write(b'"}\n' + GOOD[0])
    command = command_line("preprocess_data", *arguments_of(place.folder, "--max-error-rate", "0.1"))
    limit = partial(resource.setrlimit, resource.RLIMIT_DATA, (700 << 20, 700 << 20))
    subprocess.run(command, env=ENVIRONMENT, preexec_fn=limit, timeout=600, check=True)
    manifest = Corpus(place.folder / "run_content_document").manifest
    assert (manifest.documents, manifest.rejected) == (21, {"longer than --max-document-bytes": 1})


def test_vocabulary_above_16_bits_is_stored_in_32(place):
    write_vocabulary(place.vocab, [*WORDS, *(f"w{number}" for number in range(70_000))])
    place.add_texts("a.jsonl", "hello", "w69999")
    place.run()
    assert place.corpus().manifest.dtype == "int32"
    assert place.corpus().document(1).tolist()[0] > 65_535
