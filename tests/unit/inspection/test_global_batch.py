"""A rebuilt batch equals the batch of training and is shown as text; checkpoint and settings of its iteration."""

import re

import numpy as np
import pytest
from commands import call
from unit.data.small_corpus import random_documents, write_corpus, write_vocabulary

from megatron_neobert.checkpoint.train_state import TrainState, write_train_state
from megatron_neobert.commands.inspect import describe
from megatron_neobert.config.cli import write_record
from megatron_neobert.config.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PhaseChange,
    Settings,
    TrainingConfig,
)
from megatron_neobert.data.batches.batch import RankPosition
from megatron_neobert.data.batches.corpora import open_corpora, open_phases
from megatron_neobert.data.batches.windows import IGNORED_LABEL, Cursor
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError
from megatron_neobert.inspection.global_batch import open_iteration, read_segments, rebuild_batch

CLS, SEP, MASK = 2, 3, 4  # indices in small_corpus.SPECIAL


RED, REVERSED = "\x1b[31mred", "\u202edesrever"  # would act on a terminal
LENGTHS = [1 + 7 * number % 90 for number in range(200)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder with vocab.txt and the corpora P and Q."""
    folder = tmp_path_factory.mktemp("inspection")
    vocabulary = [RED, REVERSED, "##ly", *(f"word{number}" for number in range(40))]
    tokenizer = load_tokenizer(write_vocabulary(folder / "vocab.txt", vocabulary))
    for seed, name in enumerate("PQ"):
        write_corpus(folder / name, random_documents(LENGTHS, tokenizer.vocab_size, seed), tokenizer)
    return folder


def settings_of(corpora, **data):
    """Return settings with 8 packed sequences of 64 tokens per iteration, 2 per micro-batch."""
    defaults = {"data_path": (str(corpora / "P"),), "tokenizer_model": str(corpora / "vocab.txt"), "split": "100"}
    return Settings(
        model=ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4),
        data=DataConfig(**defaults | {"seq_length": 64} | data),
        optimizer=OptimizerConfig(lr_warmup_iters=1),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=100, eval_iters=0),
    )


def write_checkpoint(save, settings, *, iteration, cursor=None):
    """Write the files of a checkpoint that a batch needs: settings and train state."""
    folder = save / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    write_record(settings, folder / "settings.yaml")
    sha256 = open_corpora(settings.data).sha256
    write_train_state(folder, TrainState(sha256, iteration=iteration, cursor=cursor or Cursor()))
    (folder / "MANIFEST.json").touch()
    return folder


def rebuilt(settings, iteration, checkpoint=None):
    return rebuild_batch(settings, open_phases(settings), iteration, checkpoint=checkpoint)


def contents(settings, iteration):
    return [segment.input_ids_s.tolist() for segment in read_segments(rebuilt(settings, iteration))]


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
def test_segments_with_their_labels_put_back_are_the_documents(corpora, layout):
    settings = settings_of(corpora, batch_layout=layout, mask_replacement="bert")
    corpus = Corpus(corpora / "P")
    kinds, tokens = set(), np.zeros(8, dtype=int)
    for segment in read_segments(rebuilt(settings, 3)):
        tokens[segment.sequence] += len(segment.input_ids_s)
        original = np.where(segment.labels_s == IGNORED_LABEL, segment.input_ids_s, segment.labels_s)
        stop = segment.first_token + segment.text_tokens
        expected = corpus.document(segment.document)[segment.first_token : stop].tolist()
        head = [CLS] * bool(original[0] == CLS)
        tail = [SEP] * (len(original) - len(head) - segment.text_tokens)
        assert original.tolist() == head + expected + tail and len(head) == (segment.first_token == 0)
        assert segment.document_tokens == LENGTHS[segment.document]
        for input_id, label in zip(segment.input_ids_s.tolist(), segment.labels_s.tolist(), strict=True):
            if label != IGNORED_LABEL:
                kinds.add("masked" if input_id == MASK else "unchanged" if input_id == label else "replaced")
    assert kinds == {"masked", "unchanged", "replaced"}
    assert 0 < tokens.min() <= tokens.max() <= 64


def test_a_checkpoint_of_other_documents_is_refused(corpora, tmp_path):
    folder = write_checkpoint(tmp_path, settings_of(corpora), iteration=1)
    with pytest.raises(CheckpointError, match=r"was trained on the corpus with sha256 .{12}, --data-path names"):
        rebuilt(settings_of(corpora, data_path=(str(corpora / "Q"),)), 3, folder)


def test_a_batch_of_a_phase_has_the_settings_of_the_phase(corpora):
    settings = settings_of(corpora)
    phased = settings.with_section("training", phases=(PhaseChange(after_iters=2, seq_length=128, mask_prob=0.1),))
    batch = rebuilt(phased, 4)
    data = batch.phase.settings.data
    assert (data.seq_length, data.mask_prob) == (128, 0.1)
    assert len(batch.for_rank(RankPosition()).micro_batches[0].tokens_t) == 2 * 128
    assert contents(phased, 2) == contents(settings, 2)


# --- checkpoint and settings of an iteration


def test_the_checkpoint_is_the_newest_before_the_iteration_and_the_settings_those_of_the_first_after_it(
    corpora, tmp_path
):
    with pytest.raises(MissingInputError, match="holds no checkpoint"):
        open_iteration(tmp_path, 1, [])
    for at in (10, 20, 30):
        settings = settings_of(corpora).with_section("training", seed=at)
        write_checkpoint(tmp_path, settings.with_section("logging", log_interval=7), iteration=at)
    seeds = {1: 10, 10: 10, 11: 20, 20: 20, 21: 30, 31: 30}
    folders = {1: None, 10: None, 11: "iter_0000010", 20: "iter_0000010", 21: "iter_0000020", 31: "iter_0000030"}
    for iteration, seed in seeds.items():
        settings, checkpoint = open_iteration(tmp_path, iteration, [])
        assert settings == settings_of(corpora).with_section("training", seed=seed)
        assert (checkpoint and checkpoint.name) == folders[iteration]
    changed, _ = open_iteration(tmp_path, 1, ["--seed", "3", "--tensor-model-parallel-size", "2"])
    assert changed == settings_of(corpora).with_section("training", seed=3)
    with pytest.raises(ConfigError, match="--iteration 101 is after the last iteration of this run, 100"):
        open_iteration(tmp_path, 101, [])


def test_an_iteration_before_the_first_checkpoint_of_a_continued_run_is_refused(corpora, tmp_path):
    settings = settings_of(corpora).with_section("checkpoint", continue_from="elsewhere")
    folder = write_checkpoint(tmp_path, settings, iteration=10)
    with pytest.raises(MissingInputError, match=f"10 cannot be rebuilt: --load {tmp_path} has no checkpoint before it"):
        open_iteration(tmp_path, 10, [])
    with pytest.raises(MissingInputError, match="iteration 11 cannot be rebuilt: there is no --load, and"):
        open_iteration(None, 11, ["--config", str(folder / "settings.yaml")])


# --- a batch as text: predicted tokens are marked, and control characters are escaped


def show(*arguments):
    """Run the command and return its output."""
    code, printed, errors = call("inspect batch", *arguments)
    assert (code, errors) == (0, "")
    return printed


def test_a_batch_is_the_same_from_a_checkpoint_and_from_the_start_for_any_layout(corpora, tmp_path):
    settings = settings_of(corpora)
    write_record(settings, tmp_path / "settings.yaml")
    write_checkpoint(tmp_path / "run", settings, iteration=4, cursor=rebuilt(settings, 4).cursor_after)
    config = ("--config", tmp_path / "settings.yaml", "--iteration", 6, "--rows", 8)
    layout = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    printed = show("--load", tmp_path / "run", *config[2:])
    assert printed == show(*config) == show(*config, "--load", tmp_path / "run") == show(*config, *layout)
    assert printed != show("--load", tmp_path / "run", *config[2:], "--seed", 1)


def test_brackets_mark_predicted_tokens_and_control_characters_do_not_reach_the_terminal(corpora, tmp_path):
    settings = settings_of(corpora, mask_replacement="bert")
    write_record(settings, tmp_path / "settings.yaml")
    printed = show("--config", tmp_path / "settings.yaml", "--iteration", 2, "--rows", 8)
    segments = list(read_segments(batch := rebuilt(settings, 2)))
    inputs = np.concatenate([segment.input_ids_s for segment in segments])
    labels = np.concatenate([segment.labels_s for segment in segments])
    hidden, unchanged = int(((labels != IGNORED_LABEL) & (inputs == MASK)).sum()), int((labels == inputs).sum())
    packing, parts, predicted = describe(batch, segments)
    assert f"8 packed sequences of 64 tokens in 4 micro-batches; packing efficiency {100 * len(inputs) / 512:.2f}" in (
        packing
    )
    cut = sum(segment.text_tokens < segment.document_tokens for segment in segments)
    assert 0 < cut < len(segments) and f"{len(segments)} documents or pieces, {cut} of them cut" in parts
    assert predicted.startswith(f"{(labels != IGNORED_LABEL).sum()} predicted tokens, ")
    assert f"{hidden} hidden, {unchanged} left as they are, " in predicted
    assert all(line in printed for line in (packing, parts, predicted))
    assert printed.count("\npacked sequence ") == 8
    # The legend has one more of each.
    assert printed.count("[MASK->") == hidden + 1
    assert len(re.findall(r"\[=", printed)) == unchanged + 1
    assert RED not in printed and REVERSED not in printed
    assert r"\x1b[31mred" in printed and r"\u202edesrever" in printed
