"""Contrastive fine-tuning with torchrun: two processes on CPU share the batches of a step."""

import subprocess
from pathlib import Path

import pytest
from json_files import edit_json, read_json
from ranks import TORCHRUN, environment
from unit.evaluation.embedding_inputs import write_datasets, write_encoder, write_yaml

COMMAND = ("-m", "megatron_neobert", "train-embedder")
# sitecustomize.py: the process group must not end with DDP's reference to it, because torch can hang there.
WATCH = """import gc, torch
destroy = torch.distributed.destroy_process_group
def check(*arguments):
    kinds = {type(item) for item in gc.get_objects()}
    assert torch.nn.parallel.DistributedDataParallel not in kinds, "DDP is alive"
    destroy(*arguments)
torch.distributed.destroy_process_group = check
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder without dropout, data, and a rate so small that updates do not change losses."""
    folder = tmp_path_factory.mktemp("contrastive")
    config = write_encoder(folder / "bert") / "config.json"
    edit_json(config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    write_datasets(folder / "data")
    write_yaml(folder / "run.yaml", learning_rate=1e-12, log_interval=1)
    (folder / "sitecustomize.py").write_text(WATCH)
    return folder


def losses_of(inputs: Path, output: Path, *, processes: int, steps: int) -> list[float]:
    """Fine-tune, and return the loss of each step."""
    flags = {"model": inputs / "bert", "config": inputs / "run.yaml", "data-dir": inputs / "data", "output": output}
    arguments = [text for name, value in (flags | {"steps": steps}).items() for text in (f"--{name}", str(value))]
    process = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", str(processes), *COMMAND, *arguments, "--device", "cpu"],
        env=environment(processes, HF_DATASETS_CACHE=inputs / "cache", OMP_NUM_THREADS=1, PYTHONPATH=inputs),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    record = read_json(output / "bert" / "contrastive.json")
    assert record["settings"]["processes"] == processes
    return [loss for _, loss in record["results"]["losses_nats"]]


@pytest.mark.slow
def test_loss_of_a_step_on_two_processes_is_the_mean_of_two_steps_on_one(inputs, tmp_path):
    losses = losses_of(inputs, tmp_path / "one", processes=1, steps=4)
    shared = losses_of(inputs, tmp_path / "two", processes=2, steps=2)
    assert len(set(losses)) == 4, "with equal losses, the next line could not fail"
    assert shared == pytest.approx([(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2], abs=1e-4)
