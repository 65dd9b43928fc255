"""Makes a corpus of the .bin and .idx that Megatron-LM has written, where they lie and without a copy.

    neobert adopt data/wiki_text_document --tokenizer-model vocab.txt

Reads all of both files, the .bin once: sizes, index, every id against the vocabulary. Documents that are one sequence
each get a manifest beside them, PREFIX.json. Documents in sentences, or with a token at their end, become the corpus
PREFIX_documents: a link to the .bin, an index of whole documents without that token, and a manifest. Megatron's files
stay as they are.
"""

from megatron_neobert.errors import CommandParser
from megatron_neobert.text import visible


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "prefixes", nargs="+", metavar="PREFIX", help="path without .bin; finished ones are passed over"
    )
    parser.add_argument("--tokenizer-model", required=True, metavar="PATH", help="that they were written with")
    parser.add_argument("--tokenizer-type", default="auto", metavar="TYPE", help="as in preprocessing (default: auto)")
    arguments = parser.parse_args()
    from megatron_neobert.data.corpus.adoption import adopt
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer_model, arguments.tokenizer_type)
    for prefix in arguments.prefixes:
        adopted = adopt(prefix, tokenizer)
        text = tokenizer.backend.decode(Corpus(adopted.prefix).document(0)[:32].tolist(), skip_special_tokens=False)
        print(f"{adopted.prefix} {'was a corpus already' if adopted.already else 'is a corpus'}: {adopted.found}")
        for name, value in adopted.manifest.describe().items():
            print(f"  {name:<18} {value}")
        print(f"  {'begins':<18} {visible(text)}")
