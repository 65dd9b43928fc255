"""A plan without --data-path, for documents like RefinedWeb's and 30,522 ids."""

from statistics import NormalDist

import numpy as np
import pytest
from processes import run_command

from megatron_neobert.config.data_path import Component
from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import PhaseChange, Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.planning.forecast import AssumedCorpus, open_or_assume_phases

TWO_NODES = {"NNODES": "2", "NPROC_PER_NODE": "8"}  # and neither NODE_RANK nor MASTER_ADDR
COMMAND = "megatron_neobert.__main__"


def test_a_plan_of_two_nodes_needs_no_corpus_no_tokenizer_and_no_other_node(tmp_path, monkeypatch):
    """The recipe names a corpus for its second phase, which does not exist here."""
    monkeypatch.chdir(tmp_path)
    ended = run_command(
        COMMAND, "train", "--config", "neobert_both_stages", "--dry-run", environment=TWO_NODES, limit_seconds=60
    )
    assert ended.code == 0, ended.output
    plan = " ".join(ended.output.split())
    assert "assumed no --data-path, so documents like RefinedWeb's (median 368 tokens, mean 640)" in plan
    assert "vocabulary 30,522 (padded to 30,592)" in plan and "245,136,954" in plan and "16 data-parallel" in plan
    assert plan.count("corpus assumed for") == 2, "one per phase"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "tiny"], "--data-path is missing"),
        (["--config", "tiny", "--dry-run", "--data-path", "corpus"], "--tokenizer-model is missing"),
        (
            ["--config", "tiny", "--dry-run", "--tokenizer-model", "a/b/gone"],
            "--tokenizer-model a/b/gone: no such file",
        ),
    ],
)
def test_nothing_is_assumed_for_a_start_or_beside_a_corpus_or_for_a_wrong_tokenizer(flags, message):
    ended = run_command(COMMAND, "train", *flags, environment={"NPROC_PER_NODE": "1"})
    assert ended.code in (2, 66) and message in ended.output, ended.output


def test_assumed_documents_have_the_lengths_of_refinedweb():
    """Its logarithms of lengths are nearly normal, with a mean of ln 368 and a variance of 2 ln(640 / 368)."""
    lengths = AssumedCorpus(Component("RefinedWeb")).lengths_of(np.arange(1 << 18))
    assert np.median(lengths) == pytest.approx(368, rel=0.01)  # measured: 0
    assert lengths.mean() == pytest.approx(640, rel=0.01)  # measured: 0.07 %
    above = 1 - NormalDist(np.log(368), np.sqrt(2 * np.log(640 / 368))).cdf(np.log(1024))
    assert (lengths >= 1024).mean() == pytest.approx(above, rel=0.02)  # measured: 0.07 %
    assert AssumedCorpus(Component("", minimum=1024)).documents == pytest.approx(above * 968e6, rel=0.02)


def test_weights_and_lengths_of_the_corpora_of_a_phase_are_those_of_its_data_path():
    blend = ("0.2", "A", "0.8", "A:min=1024:max=2048")
    settings = Settings().with_section("training", phases=(PhaseChange(after_iters=5, data_path=blend),))
    first, second = open_or_assume_phases(settings)
    assert len(first.training) == 1 and len(resolve_phases(settings)) == 2
    assert [source.weight for source in second.training] == [1, 4]
    lengths = second.training[1].corpus.lengths_of(np.arange(10_000))
    assert lengths.min() >= 1024 and lengths.max() <= 2048
    with pytest.raises(ConfigError, match="A:min=1000000: no web document has such a length"):
        AssumedCorpus(Component("A", minimum=10**6))
