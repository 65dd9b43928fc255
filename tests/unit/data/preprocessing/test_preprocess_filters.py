"""Duplicates, held-out documents, and settings that are refused."""

import pytest
from unit.data.preprocess_workspace import decoded

from megatron_neobert.errors import ConfigError


def test_only_the_first_of_equal_texts_in_all_input_files_is_kept(workspace):
    workspace.add_texts("a.jsonl", "hello", "world", "hello")
    workspace.add_texts("b.jsonl", "xyz", "world", "Hello")  # "Hello" has the ids of "hello", but is another text
    for name, workers in {"one": None, "two": 2}.items():
        workspace.run(name, deduplicate="exact", workers=workers)
        assert decoded(workspace, name) == ["hello", "world", "xyz", "hello"]
        assert workspace.corpus(name).manifest.dropped == {"duplicate": 2}
    assert workspace.contents("one") == workspace.contents("two")


def test_held_out_documents_depend_on_their_text_and_not_on_their_order(workspace):
    texts = [f"hello {'world ' * count}" for count in range(1, 401)]
    workspace.add_texts("a.jsonl", *texts)
    workspace.run("forth", split_validation=0.1)
    workspace.add_texts("a.jsonl", *reversed(texts))
    workspace.run("back", split_validation=0.1)
    held_out = {name: decoded(workspace, name, end="_validation") for name in ("forth", "back")}
    assert held_out["forth"] == held_out["back"][::-1]
    assert 20 < len(held_out["forth"]) < 60  # 40 expected, standard deviation 6
    assert sorted(decoded(workspace, "forth") + held_out["forth"], key=len) == [text.strip() for text in texts]
    manifest = workspace.corpus("forth").manifest
    assert (manifest.part_of, manifest.held_out) == ("training", len(held_out["forth"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ray_address": "auto"}, "--ray-address auto has no effect without --executor ray"),
        ({"text_separator": ""}, "--text-separator is empty"),
        ({"max_error_rate": 1.5}, "--max-error-rate 1.5 is not a fraction of the records"),
        ({"split_validation": 1.0}, "--split-validation 1.0 is not a fraction of the documents"),
        ({"record_keys": ("2nd",)}, "--record-key 2nd would be the attribute '2nd'"),
    ],
)
def test_invalid_settings_are_refused(workspace, settings, message):
    with pytest.raises(ConfigError, match=message):
        workspace.settings(**settings)
