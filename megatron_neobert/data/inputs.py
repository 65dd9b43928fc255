"""The corpus and the tokenizer that a run names, opened together. No torch: a wrong path costs milliseconds."""

from pathlib import Path
from typing import NamedTuple

from megatron_neobert.config import DataConfig
from megatron_neobert.data.corpus import Corpus
from megatron_neobert.data.order import split_ranges
from megatron_neobert.data.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError


class Inputs(NamedTuple):
    """What training reads."""

    tokenizer: Tokenizer
    corpus: Corpus
    training_documents: range
    validation: tuple[Corpus, range] | None  # None: --split has one share, or the second is 0


def open_inputs(data: DataConfig) -> Inputs:
    """Opens and checks all of it, and cuts the documents into training and validation where one corpus serves both.

    Raises:
        MissingInputError: A path does not exist.
        DataError: A file is damaged, the tokenizer is not a corpus's, or no document is left for training.
    """
    tokenizer = load_tokenizer(Path(data.tokenizer_model or ""), data.tokenizer_type)
    corpus = _open_corpus(data.data_path or "", tokenizer)
    if data.valid_data_path is not None:
        held_out = _open_corpus(data.valid_data_path, tokenizer)
        return Inputs(tokenizer, corpus, range(len(corpus)), (held_out, range(len(held_out))))
    training, *others = split_ranges(len(corpus), data.split)
    if not training:
        raise DataError(
            f"--split {data.split} leaves none of the {len(corpus):,} documents of {data.data_path} for training; give "
            "the first share more."
        )
    return Inputs(tokenizer, corpus, training, (corpus, others[0]) if others and others[0] else None)


def _open_corpus(prefix: str, tokenizer: Tokenizer) -> Corpus:
    corpus = Corpus(Path(prefix))
    corpus.check_tokenizer(tokenizer)
    return corpus
