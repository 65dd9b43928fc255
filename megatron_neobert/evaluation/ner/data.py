"""Data sets of tagged words from local folders: CoNLL-style files, WikiANN's, and what the Hub holds.

A data set is a folder with the splits train, validation and perhaps test. As text, a line holds a word first and its
tag last, and an empty line ends a sentence (WikiANN writes the language before each word, "en:Paris"); as parquet or as
a saved data set, a row is a sentence with the columns tokens and ner_tags, whose numbers the file names itself. Tags
are O, or B-, I-, E-, S- with the kind of the entity; which of these schemes it is, seqeval finds out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.local_data import reading

OUTSIDE = "O"
# What files of a split are called: by the Hub, by CoNLL's tasks, by WikiANN and others.
_NAMES = {
    "train": ("train", "eng.train"),
    "validation": ("validation", "valid", "dev", "testa", "eng.testa"),
    "test": ("test", "testb", "eng.testb"),
}
SPLITS = tuple(_NAMES)
_ENDS = ("", ".txt", ".conll", ".bio", ".iob", ".iob2", ".tsv")
_TAG = re.compile(r"O|[BIES]-.+")
_LANGUAGE = re.compile(r"[a-z-]+:")
_WORDS, _TAGS = ("tokens", "words"), ("ner_tags", "tags", "labels")


class Sentence(NamedTuple):
    """Words, and the tag of each."""

    words: list[str]
    tags: list[str]


def find_data_sets(data_dir: Path) -> list[str]:
    """Every folder in data_dir, or in one of its folders, that has a training set; as NAME or NAME/PART."""
    folders = [path for pattern in ("*", "*/*") for path in sorted(data_dir.glob(pattern)) if path.is_dir()]
    return [str(path.relative_to(data_dir)) for path in folders if _find(path, "train") is not None]


def read_split(data_dir: Path, name: str, split: str) -> list[Sentence]:
    """The sentences of one split.

    Raises:
        MissingInputError: There is no such folder or split.
        DataError: Not in any of these forms; names file and line, or file and column.
    """
    folder = data_dir / name
    found = _find(folder, split)
    if found is None:
        raise MissingInputError(
            f"{folder} has no {split}: expected {split}.parquet, {split}-00000-of-00001.parquet, {split}.txt or a "
            "saved data set; name another of --tasks, or put it there."
        )
    with reading(folder):
        if isinstance(found, Path) and not found.is_dir():
            sentences = list(_read_text(found))
        else:
            sentences = list(_read_rows(found, folder, split))
    if not sentences:
        raise DataError(f"{folder}: {split} has no sentence; fetch it again.")
    return sentences


def spread(sentences: Sequence[Sentence], limit: int | None) -> list[Sentence]:
    """At most `limit`, evenly spread."""
    count = len(sentences)
    return [sentences[number * count // limit] for number in range(limit)] if limit and limit < count else [*sentences]


def labels_of(sentences: Iterable[Sentence]) -> list[str]:
    """Every tag that occurs, O first."""
    tags = {tag for sentence in sentences for tag in sentence.tags}
    return [OUTSIDE, *sorted(tags - {OUTSIDE})]


def _find(folder: Path, split: str) -> Path | list[Path] | None:
    """A text file, parquet files, or the folder of a saved data set."""
    for name in _NAMES[split]:
        if files := sorted(
            path for path in folder.glob("*.parquet") if re.fullmatch(rf"{name}(-\d+-of-\d+)?", path.stem)
        ):
            return files
        if file := next((folder / f"{name}{end}" for end in _ENDS if (folder / f"{name}{end}").is_file()), None):
            return file
        if (folder / name / "dataset_info.json").is_file():
            return folder / name
    return None


def _read_rows(found: Path | list[Path], folder: Path, split: str) -> Iterator[Sentence]:
    import datasets
    import pyarrow.parquet

    if isinstance(found, Path):
        saved = datasets.load_from_disk(str(found))
        columns, features = saved.to_dict(), saved.features
    else:
        table = pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in found])
        columns, features = table.to_pydict(), datasets.Features.from_arrow_schema(table.schema)
    words, tags = (next((name for name in names if name in columns), None) for names in (_WORDS, _TAGS))
    if words is None or tags is None:
        raise DataError(
            f"{folder}: {split} has the columns {', '.join(columns)}; expected {_WORDS[0]} and {_TAGS[0]}, lists of "
            "one length in every row."
        )
    names = getattr(getattr(features[tags], "feature", None), "names", None)
    for number, (own_words, own_tags) in enumerate(zip(columns[words], columns[tags], strict=True)):
        if len(own_words) != len(own_tags):
            raise DataError(f"{folder}: {split} row {number} has {len(own_words)} words, but {len(own_tags)} tags.")
        if own_words:
            yield Sentence(own_words, [_to_tag(tag, names, f"{folder}: {split} row {number}") for tag in own_tags])


def _to_tag(tag: Any, names: Sequence[str] | None, place: str) -> str:
    if isinstance(tag, int):
        if names is None or not 0 <= tag < len(names):
            raise DataError(
                f"{place}: tag {tag} has no name, since the file names "
                f"{'none' if names is None else f'only {len(names)}'}; expected names of the tags, as the Hub's data "
                "sets have them, or the tags as words."
            )
        tag = names[tag]
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise DataError(f"{place}: {tag!r} is no tag; they are O, or B-, I-, E- or S- and the kind of the entity.")
    return tag


def _read_text(path: Path) -> Iterator[Sentence]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other line ends occur within words
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, byte {error.start}: not UTF-8; convert it.") from error
    rows = [_read_line(line.strip(" \r"), f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    languages = {found[0] if (found := _LANGUAGE.match(row[0])) else "" for row in rows if row}
    prefix = languages.pop() if len(languages) == 1 else ""
    for is_sentence, group in groupby(rows, key=bool):
        if is_sentence:
            pairs = [(word.removeprefix(prefix), tag) for word, tag in filter(None, group)]
            if kept := [pair for pair in pairs if pair[0]]:  # WikiANN has words that are the language alone
                yield Sentence(*map(list, zip(*kept, strict=True)))


def _read_line(line: str, place: str) -> tuple[str, str] | None:
    """Word and tag; None: between sentences."""
    if not line.strip() or line.startswith(("-DOCSTART-", "# id ")):
        return None
    fields = line.split("\t") if "\t" in line else line.split(" ")
    if len(fields) < 2:
        raise DataError(f"{place}: {line!r:.80} is one field; a line has a word first and its tag last.")
    return fields[0], _to_tag(fields[-1], None, place)
