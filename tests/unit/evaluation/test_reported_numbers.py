"""The paper's tables: complete, and as in a second transcription."""

import json

from megatron_neobert.evaluation.paper import (
    GLUE,
    GLUE_BEST_POINTS,
    MTEB,
    THROUGHPUT,
    THROUGHPUT_LENGTHS,
)


def test_a_second_transcription_has_the_same_numbers(shared_data):
    other = json.loads((shared_data / "fixtures" / "reported_numbers.json").read_text())
    for ours, theirs in ((GLUE, "glue_dev"), (MTEB, "mteb_eng_v1_after_2000_steps_contrastive")):
        rows = [tuple(row) for size in other[theirs]["rows"].values() for row in size.values()]
        assert sorted(rows) == sorted(ours.rows.values())
    speeds = dict(other["throughput_ktok_per_s_A100"]["rows"])
    assert tuple(speeds.pop("lengths")) == THROUGHPUT_LENGTHS
    assert {name.replace("-base", " base").replace("-large", " large"): tuple(row) for name, row in speeds.items()} == (
        THROUGHPUT.rows
    )
    points = other["glue_best_hparams"]["rows"]["NeoBERT4096"]
    assert {task: tuple(point) for task, point in points.items()} == GLUE_BEST_POINTS
