"""Changes that turn valid inputs into hostile ones; code that runs only leaves a mark."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import good_inputs as good
import torch
import yaml
from hostile import Canary, Spoil, change_json, each, in_place_of, pipe_in_place_of
from json_files import edit_json
from safetensors.torch import load_file, save_file

from megatron_neobert.checkpoint.contents import write_tensors

ESCAPE = "\x1b]0;owned\x07"


class Hostile(NamedTuple):
    """One hostile change of a kind of input.

    Attributes:
        refused_by: Commands that must refuse the input; None: all commands that read its kind. Other commands do not
            read the changed file, or use it safely.
    """

    kind: str
    name: str
    spoil: Spoil
    refused_by: tuple[str, ...] | None = None


READ_DATASETS = ("evaluate glue", "evaluate ner", "evaluate mteb")
NO_COMMAND: tuple[str, ...] = ()
SENTENCE_TRANSFORMERS = ("evaluate mteb", "train-embedder")


def link_elsewhere(path: Path, canary: Canary) -> None:
    path.rename(canary.mark.parent / path.name)
    path.symlink_to(canary.mark.parent / path.name)


def remove_offsets(path: Path, canary: Canary) -> None:
    save_file(load_file(path), path)


def add_extra_state(path: Path, canary: Canary) -> None:
    """Write bytes that megatron.core 0.16.1 unpickles when Transformer Engine's modules load them."""
    state = torch.frombuffer(bytearray(pickle.dumps(canary)), dtype=torch.uint8)
    write_tensors(path / "rank_00001.safetensors", {"decoder.layers.0.self_attention.linear_qkv._extra_state": state})


def nested(_: Canary) -> bytes:
    return b"[" * 100_000


# --- hostile models of sentence-transformers


UNSAFE = {"use_safetensors": False, "weights_only": False, "dtype": "auto"}


