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

    corpus: Corpus
    tokenizer: Tokenizer
    training_documents: range
    validation_documents: range | None  # None: --split has one share, or the second is 0


def open_inputs(data: DataConfig) -> Inputs:
    """Opens and checks both, and cuts the documents into training and validation.

    Raises:
        MissingInputError: A path does not exist.
        DataError: A file is damaged, the tokenizer is not the corpus's, or no document is left for training.
    """
    tokenizer = load_tokenizer(Path(data.tokenizer_model or ""))
    corpus = Corpus(Path(data.data_path or ""))
    corpus.check_tokenizer(tokenizer)
    training, *others = split_ranges(len(corpus), data.split)
    if not training:
        raise DataError(
            f"--split {data.split} leaves none of the {len(corpus):,} documents of {data.data_path} for training; give "
            "the first share more."
        )
    return Inputs(corpus, tokenizer, training, others[0] if others and others[0] else None)
