"""The reference model: names and shapes of the published checkpoint, and logits of a second implementation."""

import ast
import math
from pathlib import Path

import pytest
import torch
from commands import PUBLISHED

from megatron_neobert.model import reference
from megatron_neobert.model.reference import IGNORED_LABEL, ReferenceConfig, ReferenceNeoBERT, mlm_loss

SMALL = ReferenceConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=40, vocab_size=61)


def test_default_model_has_names_and_shapes_of_the_published_checkpoint():
    lines = (PUBLISHED / "weights.tsv").read_text().splitlines()
    published = {name: shape for name, shape, _ in (line.split("\t") for line in lines)}
    with torch.device("meta"):
        model = ReferenceNeoBERT(ReferenceConfig())
    assert {name: str(tuple(tensor.shape)) for name, tensor in model.state_dict().items()} == published
    assert len(published) == 4 + 6 * 28


def test_logits_equal_those_of_loops_over_heads_and_positions_in_float64():
    """Queries, keys and values are ordered within a head, and the gate comes first."""
    torch.manual_seed(7)
    model, width = ReferenceNeoBERT(SMALL).eval().double(), SMALL.head_width
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    tokens_s = torch.randint(SMALL.vocab_size, (9,))

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    hidden = model.model.encoder.weight[tokens_s]
    for block in model.model.transformer_encoder:
        normed = norm(hidden, block.attention_norm.weight)
        contexts = []
        for head in range(SMALL.num_attention_heads):
            rows = block.qkv.weight[head * 3 * width : (head + 1) * 3 * width]
            query, key, value = (normed @ rows[i * width : (i + 1) * width].T for i in range(3))
            for position in range(len(tokens_s)):
                for pair in range(width // 2):
                    angle = position * 10_000.0 ** (-2 * pair / width)
                    rotation = torch.tensor(
                        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
                    )
                    for x in (query, key):
                        x[position, 2 * pair : 2 * pair + 2] = rotation @ x[position, 2 * pair : 2 * pair + 2].clone()
            contexts.append(torch.softmax(query @ key.T / math.sqrt(width), dim=-1) @ value)
        hidden = hidden + torch.cat(contexts, dim=-1) @ block.wo.weight.T
        first, second = (norm(hidden, block.ffn_norm.weight) @ block.ffn.w12.weight.T).split(40, dim=-1)
        hidden = hidden + (first * torch.sigmoid(first) * second) @ block.ffn.w3.weight.T
    expected = norm(hidden, model.model.layer_norm.weight) @ model.decoder.weight.T + model.decoder.bias

    logits = model(tokens_s[None])[0]
    # The reference rotates in fp32 even here: measured 1.2e-6 on logits up to 6.2.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_loss_is_the_sum_over_masked_tokens():
    logits_bsv = torch.zeros(2, 3, 5)
    labels_bs = torch.tensor([[IGNORED_LABEL, 4, IGNORED_LABEL], [0, IGNORED_LABEL, 2]])
    loss = mlm_loss(logits_bsv, labels_bs)
    assert loss.tokens == 3
    assert loss.total.item() == pytest.approx(3 * math.log(5))


def test_reference_imports_only_torch_and_the_standard_library():
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} == {"dataclasses", "typing", "torch"}
