"""Models of the Hugging Face Hub: read from its cache without network, never code or pickles, and clear refusals."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from commands import call
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError
from huggingface_hub.utils import filter_repo_objects
from json_files import read_json, write_jsonl
from unit.evaluation.pseudo_perplexity_models import make_texts, write_model

from megatron_neobert.data.tokenizer.files import find_tokenizer_file
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.huggingface.hub import find_in_hub, find_model

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a folder like the cache of the Hub, with two revisions of lab/tiny, whose files are links into `blobs`."""
    cache = tmp_path_factory.mktemp("cache")
    repository = cache / "models--lab--tiny"
    (repository / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate(COMMITS.items()):
        (repository / "refs" / revision).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        for path in write_model(repository / "blobs" / commit, "Bert", seed=seed).iterdir():
            (repository / "snapshots" / commit / path.name).symlink_to(path)
    (cache / "models--tiny").symlink_to(repository)
    return cache


@pytest.fixture
def offline(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache / "models--lab--tiny" / "snapshots"


def test_cached_model_is_evaluated_without_network_and_its_results_have_its_name(offline, tmp_path):
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"content": text} for text in make_texts(9, longest=38)])
    code, _, errors = call("evaluate ppl", "--model", "lab/tiny@v1", "--data", texts, "--output", tmp_path / "out")
    assert code == 0, errors
    assert str(offline / COMMITS["v1"]) in errors
    record = read_json(tmp_path / "out" / "tiny" / "pseudo_perplexity.json")
    assert record["model"] == {"name": "tiny", "fingerprint": fingerprint(offline / COMMITS["v1"])}


@pytest.mark.parametrize("name", ["tiny", "lab/tiny", "lab/tiny@v1"])
def test_tokenizer_of_the_hub_is_the_file_of_its_snapshot(offline, name):
    commit = COMMITS["v1" if "@" in name else "main"]
    assert find_tokenizer_file(Path(name)).samefile(find_tokenizer_file(offline / commit))


NO_NAMES = [
    "a/b/c",
    "/lab/tiny",
    "../tiny",
    "lab/..",
    ".lab/tiny",
    "vocab.txt",
    "lab/tokenizer.json",
    "lab/spiece.model",
]


@pytest.mark.parametrize("path", NO_NAMES)
def test_path_that_cannot_be_a_name_is_not_looked_for_in_the_hub(offline, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert find_in_hub("--model", Path(path), ()) is None


def test_conversion_reads_names_of_the_hub(offline, tmp_path):
    code, _, errors = call("convert hf-to-megatron", "--load", "lab/tiny", "--output", tmp_path / "out")
    assert code == 78 and f"{COMMITS['main']}/config.json: model_type is 'bert'" in errors  # read, and no NeoBERT
    code, _, errors = call("verify", "lab/tiny", tmp_path)
    assert code == 78 and f"{COMMITS['main']}/config.json: model_type is 'bert'" in errors


def test_existing_path_wins_over_a_name_of_the_hub(offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_model("--model", Path("lab/tiny")) == offline / COMMITS["main"]
    write_model(Path("lab/tiny"), "Bert")
    assert find_model("--model", Path("lab/tiny")) == Path("lab/tiny")


@pytest.mark.parametrize("model", ["lab/other", "lab/tiny@v2", "other"])
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("preprocess", "--input . --output-prefix out --tokenizer-model"),
        ("convert hf-to-megatron", "--output out --load"),
        ("verify", "."),
        ("export-onnx", "--output out --model"),
        ("evaluate throughput", "--output out --model"),
        ("evaluate glue", "--output out --data-dir . --model"),
        ("evaluate mteb", "--output out --data-dir . --model"),
        ("train-embedder", "--output out --data-dir . --config none.yaml --model"),
    ],
)
def test_model_that_the_cache_lacks_is_refused_offline_with_the_command_that_fetches_it(
    offline, tmp_path, monkeypatch, command, flags, model
):
    monkeypatch.chdir(tmp_path)
    code, _, errors = call(command, *flags.split(), model)
    assert code == 66 and errors.startswith("error: no network: ") and f" {model} is no path of this mac" in errors
    assert f"hf download {model.partition('@')[0]} --local-dir DIR on a machine with network" in errors


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("preprocess --input . --output-prefix o --tokenizer-model", "tokenizr", "'tokenizer'? Check the path, or hf"),
        ("preprocess --input . --output-prefix o --tokenizer-model", "lab/tokenizr", "'tokenizer'? name a vocab.txt"),
        ("evaluate throughput --output out --model", "modl", "'model'? Check the path, or hf download modl"),
        ("evaluate throughput --output out --model", "lab/modl", "'model'? name a Hugging Face folder"),
        ("evaluate ner --output out --model model --data-dir", "lib", "'lab'? create it"),
    ],
)
def test_misspelt_path_gets_the_similar_name_beside_it(offline, tmp_path, monkeypatch, command, name, words):
    monkeypatch.chdir(tmp_path)
    for folder in ("tokenizer", "model", "lab/tokenizer", "lab/model"):
        Path(folder).mkdir(parents=True)
    code, _, errors = call(command, name)
    assert code == 66 and f"; did you mean {words}" in errors, errors


def test_refusal_of_a_gated_model_names_the_login(tmp_path, monkeypatch):
    response = SimpleNamespace(headers={}, request=None)

    def refuse(*_, **__):
        raise GatedRepoError("Access to model lab/gated is restricted.", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    code, _, errors = call("evaluate throughput", "--model", "lab/gated", "--output", tmp_path)
    assert code == 66 and "lab/gated is restricted" in errors and "hf auth login" in errors


def test_the_license_is_downloaded_but_code_and_pickles_never_are(tmp_path, monkeypatch):
    wanted = ["config.json", "model.safetensors", "1_Pooling/config.json", "mlm_head/model.safetensors", "LICENSE"]
    unwanted = ["modeling_neobert.py", "1_Pooling/custom.py", "pytorch_model.bin", "1_Dense/pytorch_model.bin", "x.pt"]

    def list_downloads(name, *, revision, allow_patterns):
        assert list(filter_repo_objects(wanted + unwanted, allow_patterns=allow_patterns)) == wanted
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", list_downloads)
    (tmp_path / "config.json").write_text("{}")
    assert find_model("--model", Path("lab/model")) == tmp_path
