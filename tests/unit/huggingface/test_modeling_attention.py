"""Who attends to whom: padding, documents and masks of pairs, under every attention implementation."""

from typing import Any

import pytest
import torch
import transformers
from tiny_neobert import build_documents, build_model, gap, lay_end_to_end, logits_alone, pad
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ROUNDING = 1e-5  # two orders of the same sums in fp32; what follows shows at least 1e-2 where it goes wrong
WRONG = 1e-2
DOCUMENTS = build_documents()
# flex_attention compiles itself for half a minute; its masks are checked below without computing anything.
IMPLEMENTATIONS = ("eager", "sdpa")


def attend_as_flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What FlashAttention computes from what transformers hands to it: documents or padded rows, one by one."""
    assert kwargs["is_causal"] is False
    assert module.is_causal is False
    context = torch.zeros_like(query)
    if attention_mask is None and "cu_seq_lens_q" in kwargs:
        edges = kwargs["cu_seq_lens_q"]
        assert edges.dtype == torch.int32
        assert torch.equal(edges, kwargs["cu_seq_lens_k"])
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == int(edges.diff().max())
        parts = [(0, slice(start, end)) for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    else:
        rows = range(len(query))
        parts = [(row, slice(None) if attention_mask is None else attention_mask[row].bool()) for row in rows]
    for row, tokens in parts:
        one = (heads[row : row + 1][:, :, tokens] for heads in (query, key, value))
        context[row, :, tokens] = F.scaled_dot_product_attention(*one, scale=scaling)[0]
    return context.transpose(1, 2), None


@pytest.fixture(params=[*IMPLEMENTATIONS, "flash_attention_stand_in"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_stand_in", attend_as_flash)
    return request.param


@torch.no_grad()
def test_padded_documents_get_the_logits_they_get_alone(implementation: str):
    model, batch = build_model(attention=implementation), pad(DOCUMENTS)
    tokens = batch["attention_mask"].bool()
    alone = logits_alone(model, DOCUMENTS)
    assert alone.abs().max() > 1
    assert gap(model(**batch).logits[tokens], alone) < ROUNDING
    assert gap(model(input_ids=batch["input_ids"]).logits[tokens], alone) > WRONG, "padding must matter without a mask"


@torch.no_grad()
def test_documents_laid_end_to_end_get_the_logits_they_get_alone(implementation: str):
    model, row = build_model(attention=implementation), lay_end_to_end(DOCUMENTS)
    alone = logits_alone(model, DOCUMENTS)
    assert gap(model(**row).logits[0], alone) < ROUNDING
    assert gap(model(**row, max_seqlen=9, attention_mask=torch.ones_like(row["input_ids"])).logits[0], alone) < ROUNDING
    assert gap(model(input_ids=row["input_ids"]).logits[0], alone) > WRONG, "documents must matter to each other as one"


@torch.no_grad()
def test_flattening_collator_separates_documents(implementation: str):
    """Under its own names: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, position_ids."""
    collator = transformers.DataCollatorWithFlattening()
    batch = collator([{"input_ids": document.tolist()} for document in DOCUMENTS], return_tensors="pt")
    starts = lay_end_to_end(DOCUMENTS)["cu_seqlens"]
    names = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 9, "max_length_k": 9}
    model = build_model(attention=implementation)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], **names}
    assert gap(model(**inputs).logits[0], logits_alone(model, DOCUMENTS)) < ROUNDING


@torch.no_grad()
def test_positions_given_with_documents_are_used():
    model, row = build_model(), lay_end_to_end(DOCUMENTS)
    expected = model(**row).logits
    own = torch.cat([torch.arange(len(document)) for document in DOCUMENTS])[None]
    assert torch.equal(model(**row, position_ids=own).logits, expected)
    assert gap(model(**row, position_ids=own * 3).logits, expected) > WRONG


@torch.no_grad()
def test_positions_of_a_model_in_bf16_are_exact():
    """bf16 holds no odd number above 256: rounded positions would put tokens 4001 and 4002 on one."""
    model, tokens = build_model(max_position_embeddings=8192).bfloat16(), DOCUMENTS[0][None]
    far = torch.arange(9)[None] + 4001
    assert gap(model(tokens, position_ids=far).logits.float(), model(tokens).logits.float()) < 0.05
    rounded = far.bfloat16().long()
    assert gap(model(tokens, position_ids=rounded).logits.float(), model(tokens).logits.float()) > 0.2


def refused(**inputs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        build_model()(**inputs)
    return str(caught.value)


ROW = lay_end_to_end(DOCUMENTS)
TOKENS = ROW["input_ids"]


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ({"input_ids": TOKENS.expand(2, 16), "cu_seqlens": ROW["cu_seqlens"]}, ["2 rows"]),
        ({**ROW, "attention_mask": torch.arange(16)[None]}, ["attention_mask and cu_seqlens"]),
        ({"input_ids": TOKENS, "cu_seqlens": torch.tensor([0, 9, 15])}, ["[0, 9, 15]", "16 tokens"]),
        ({"input_ids": TOKENS, "cu_seqlens": torch.tensor([2, 9, 16])}, ["[2, 9, 16]", "from 0"]),
        ({"input_ids": TOKENS, "cu_seqlens": torch.tensor([0, 9, 9, 16])}, ["[0, 9, 9, 16]", "must grow"]),
        ({"input_ids": TOKENS, "cu_seqlens": torch.tensor([0])}, ["[0]", "16 tokens"]),
        ({**ROW, "max_seqlen": 8}, ["max_seqlen 8", "9 tokens"]),
        ({"input_ids": TOKENS, "attention_mask": torch.ones(1, 15)}, ["(1, 15)", "(1, 16)"]),
        ({"input_ids": TOKENS, "attention_mask": torch.ones(1, 1, 16, 16)}, ["(1, 1, 16, 16)", "(1, 16)"]),
        ({"input_ids": TOKENS, "inputs_embeds": torch.ones(1, 16, 32)}, ["one of them"]),
        ({"attention_mask": torch.ones(1, 16)}, ["one of them"]),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_their_values(inputs: dict[str, Any], parts: list[str]):
    message = refused(**inputs)
    assert [part for part in parts if part not in message] == [], message


def test_flex_attention_gets_blocks_that_keep_documents_and_padding_apart(monkeypatch: pytest.MonkeyPatch):
    """The blocks are looked at without computing anything."""
    given = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        given.append(mask)
        return value.transpose(1, 2), None

    def to_pairs(mask: Any, rows: int, length: int) -> Tensor:
        row, query, key = torch.meshgrid(*map(torch.arange, (rows, length, length)), indexing="ij")
        return mask.mask_mod(row, torch.tensor(0), query, key)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", record)
    model, batch, row = build_model(attention="flex_attention"), pad(DOCUMENTS), lay_end_to_end(DOCUMENTS)
    model(input_ids=batch["input_ids"])
    model(**batch)
    model(**row)
    everything, padded, packed = given[::2]
    assert everything is None
    assert torch.equal(to_pairs(padded, 3, 9), batch["attention_mask"].bool()[:, None].expand(3, 9, 9))
    document = torch.tensor([0] * 9 + [1] + [2] * 6)
    assert torch.equal(to_pairs(packed, 1, 16)[0], document[:, None] == document[None, :])
