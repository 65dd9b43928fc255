"""Small exported folders."""

from pathlib import Path

import pytest

from checkpoint_conversion.checkpoint import reference_config
from checkpoint_conversion.compare import make_loud
from checkpoint_conversion.config_json import FolderSpec
from checkpoint_conversion.export import write_folder
from checkpoint_conversion.mapping import NEOBERT, TABLES, ModelShape, to_internal
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.huggingface.folder_files import write_module_files
from megatron_neobert.model.reference import ReferenceNeoBERT

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(40)), "##s"]
MODEL = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, max_position_embeddings=64)
POOLING = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each layout, with weights so large that every token affects every other."""
    root, shape = tmp_path_factory.mktemp("folders"), ModelShape(MODEL, len(WORDS), len(WORDS))
    (root / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    spec = FolderSpec(shape, load_tokenizer(root / "vocab.txt"))
    reference = make_loud(ReferenceNeoBERT(reference_config(Settings(model=MODEL), vocab_size=len(WORDS))))
    folders = {layout: root / layout for layout in TABLES}
    for layout, folder in folders.items():
        folder.mkdir()
        write_folder(folder, layout, spec, to_internal(reference.state_dict(), shape, NEOBERT))
        write_module_files(folder, max_seq_length=64, pooling=POOLING)
    return folders