def pickle_the_weights(folder: Path, canary: Canary) -> None:
    """Replace the weights by a pickle, and let the settings of the folder ask the libraries to load it."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(canary))
    edit_json(folder / "config.json", dtype=...)
    good.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 32, "model_args": UNSAFE})


def nest_a_model(folder: Path, canary: Canary) -> None:
    """Put a pickled model below a Router module whose configuration names the class of the nested model."""
    outer = folder / "1_Pooling"
    shutil.rmtree(outer)
    inner = outer / "0_Own"
    shutil.copytree(folder, inner, ignore=shutil.ignore_patterns("1_*", "2_*", "3_*", "modules.json"))
    pickle_the_weights(inner, canary)
    good.write_modules(inner, {"": "Transformer"})
    routes = {"types": {"0_Own": "sentence_transformers.SentenceTransformer"}}
    routes |= {"structure": {"query": ["0_Own"], "document": ["0_Own"]}, "parameters": {"default_route": "query"}}
    good.write_json(outer / "router_config.json", routes)
    good.write_modules(folder, {"": "Transformer", "1_Pooling": "Router", "2_Normalize": "Normalize"})


def name_a_pickle_in_the_index(folder: Path, canary: Canary) -> None:
    pickle_the_weights(folder, canary)
    weight_map = {"lm_head.weight": "pytorch_model.bin"}
    good.write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def bring_code(model_type: str | None = None) -> Spoil:
    """Return a change that asks for code of the folder, optionally for a `model_type` that transformers lacks."""

    def spoil(folder: Path, canary: Canary) -> None:
        (folder / "own_code.py").write_text(
            f"{canary.source}from transformers import EuroBertConfig, EuroBertForMaskedLM\n"
            f"class OwnConfig(EuroBertConfig): model_type = {model_type or 'eurobert'!r}\n"
            "class Own(EuroBertForMaskedLM): config_class = OwnConfig\n"
        )
        own = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.Own", "AutoModelForMaskedLM": "own_code.Own"}
        changes = {"model_type": model_type} if model_type else {}
        change_json("config.json", auto_map=own, trust_remote_code=True, **changes)(folder, canary)
        bring_tokenizer_code(folder, canary)

    return spoil


def bring_tokenizer_code(folder: Path, canary: Canary) -> None:
    (folder / "own_tokenizer.py").write_text(
        f"{canary.source}from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    )
    own = {"AutoTokenizer": [None, "own_tokenizer.Own"]}
    change_json("tokenizer_config.json", auto_map=own, tokenizer_class="Own")(folder, canary)


def be_an_adapter(folder: Path, canary: Canary) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "somebody/model", "task_type": "FEATURE_EXTRACTION"}
    good.write_json(folder / "adapter_config.json", adapter)


def name_an_unknown_module(folder: Path, canary: Canary) -> None:
    (folder / "own_code.py").write_text(canary.source + "class Own: pass\n")
    path = folder / "modules.json"
    path.write_text(path.read_text().replace("sentence_transformers.models.Pooling", "own_code.Own"))


# --- hostile data sets


def in_each_data_set(write: Callable[[Path, Canary], object]) -> Spoil:
    """Return a change that empties the folders of all data sets and calls `write` with each."""

    def replace(folder: Path, canary: Canary) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        write(folder, canary)

    return each("rte", "tagged", "BIOSSES/*", change=replace)


def name_a_url(folder: Path, canary: Canary) -> None:
    data_files = [{"split": "train", "path": "https://example.invalid/train.jsonl"}]
    configs = {"configs": [{"config_name": "default", "data_files": data_files}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(configs)}---\n")


def bring_a_script(folder: Path, canary: Canary) -> None:
    (folder / f"{folder.name}.py").write_text(canary.source)


# --- hostile records


def add_markup(folder: Path, canary: Canary) -> None:
    """Begin every text of a record except its kind with an image, a script and a control sequence."""
    markup = json.dumps(f"![x](/dev/zero) <script>x</script> {ESCAPE}").strip('"')
    for path in folder.rglob("*.json"):
        changed = re.sub(r'"(?!kind|version)\w+": "', lambda match: match[0] + markup, path.read_text())
        path.write_text(changed)


HOSTILE = (
    Hostile("model", "modules: router of a nested model", nest_a_model, SENTENCE_TRANSFORMERS),
    Hostile("model", "settings that allow pickles", pickle_the_weights),
    Hostile("model", "index that names a pickle", name_a_pickle_in_the_index),
    Hostile("model", "own code", bring_code(), (
        "convert hf-to-megatron", "evaluate glue", "evaluate ner", "evaluate mteb", "evaluate ppl", "train-embedder")),
    Hostile("model", "own architecture", bring_code("own_model")),
    Hostile("model", "adapter", be_an_adapter),
    Hostile("model", "modules: module that is imported", name_an_unknown_module, SENTENCE_TRANSFORMERS),
    Hostile("model", "attention kernel of the Hub", change_json("config.json", attn_implementation="owner/kernel")),
    Hostile("model", "modules: attention kernel by settings", change_json(
        "sentence_bert_config.json", model_args={"attn_implementation": "owner/kernel"}), SENTENCE_TRANSFORMERS),
    Hostile("model", "other weights", change_json("config.json", transformers_weights="../other.bin")),
    Hostile("model", "pickles for weights", in_place_of("*.safetensors", content=pickle.dumps)),
    Hostile("model", "pickles for settings", in_place_of("config.json", content=pickle.dumps)),
    Hostile("model", "nested config", in_place_of("config.json", content=nested)),
    Hostile("model", "modules: nested", in_place_of("modules.json", content=nested), SENTENCE_TRANSFORMERS),
    Hostile("model", "chat template", change_json(
        "tokenizer_config.json", chat_template="{{ cycler.__init__.__globals__ }}{% for x in range(10**9) %}{% x"),
        NO_COMMAND),
    Hostile("model", "escape sequences", change_json("config.json", model_type=ESCAPE)),
    *(Hostile("model", f"pipe for {name}", pipe_in_place_of(name)) for name in (
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "modules.json",
        "sentence_bert_config.json", "1_Pooling/config.json", "README.md", "adapter_config.json")),
    Hostile("checkpoint", "pickled tensors", in_place_of("iter_*/*.safetensors", content=pickle.dumps)),
    Hostile("checkpoint", "pickled record", in_place_of("iter_*/settings.yaml", content=pickle.dumps)),
    Hostile("checkpoint", "pickled state", in_place_of("iter_*/train_state.json", content=pickle.dumps)),
    Hostile("checkpoint", "nested state", in_place_of("iter_*/train_state.json", content=nested)),
    Hostile("checkpoint", "nested manifest", lambda folder, canary: [
        path.write_bytes(nested(canary)) for path in folder.glob("iter_*/MANIFEST.json")]),
    Hostile("checkpoint", "pickled metrics", in_place_of("metrics.jsonl", content=pickle.dumps), ("plot",)),
    Hostile("checkpoint", "record that calls", in_place_of("iter_*/settings.yaml", content=lambda canary: (
        f"training:\n  seed: !!python/object/apply:os.mkdir [{canary.mark}]\n".encode()))),
    Hostile("checkpoint", "format of megatron.core", each(
        "iter_*", change=lambda path, canary: (path / ".metadata").write_bytes(pickle.dumps(canary)))),
    Hostile("checkpoint", "tensors without offsets", each("iter_*/rank_*.safetensors", change=remove_offsets)),
    Hostile("checkpoint", "tensors that are pickles of extra state", each("iter_*", change=add_extra_state)),
    Hostile("checkpoint", "tensors elsewhere", each("iter_*/*.safetensors", change=link_elsewhere)),
    Hostile("checkpoint", "pointer out of the folder", in_place_of(
        "latest_checkpointed_iteration.txt", content=lambda _: b"../../../etc"), NO_COMMAND),
    *(Hostile("checkpoint", f"pipe for {name}", pipe_in_place_of(name)) for name in (
        "iter_0000001/MANIFEST.json", "iter_0000001/train_state.json", "iter_0000001/settings.yaml")),
    *(Hostile("checkpoint", f"pipe for {name}", pipe_in_place_of(name), refused_by) for name, refused_by in (
        ("metrics.jsonl", ("plot",)), ("latest_checkpointed_iteration.txt", NO_COMMAND),
        ("iter_0000001/extra.safetensors", NO_COMMAND))),
    *(Hostile("corpus", f"pickle for {end}", in_place_of(f"*{end}", content=pickle.dumps))
      for end in (".bin", ".idx", ".json")),
    *(Hostile("corpus", f"pipe for {end}", pipe_in_place_of(f"*{end}")) for end in (".bin", ".idx", ".json")),
    Hostile("corpus", "nested manifest", in_place_of("*_document.json", content=nested)),
    Hostile("dataset", "pickles", in_place_of(
        "*/*.parquet", "BIOSSES/*/*.parquet", content=pickle.dumps), READ_DATASETS),
    Hostile("dataset", "files of a URL", in_each_data_set(name_a_url), READ_DATASETS),
    Hostile("dataset", "script", in_each_data_set(bring_a_script), READ_DATASETS),
    Hostile("dataset", "pipes", pipe_in_place_of(
        "*/train.*", "BIOSSES/*/test.*", "texts.jsonl", "PAIRS.parquet")),
    Hostile("dataset", "pickled pairs", in_place_of("PAIRS.parquet", content=pickle.dumps), ("train-embedder",)),
    Hostile("dataset", "nested rows", in_place_of("texts.jsonl", content=nested), ("evaluate ppl",)),
    Hostile("records", "markup", add_markup, NO_COMMAND),  # text stays text
    Hostile("records", "nested", in_place_of("*/*.json", content=nested)),
    Hostile("records", "pickles", in_place_of("*/*.json", content=pickle.dumps)),
    Hostile("records", "pipes for figures", pipe_in_place_of("*.png", "*/*/*.jsonl"), NO_COMMAND),
    Hostile("records", "pipes", pipe_in_place_of("*/*.json")),
    Hostile("texts", "pickles", in_place_of("*", content=pickle.dumps)),
    Hostile("texts", "pipes", pipe_in_place_of("a.jsonl", "b.parquet")),
    Hostile("texts", "nested", in_place_of("a.jsonl", content=nested)),
    Hostile("tokenizer", "own code", bring_tokenizer_code),
    Hostile("tokenizer", "pickles", in_place_of("*", content=pickle.dumps)),
    Hostile("tokenizer", "pipes", pipe_in_place_of("tokenizer.json", "vocab.txt")),
    Hostile("tokenizer", "pipe for its settings", pipe_in_place_of("tokenizer_config.json"), NO_COMMAND),
    Hostile("tokenizer", "nested", in_place_of("tokenizer.json", content=nested)),
    Hostile("settings", "YAML that calls", in_place_of("*.yaml", content=lambda canary: (
        f"training: !!python/object/apply:os.mkdir [{canary.mark}]\n".encode()))),
    Hostile("settings", "pipes", pipe_in_place_of("*.yaml")),
    Hostile("settings", "nested", in_place_of("*.yaml", content=nested)),
)  # fmt: skip
