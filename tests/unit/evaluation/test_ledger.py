"""The ledger of finished work: units, damaged lines and locks."""

import json

import pytest

from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.evaluation.ledger import LEDGER, open_ledger

UNIT = {"model": "abc", "data": {"train": "def"}, "lengths": (8, 16), "rate": 1e-5}


def test_result_is_found_for_an_equal_unit_only_and_read_back_as_written(tmp_path):
    with open_ledger(tmp_path) as ledger:
        assert ledger.find(UNIT) is None
        written = ledger.add(UNIT, {"score": 1 / 3, "kinds": (1, 2)})
    with open_ledger(tmp_path) as read:
        assert read.find(json.loads(json.dumps(UNIT))) == written == {"score": 1 / 3, "kinds": [1, 2]}
    for changed in ({"model": "abd"}, {"data": {"train": "deg"}}, {"lengths": (8,)}, {"rate": 2e-5}, {"more": None}):
        assert read.find({**UNIT, **changed}) is None


def test_incomplete_last_line_is_removed_before_the_next_line(tmp_path):
    with open_ledger(tmp_path) as ledger:
        ledger.add({"task": "a"}, {})
    path = tmp_path / LEDGER
    path.write_bytes(path.read_bytes() + b'{"key": ')
    with open_ledger(tmp_path) as ledger:
        ledger.add({"task": "b"}, {})
        ledger.add({"task": "c"}, {})
    with open_ledger(tmp_path) as ledger:
        assert [line["unit"]["task"] for line in ledger.lines.values()] == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["[1]", '{"key": "a"}', "no JSON", '{"key": "a", "unit": 1, "result": {}}'])
def test_complete_line_that_is_not_an_entry_is_refused_with_its_number(tmp_path, line):
    (tmp_path / LEDGER).write_text(line + "\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl, line 1: not an entry of a ledger"), open_ledger(tmp_path):
        pass


def test_ledger_that_is_open_is_not_opened_again(tmp_path):
    # A lock belongs to the open file, so a second one in this process is like one of another process.
    refusal = pytest.raises(OutputError, match="another command is writing these results")
    with open_ledger(tmp_path), refusal, open_ledger(tmp_path):
        pass
