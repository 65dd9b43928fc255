"""JSON that is no JSON lines: arrays of objects and objects over several lines."""

import json
import random
import tracemalloc

import pytest
from unit.data.shards.reading import TEXTS, Drip, read, texts_of

from megatron_neobert.data.shards.json_objects import read_values
from megatron_neobert.data.shards.parts import read_part
from megatron_neobert.data.shards.records import (
    MALFORMED_JSON,
    MISSING_KEY,
    RAW_BYTES,
    TOO_LONG,
    ReadSettings,
    ShardPart,
)
from megatron_neobert.errors import DataError

OBJECTS = [{"content": text, "url": "u"} for text in TEXTS]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(OBJECTS),
        json.dumps(OBJECTS, indent=4),
        "\n".join(json.dumps(each, indent=2) for each in OBJECTS),  # as jq prints them
        json.dumps(OBJECTS[:1]) + "\n" + json.dumps(OBJECTS[1:]),
        "\ufeff" + json.dumps(OBJECTS),
        json.dumps(OBJECTS, ensure_ascii=False)[:-1] + ",]\n",
    ],
)
def test_texts_of_arrays_and_of_objects_over_several_lines(tmp_path, content):
    (tmp_path / "shard").write_text(content, encoding="utf-8")
    assert texts_of(tmp_path / "shard") == TEXTS


def test_values_are_what_the_standard_parser_finds_wherever_the_blocks_end():
    rng = random.Random(0)
    pieces = ['"', "\\", "{", "}", "[", "]", ",", ":", "a", "\n", "é", " "]

    def make(depth):
        kind = rng.randrange(5 if depth else 2)
        if kind < 2:
            return "".join(rng.choices(pieces, k=rng.randint(0, 6)))
        if kind == 2:
            return rng.choice([None, True, 1.5, -3])
        members = [make(depth - 1) for _ in range(rng.randint(0, 3))]
        return members if kind == 3 else {f"{number}\\": member for number, member in enumerate(members)}

    for _ in range(300):
        values = [make(3) for _ in range(rng.randint(0, 5))]
        content = json.dumps(values, indent=rng.choice([None, 1]), ensure_ascii=False).encode()
        for width in (1, 2, 3, 7, len(content)):
            found = [value for group in read_values(Drip(content, width), limit=1000) for value in group.whole]
            assert list(map(json.loads, found)) == values


def test_faulty_element_costs_itself_alone(tmp_path):
    elements = ['{"content": "a"}', '{"content" "b"}', '{"text": "c"}', '"d"', '{"content": NaN, "content": "e"}']
    (tmp_path / "shard").write_text("[" + ",\n".join(elements) + "]")
    reading = read(tmp_path / "shard")
    assert reading.texts == ["a", "e"]
    assert reading.faults == [(MALFORMED_JSON, 2), (MISSING_KEY, 3), (MALFORMED_JSON, 4)]
    assert reading.rejected[0].raw == b'{"content" "b"}'
    assert reading.rejected[2].detail == "expected an object, found str"


@pytest.mark.parametrize("end", ["", ',\n{"content": "c', ',\n{"content": "c"', ',\n{"content": "c"}'])
def test_array_that_is_cut_off_is_refused_with_the_last_good_object(tmp_path, end):
    (tmp_path / "shard").write_text('[{"content": "a"},\n{"content": "b"}' + end)
    # The last object is not known to be whole before the comma or bracket behind it.
    last = 2 if end else 1
    with pytest.raises(DataError, match=f"shard: the json file breaks off or is damaged after object {last} .*fetch"):
        read(tmp_path / "shard")


def test_too_long_object_is_rejected_and_never_held(tmp_path):
    long = json.dumps({"content": ("x" * 1000 + '"\\') * (32 << 10)}).encode()  # 32 MiB
    content = b'[{"content": "a"}, ' + long + b', {"content": "b"}]'
    (tmp_path / "shard").write_bytes(content)
    part = ShardPart(str(tmp_path / "shard"), "json")
    tracemalloc.start()
    batches = list(read_part(part, ReadSettings(max_document_bytes=1 << 20)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [text for batch in batches for text in batch.texts] == ["a", "b"]
    (rejected,) = [record for batch in batches for record in batch.rejected]
    assert (rejected.reason, rejected.number, rejected.raw) == (TOO_LONG, 2, long[:RAW_BYTES])
    assert peak < 12 << 20 < len(long)
