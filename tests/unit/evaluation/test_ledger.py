"""The ledger of finished work: keys, order, locking, and damaged files."""

import json

import pytest

from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.evaluation.ledger import LEDGER, Ledger, open_ledger

UNIT = {"model": "abc", "data": {"train": "def"}, "lengths": (8, 16), "rate": 1e-5}


def test_result_is_found_for_an_equal_unit_only_and_read_back_as_written(tmp_path):
    with open_ledger(tmp_path) as ledger:
        assert ledger.find(UNIT) is None
        written = ledger.add(UNIT, {"score": 1 / 3, "kinds": (1, 2)})
    read = Ledger(tmp_path)
    assert read.find(json.loads(json.dumps(UNIT))) == written == {"score": 1 / 3, "kinds": [1, 2]}
    for changed in ({"model": "abd"}, {"data": {"train": "deg"}}, {"lengths": (8,)}, {"rate": 2e-5}, {"more": None}):
        assert read.find({**UNIT, **changed}) is None


def test_unit_that_is_added_again_becomes_the_last_line(tmp_path):
    with open_ledger(tmp_path) as ledger:
        for name, score in (("a", 1), ("b", 2), ("a", 3)):
            ledger.add({"task": name}, {"score": score})
    for lines in (ledger.lines, Ledger(tmp_path).lines):
        assert [(line["unit"]["task"], line["result"]["score"]) for line in lines.values()] == [("b", 2), ("a", 3)]


def test_incomplete_last_line_is_ignored_by_readers_and_removed_before_the_next_line(tmp_path):
    with open_ledger(tmp_path) as ledger:
        ledger.add({"task": "a"}, {})
    path = tmp_path / LEDGER
    path.write_bytes(path.read_bytes() + b'{"key": ')
    assert len(Ledger(tmp_path).lines) == 1
    assert path.read_bytes().endswith(b'{"key": '), "a reader does not change the file"
    with open_ledger(tmp_path) as ledger:
        ledger.add({"task": "b"}, {})
        ledger.add({"task": "c"}, {})
    assert [line["unit"]["task"] for line in Ledger(tmp_path).lines.values()] == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["[1]", '{"key": "a"}', "no JSON", '{"key": "a", "unit": 1, "result": {}}'])
def test_complete_line_that_is_not_an_entry_is_refused_with_its_number(tmp_path, line):
    (tmp_path / LEDGER).write_text(line + "\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl, line 1: not an entry of a ledger"):
        Ledger(tmp_path)


def test_ledger_that_is_open_can_be_read_but_not_opened_again(tmp_path):
    with open_ledger(tmp_path) as ledger:
        ledger.add(UNIT, {})
        assert Ledger(tmp_path).find(UNIT) == {}
        # A lock belongs to the open file, so a second one in this process is like one of another process.
        with pytest.raises(OutputError, match="another command is writing these results"), open_ledger(tmp_path):
            pass
    with open_ledger(tmp_path) as ledger:
        assert ledger.find(UNIT) == {}
