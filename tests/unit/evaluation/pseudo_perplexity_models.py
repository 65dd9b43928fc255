"""Write masked language models of 2 layers x 32 whose weights are large enough to show an error; compute losses."""

import random
from pathlib import Path

import torch
import transformers
from unit.data.small_corpus import SPECIAL, write_vocabulary
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.evaluation import models

WORDS = [*SPECIAL, "the", "cat", "sat", "on", "a", "mat", ".", "sep", "[", "]"]
LONGEST = 40  # tokens
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_IDS = {
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "mask_token_id": 4,
}
_COMMON = {"vocab_size": len(WORDS), "max_position_embeddings": LONGEST, **_SIZES, **_IDS}
ARCHITECTURES = ("Bert", "Roberta", "ModernBert", "NomicBert", "EuroBert", "neobert")


def write_model(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a model of one of the ARCHITECTURES, or of another class of transformers, and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "neobert":
        changes = {name: _COMMON[name] for name in ("vocab_size", "max_position_embeddings", "pad_token_id")}
        model = build_model(**changes)
    else:
        # RoBERTa counts positions from its padding id + 1, here 1.
        changes = {"max_position_embeddings": LONGEST + 1} if kind == "Roberta" else {}
        config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **changes})
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForMaskedLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    vocabulary = write_vocabulary(folder / "vocab.txt", WORDS[len(SPECIAL) :])
    load_tokenizer(vocabulary).save_tokenizer_files(folder, model_max_length=LONGEST)
    return folder


def make_texts(count: int, *, longest: int, seed: int = 0) -> list[str]:
    """Return different texts of 1 to `longest` words."""
    rng, texts = random.Random(seed), dict[str, None]()
    while len(texts) < count:
        texts[" ".join(rng.choices(WORDS[5:12], k=rng.randint(1, longest)))] = None
    return list(texts)


@torch.no_grad()
def plain_losses(folder: Path, text: str, *, with_specials: bool = False, with_mask: bool = True) -> list[float]:
    """Return -log p of each token, from one forward pass per token without padding."""
    model, tokenizer = models.load_model(folder, "AutoModelForMaskedLM"), models.load_tokenizer(folder)
    ids_s = tokenizer(text, return_tensors="pt")["input_ids"][0]
    losses = []
    for position in range(len(ids_s)) if with_specials else range(1, len(ids_s) - 1):
        masked_s = ids_s.clone()
        if with_mask:
            masked_s[position] = tokenizer.mask_token_id
        logits_v = model(input_ids=masked_s[None], attention_mask=torch.ones_like(masked_s)[None]).logits[0, position]
        losses.append(-logits_v.log_softmax(-1)[ids_s[position]].item())
    return losses
