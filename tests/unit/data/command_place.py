"""A folder for `neobert preprocess`, the arguments that name its files, and what a run writes there."""

from collections.abc import Sequence
from pathlib import Path

from unit.data.small_corpus import write_vocabulary

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
LETTERS += [f"##{letter}" for letter in LETTERS]


def make_place(folder: Path, pieces: Sequence[str]) -> Path:
    """The folder with a vocab.txt of these pieces, and an empty folder of shards in it."""
    write_vocabulary(folder / "vocab.txt", pieces)
    (folder / "shards").mkdir()
    return folder


def arguments_of(place: Path, *more: object) -> tuple[object, ...]:
    """Return the arguments of a preprocessing that writes place/run_content_document."""
    given = {"--input": place / "shards", "--output-prefix": place / "run", "--tokenizer-model": place / "vocab.txt"}
    return (*(word for pair in given.items() if pair[0] not in more for word in pair), *more)
