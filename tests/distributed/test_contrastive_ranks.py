"""Contrastive fine-tuning by torchrun: two processes on CPU share out the batches of one plan."""

import json
import subprocess
from pathlib import Path

import pytest
from training_command import TORCHRUN, environment
from unit.evaluation.contrastive_inputs import write_datasets, write_encoder, write_yaml

from megatron_neobert.evaluation.ledger import read_record

COMMAND = ("-m", "megatron_neobert", "finetune")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without dropout, its data, and a rate so small that no step changes the next one's loss."""
    folder = tmp_path_factory.mktemp("contrastive")
    config = write_encoder(folder / "bert") / "config.json"
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config.write_text(json.dumps(json.loads(config.read_text()) | without))
    write_datasets(folder / "data")
    write_yaml(folder / "run.yaml", learning_rate=1e-12, log_interval=1)
    return folder


def losses_of(place: Path, output: Path, *, processes: int, steps: int) -> list[float]:
    """What the run logged, a loss per step."""
    flags = {"model": place / "bert", "config": place / "run.yaml", "data-dir": place / "data", "output": output}
    words = [word for name, value in (flags | {"steps": steps}).items() for word in (f"--{name}", str(value))]
    finished = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", str(processes), *COMMAND, *words, "--device", "cpu"],
        env=environment(processes, HF_DATASETS_CACHE=place / "cache", OMP_NUM_THREADS=1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    record = read_record(output / "bert" / "contrastive.json")
    assert record["settings"]["processes"] == processes
    assert sum(share["batches"] for share in record["results"]["datasets"].values()) == processes * steps
    return [loss for _, loss in record["results"]["losses_nats"]]


@pytest.mark.slow
def test_step_of_two_processes_is_the_mean_of_two_steps_of_one(place, tmp_path):
    alone = losses_of(place, tmp_path / "one", processes=1, steps=4)
    shared = losses_of(place, tmp_path / "two", processes=2, steps=2)
    assert len(set(alone)) == 4, "batches of different losses, or the next line could not fail"
    assert shared == pytest.approx([(alone[0] + alone[1]) / 2, (alone[2] + alone[3]) / 2], abs=1e-4)
