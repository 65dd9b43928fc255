"""The command `neobert adopt`: make corpora from the .bin and .idx that Megatron-LM wrote."""

from dataclasses import dataclass

from megatron_neobert.cli import option
from megatron_neobert.text import visible


@dataclass(frozen=True, kw_only=True)
class AdoptOptions:
    prefixes: tuple[str, ...] = option(
        help="path of Megatron-LM's files without .bin; finished corpora are skipped", positional=True, metavar="PREFIX"
    )
    tokenizer_model: str = option(help="tokenizer with which the files were written", metavar="PATH")


def adopt(options: AdoptOptions) -> None:
    """Make a corpus from .bin and .idx files that Megatron-LM wrote.

    The command checks sizes, the index, and every id against the vocabulary, and prints a summary of each corpus.
    Megatron's files do not change.
    """
    from megatron_neobert.data.corpus import adoption
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer_model)
    for prefix in options.prefixes:
        corpus, eod_id = adoption.adopt(prefix, tokenizer)
        text = tokenizer.backend.decode(corpus.document(0)[:32].tolist(), skip_special_tokens=False)
        eod = "" if eod_id is None else f", without the id {eod_id} at the end of each (--append-eod)"
        print(f"{corpus.prefix} is a corpus: {len(corpus):,} documents{eod}")
        for name, value in corpus.describe().items():
            print(f"  {name:<18} {value}")
        print(f"  {'begins':<18} {visible(text)}")
