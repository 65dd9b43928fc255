"""--phases: the settings of each iteration, and the phases that are refused."""

from operator import attrgetter

import pytest
from unit.config.command_line import parse, problems_of

from megatron_neobert.config.cli import read_record, write_record
from megatron_neobert.config.phases import phase_at, resolve_phases

YAML = """
training:
  micro_batch_size: 8
  global_batch_size: 32
  phases:
    - after_iters: 100
      mask_prob: 0.15
      global_batch_size: 64
    - {after_iters: 200, seq_length: 4096, data_path: [0.2, corpus, 0.8, "corpus:min=1024"]}
    - {after_iters: 300, mask_prob: 5e-2, data_path: other}
"""


changing_values = attrgetter(
    "data.mask_prob", "data.seq_length", "training.global_batch_size", "data.data_path", "training.seed"
)


def test_iteration_has_the_settings_of_the_last_phase_that_has_begun_and_new_data_raise_the_seed(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(YAML, encoding="utf-8")
    settings = parse("--config", str(config), "--seed", "7")
    blend = ("0.2", "corpus", "0.8", "corpus:min=1024")
    expected = {
        1: (0.2, 1024, 32, ("corpus",), 7),
        100: (0.2, 1024, 32, ("corpus",), 7),
        101: (0.15, 1024, 64, ("corpus",), 7),
        200: (0.15, 1024, 64, ("corpus",), 7),
        201: (0.15, 4096, 64, blend, 8),
        301: (0.05, 4096, 64, ("other",), 9),
        10**6: (0.05, 4096, 64, ("other",), 9),
    }
    assert {iteration: changing_values(phase_at(settings, iteration).settings) for iteration in expected} == expected
    assert not any(phase.settings.training.phases for phase in resolve_phases(settings))


def test_phases_are_equal_from_a_file_a_flag_and_a_saved_record(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(YAML, encoding="utf-8")
    settings = parse("--config", str(config))
    flag = f"[{', '.join(map(repr, settings.training.phases))}]"
    assert parse("--phases", flag).training.phases == settings.training.phases
    write_record(settings, tmp_path / "record.yaml")
    assert read_record(tmp_path / "record.yaml") == settings
    assert parse("--config", str(config), "--phases", "[]").training.phases == ()


# Phases, and parts of the message.
REFUSED = [
    ("[{after_iters: 9, mask_prb: 0.1}]", ["phase 1: unknown setting mask_prb", "'mask_prob'"]),
    ("[{after_iters: 9, num_layers: 2}]", ["phase 1: num_layers cannot change within a run", "after_iters, data_path"]),
    ("[{after_iters: 9, seq_length: long}]", ["phase 1: seq_length 'long' is not a whole number"]),
    ("[{mask_prob: 0.1}]", ["is not a list of phases; each needs after_iters", "{after_iters: 1000, mask_prob: 0.15}"]),
    ("mask_prob", ["--phases 'mask_prob' is not a list of phases"]),
    ("{a: [", ["--phases '{a: [' is not YAML"]),
    (str([{"after_iters": n} for n in range(1, 102)]), ["has 101 phases, more than 100"]),
    ("[{after_iters: 9}, {after_iters: 5}]", ["start after 9, 5 iterations", "must increase"]),
    ("[{after_iters: 0}]", ["start after 0 iterations", "from 1"]),
    (
        "[{after_iters: 1000000}]",
        ["after 1000000 iterations would start after the end of the run, --train-iters 1000000"],
    ),
    ("[{after_iters: 9, mask_replacement: some}]", ["phase 1", "--mask-replacement some is not one of all_mask, bert"]),
    ("[{after_iters: 9, seq_length: 8192}]", ["phase 1", "--seq-length 8192 exceeds --max-position-embeddings 4096"]),
]


@pytest.mark.parametrize(("phases", "parts"), REFUSED)
def test_invalid_phases_are_refused_in_one_sentence_with_their_values(phases, parts):
    problems = problems_of("--phases", phases)
    assert problems
    assert [part for part in parts if part not in problems[0]] == []


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [8, 8, 16]), (4, [8, 8, 12]), (8, [4, 8, 12]), (32, [1, 2, 3])])
def test_the_micro_batch_of_each_phase_is_the_largest_that_divides_the_batch_of_a_rank(ranks, sizes):
    phases = "[{after_iters: 1, global_batch_size: 64}, {after_iters: 2, global_batch_size: 96, micro_batch_size: 20}]"
    flags = ["--micro-batch-size", "8", "--global-batch-size", "32", "--phases", phases]
    settings = parse(*flags, ranks=ranks)
    assert [phase.settings.training.micro_batch_size for phase in resolve_phases(settings)] == sizes


def test_a_micro_batch_that_changes_the_loss_is_not_changed():
    flags = ["--micro-batch-size", "8", "--global-batch-size", "32", "--loss-normalization", "micro_batch"]
    (problem,) = problems_of(*flags, ranks=8)
    assert "32 is not a multiple of --micro-batch-size 8 x 8 data-parallel ranks = 64" in problem
