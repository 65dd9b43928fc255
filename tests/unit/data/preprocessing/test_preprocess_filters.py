"""Which documents a corpus keeps, its corpus shards, and settings that contradict each other."""

import pytest
from unit.data.preprocess_place import decoded

from megatron_neobert.errors import ConfigError

# --- which documents are kept


def test_duplicates_are_dropped_across_shards_and_the_first_stays(place):
    place.add_texts("a.jsonl", "hello", "world", "hello")
    place.add_texts("b.jsonl", "xyz", "world", "Hello")  # the same ids as "hello", but another text
    for name, workers in {"one": None, "two": 2}.items():
        place.run(name, deduplicate="exact", workers=workers)
        assert decoded(place, name) == ["hello", "world", "xyz", "hello"]
        assert place.corpus(name).manifest.dropped == {"duplicate": 2}
    assert place.contents("one") == place.contents("two")


def test_held_out_documents_are_chosen_by_their_text_and_not_by_their_place(place):
    texts = [f"hello {word}" for word in ("world " * count for count in range(1, 401))]
    place.add_texts("a.jsonl", *texts)
    place.run("forth", split_validation=0.1)
    place.add_texts("a.jsonl", *reversed(texts))
    place.run("back", split_validation=0.1)
    held_out = {name: decoded(place, name, end="_validation") for name in ("forth", "back")}
    assert held_out["forth"] == held_out["back"][::-1]
    assert 20 < len(held_out["forth"]) < 60  # 40 expected, standard deviation 6
    assert sorted(decoded(place, "forth") + held_out["forth"], key=len) == [text.strip() for text in texts]
    manifest = place.corpus("forth").manifest
    assert (manifest.part_of, manifest.held_out) == ("training", len(held_out["forth"]))


# --- settings that contradict each other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ray_address": "auto"}, "--ray-address auto has no effect without --executor ray"),
        ({"text_separator": ""}, "--text-separator is empty"),
        ({"max_error_rate": 1.5}, "--max-error-rate 1.5 is not a fraction of the records"),
        ({"split_validation": 1.0}, "--split-validation 1.0 is not a fraction of the documents"),
    ],
)
def test_contradictory_settings_are_refused(place, settings, message):
    with pytest.raises(ConfigError, match=message):
        place.settings(**settings)
