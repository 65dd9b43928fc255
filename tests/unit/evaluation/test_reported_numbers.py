"""The tables of the paper are complete and equal to a second transcription."""

import json

from megatron_neobert.evaluation.paper import GLUE, GLUE_BEST_POINTS, MTEB, THROUGHPUT, THROUGHPUT_LENGTHS


def test_a_second_transcription_has_the_same_numbers(shared_data):
    second = json.loads((shared_data / "fixtures" / "reported_numbers.json").read_text())
    for table, key in ((GLUE, "glue_dev"), (MTEB, "mteb_eng_v1_after_2000_steps_contrastive")):
        rows = [tuple(row) for size in second[key]["rows"].values() for row in size.values()]
        assert sorted(rows) == sorted(table.rows.values())
    speeds = dict(second["throughput_ktok_per_s_A100"]["rows"])
    assert tuple(speeds.pop("lengths")) == THROUGHPUT_LENGTHS
    rows = {name.replace("-base", " base").replace("-large", " large"): tuple(row) for name, row in speeds.items()}
    assert rows == THROUGHPUT.rows
    points = second["glue_best_hparams"]["rows"]["NeoBERT4096"]
    assert {task: tuple(point) for task, point in points.items()} == GLUE_BEST_POINTS
