"""Load folders as their users do, and print for each the outputs for TEXTS and the truncation length, as JSON.

    python folder_outputs.py [--trust-remote-code] FOLDER=CLASS ...

CLASS is SentenceTransformer, or a class of transformers. Needs torch and one of these two libraries only.
"""

import json
import sys

import torch
import transformers

TEXTS = ["the cat sat on mats", "a mat"]


@torch.no_grad()
def read_outputs(folder: str, class_name: str, *, trusted: bool) -> dict[str, object]:
    """Return embeddings, or logits of the padded batch, and the number of tokens at which the tokenizer truncates."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    if class_name == "SentenceTransformer":
        from sentence_transformers import SentenceTransformer

        outputs = torch.tensor(SentenceTransformer(folder, trust_remote_code=trusted, device="cpu").encode(TEXTS))
    else:
        model = getattr(transformers, class_name).from_pretrained(folder, trust_remote_code=trusted).eval()
        outputs = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
    return {"outputs": outputs.tolist(), "longest": tokenizer.model_max_length}


if __name__ == "__main__":
    trusted, pairs = "--trust-remote-code" in sys.argv, [word.split("=") for word in sys.argv[1:] if "=" in word]
    print(json.dumps({folder: read_outputs(folder, name, trusted=trusted) for folder, name in pairs}))
