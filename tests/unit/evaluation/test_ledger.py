"""The ledger of finished work: keys, order, and files that a kill or another hand has left."""

import json
import multiprocessing

import pytest

from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.evaluation.ledger import LEDGER, Ledger, open_ledger

UNIT = {"model": "abc", "data": {"train": "def"}, "lengths": (8, 16), "rate": 1e-5}


def test_unit_is_done_for_the_same_unit_only_and_its_result_is_read_as_written(tmp_path):
    with open_ledger(tmp_path) as ledger:
        assert ledger.find(UNIT) is None
        written = ledger.add(UNIT, {"score": 1 / 3, "kinds": (1, 2)})
    read = Ledger(tmp_path)
    assert read.find(json.loads(json.dumps(UNIT))) == written == {"score": 1 / 3, "kinds": [1, 2]}
    for changed in ({"model": "abd"}, {"data": {"train": "deg"}}, {"lengths": (8,)}, {"rate": 2e-5}, {"more": None}):
        assert read.find({**UNIT, **changed}) is None


def test_line_without_an_origin_is_read_as_one_of_an_unknown_machine(tmp_path):
    line = {"key": "a", "unit": {"task": "a"}, "result": {"score": 1}}
    (tmp_path / LEDGER).write_text(json.dumps(line) + "\n")
    origin = {"machine": "unknown", "versions": {}}
    assert list(Ledger(tmp_path).lines.values()) == [line | {"origin": origin}]


def test_unit_that_is_added_again_becomes_the_last_one(tmp_path):
    with open_ledger(tmp_path) as ledger:
        for name, score in (("a", 1), ("b", 2), ("a", 3)):
            ledger.add({"task": name}, {"score": score})
    for each in (ledger, Ledger(tmp_path)):
        found = [(line["unit"]["task"], line["result"]["score"]) for line in each.lines.values()]
        assert found == [("b", 2), ("a", 3)]


def test_line_that_a_kill_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path):
    with open_ledger(tmp_path) as ledger:
        ledger.add({"task": "a"}, {})
    path = tmp_path / LEDGER
    path.write_bytes(path.read_bytes() + b'{"key": ')
    assert len(Ledger(tmp_path).lines) == 1
    assert path.read_bytes().endswith(b'{"key": '), "a reader leaves the file as it is"
    with open_ledger(tmp_path) as ledger:
        ledger.add({"task": "b"}, {})
        ledger.add({"task": "c"}, {})
    assert [line["unit"]["task"] for line in Ledger(tmp_path).lines.values()] == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["[1]", '{"key": "a"}', "no JSON", '{"key": "a", "unit": 1, "result": {}}'])
def test_whole_line_that_is_no_entry_is_refused_with_its_number(tmp_path, line):
    (tmp_path / LEDGER).write_text(line + "\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl, line 1: not an entry of a ledger"):
        Ledger(tmp_path)


def hold(folder, held, release) -> None:
    with open_ledger(folder) as ledger:
        ledger.add({"task": "other"}, {})
        held.set()
        release.wait()


def test_second_process_may_read_a_ledger_that_is_held_and_not_add_to_it(tmp_path):
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, held, release))
    process.start()
    held.wait()
    try:
        assert Ledger(tmp_path).find({"task": "other"}) == {}
        with pytest.raises(OutputError, match="another command is writing these results"), open_ledger(tmp_path):
            pass
    finally:
        release.set()
        process.join()
    with open_ledger(tmp_path) as ledger:
        assert ledger.find({"task": "other"}) == {}
