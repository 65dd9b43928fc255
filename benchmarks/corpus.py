"""The made-up corpus of the benchmarks.

Words stand for one token each and carry no meaning: what benchmarks need of a corpus are its lengths. These are
log-normal, as those of web pages are about.
"""

import json
import math
import random
from pathlib import Path

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# RefinedWeb has mean / median = 640 / 368, which is exp(sigma^2 / 2) of a log-normal.
SIGMA = math.sqrt(2 * math.log(640 / 368))


def write_corpus(
    folder: Path, *, documents: int, median_tokens: int, longest: int, vocab_size: int, sigma: float = SIGMA
) -> tuple[str, str]:
    """Writes documents of random words by the real preprocessing; returns the corpus prefix and the vocabulary's path.

    Args:
        longest: Documents are cut at so many tokens.
    """
    from megatron_neobert.data.preprocessing.plan import PreprocessSettings, plan_preprocessing
    from megatron_neobert.data.preprocessing.run import preprocess

    rng = random.Random(0)
    words = [f"w{number}" for number in range(vocab_size - len(SPECIAL))]
    vocabulary, shard = folder / "vocab.txt", folder / "shard.jsonl"
    vocabulary.write_text("".join(f"{word}\n" for word in (*SPECIAL, *words)), encoding="utf-8")
    with shard.open("w", encoding="utf-8") as stream:
        for _ in range(documents):
            length = min(int(rng.lognormvariate(math.log(median_tokens), sigma)) + 1, longest)
            stream.write(json.dumps({"content": " ".join(rng.choices(words, k=length))}) + "\n")
    settings = PreprocessSettings((str(shard),), output_prefix=str(folder / "c"), tokenizer_model=str(vocabulary))
    preprocess(plan_preprocessing(settings), on_progress=lambda progress: None)
    return str(folder / "c_content_document"), str(vocabulary)
