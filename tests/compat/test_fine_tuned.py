"""Exported and fine-tuned folders give equal outputs with every supported version of the libraries that load them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from environments import INSTALLED, OTHER_VERSIONS, run_script
from folder_outputs import TEXTS

from megatron_neobert.evaluation.embed import save_final
from megatron_neobert.evaluation.models import load_model, load_sentence_transformer, load_tokenizer
from megatron_neobert.huggingface.folder_files import restore_files

# Kind of folder -> class that loads it.
KINDS = {
    "export": "SentenceTransformer",
    "embedder": "SentenceTransformer",
    "glue and classify": "AutoModelForSequenceClassification",
    "ner": "AutoModelForTokenClassification",
}


def fine_tune(kind: str, source: Path, folder: Path) -> tuple[Path, Any]:
    """Return a folder that this project writes for a fine-tuned model, and the model's outputs; see folder_outputs."""
    torch.manual_seed(0)
    if kind in ("export", "embedder"):
        embedder = load_sentence_transformer(source, max_length=64)
        if kind == "embedder":
            torch.nn.init.normal_(embedder[0].model.get_input_embeddings().weight, std=0.3)
            save_final(embedder, source, folder)
        return source if kind == "export" else folder, embedder.encode(TEXTS)
    model, tokenizer = load_model(source, KINDS[kind], num_labels=3), load_tokenizer(source)
    # Trainer writes these files.
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    restore_files(folder, source)
    with torch.no_grad():
        return folder, model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits


@pytest.mark.parametrize(
    ("layout", "version"),
    [
        ("neobert", INSTALLED),
        pytest.param("eurobert", INSTALLED, marks=pytest.mark.slow),
        *(pytest.param("neobert", version, marks=pytest.mark.slow) for version in OTHER_VERSIONS),
    ],
)
def test_every_kind_of_folder_gives_the_outputs_of_its_model(folders, tmp_path, layout, version):
    written = {kind: fine_tune(kind, folders[layout], tmp_path / kind) for kind in KINDS}
    words = [f"{folder}={KINDS[kind]}" for kind, (folder, _) in written.items()]
    trust = ["--trust-remote-code"] if layout == "neobert" else []
    results = run_script(version, "folder_outputs.py", tmp_path, *trust, *words)
    for kind, (folder, expected) in written.items():
        result = results[str(folder)]
        difference = (torch.tensor(result["outputs"]) - torch.as_tensor(expected)).abs().max()
        assert difference <= 1e-5 and result["longest"] == 64, kind
