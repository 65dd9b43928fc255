"""Python for a model card, ready to be pasted; tests/unit/conversion/test_model_card.py runs every block.

`model_id` is the model's name on the Hub or the path of its folder; `remote` is the argument that lets the folder's own
code run, or nothing.
"""

import json


def sentence_example(model_id: str, remote: str) -> str:
    return _code(f"""
from sentence_transformers import SentenceTransformer

model_id = "{model_id}"
model = SentenceTransformer(model_id{remote})
vectors = model.encode(["A first text.", "A second, somewhat longer text."])
print(vectors.shape)
""")


def fill_mask_example(model_id: str, mask_token: str) -> str:
    return _code(f"""
from transformers import pipeline

model_id = "{model_id}"
fill_mask = pipeline("fill-mask", model=model_id)
print(fill_mask({_masked(mask_token)}))
""")


def remote_fill_mask_example(model_id: str, mask_token: str) -> str:
    """With a tokenizer at hand: the pipelines of transformers 4.48 find none for an architecture they do not know."""
    return _code(f"""
from transformers import AutoTokenizer, pipeline

model_id = "{model_id}"
tokenizer = AutoTokenizer.from_pretrained(model_id)
fill_mask = pipeline("fill-mask", model=model_id, tokenizer=tokenizer, trust_remote_code=True)
print(fill_mask({_masked(mask_token)}))
""")


def hidden_states_example(model_id: str, remote: str) -> str:
    return _code(f"""
import torch
from transformers import AutoModel, AutoTokenizer

model_id = "{model_id}"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModel.from_pretrained(model_id{remote})
texts = ["A first text.", "A second, somewhat longer text."]
inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
with torch.no_grad():
    hidden_states = model(**inputs).last_hidden_state
print(hidden_states.shape)
""")


def beside_example(model_id: str, mask_token: str) -> str:
    return _code(f"""
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer
from transformers.utils import cached_file

model_id = "{model_id}"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModel.from_pretrained(model_id, dtype=torch.float32)
head = load_file(cached_file(model_id, "mlm_head/model.safetensors"))
inputs = tokenizer({_masked(mask_token)}, return_tensors="pt")
with torch.no_grad():
    hidden_states = model(**inputs).last_hidden_state[inputs.input_ids == tokenizer.mask_token_id]
logits = hidden_states @ head["decoder.weight"].float().T + head["decoder.bias"].float()
print(tokenizer.convert_ids_to_tokens(logits.argmax(-1)))
""")


def packed_example(model_id: str) -> str:
    return _code(f"""
import torch
from transformers import AutoModel, AutoTokenizer

model_id = "{model_id}"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModel.from_pretrained(model_id, trust_remote_code=True)
documents = tokenizer(["A first text.", "A second, somewhat longer text."], truncation=True).input_ids
lengths = torch.tensor([0, *map(len, documents)])
row = torch.tensor([sum(documents, [])])
with torch.no_grad():
    outputs = model(row, cu_seqlens=lengths.cumsum(0, dtype=torch.int32), max_seqlen=int(lengths.max()))
print(outputs.last_hidden_state.shape)
""")


def lora_example() -> str:
    return _code("""
from peft import LoraConfig

lora = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["dense", "classifier"])
""")


def _masked(mask_token: str) -> str:
    return json.dumps(f"Paris is the {mask_token} of France.", ensure_ascii=False)


def _code(source: str) -> str:
    return f"```python\n{source.strip()}\n```"
