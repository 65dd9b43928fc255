"""Filters of the user's own: functions that keep, drop or rewrite a record, in the worker that has read it.

    def no_lists(record):
        if record.text.count("\\n- ") > 50:
            return "mostly a list"                        # dropped, and counted under this reason
        return record._replace(text=record.text.strip())  # kept with another text; None keeps it as it is

A filter must depend on the record alone, or the corpus would depend on the number of workers.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from megatron_neobert.data.inputs.records import FILTER_FAILED, RecordBatch, add_text, reject
from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.runtime.atomic_files import sha256_of


class Record(NamedTuple):
    """Argument of a filter. The text is not empty and is valid Unicode."""

    text: str
    shard: str  # path or URL
    fields: dict[str, Any]  # by --record-key; None: the record has no such field


Filter = Callable[[Record], str | Record | None]


class FilterSource(NamedTuple):
    """Place of a filter's code."""

    file: str  # an absolute path: workers have other folders
    function: str
    sha256: str  # of the file

    @property
    def label(self) -> str:
        """Name of the filter in the manifest."""
        return f"{Path(self.file).stem}:{self.function}"


def find_filters(names: Sequence[str]) -> tuple[FilterSource, ...]:
    """Find filters given as FILE.py:FUNCTION, with their code as it is now.

    Raises:
        ConfigError: There is no such file or function, or the manifest could not tell two filters apart.
    """
    sources: list[FilterSource] = []
    for name in names:
        place, _, function = name.rpartition(":")
        file = Path(place).absolute()
        try:
            source = FilterSource(str(file), function, sha256_of(file))
            is_filter = callable(load_filter(source))
        except Exception as error:  # a file that is imported may raise anything
            raise ConfigError(
                f"--filter {name}: {type(error).__name__}: {error}; give FILE.py:FUNCTION, which can be imported"
            ) from error
        if not is_filter:
            raise ConfigError(f"--filter {name}: {function} is no function; name one that takes a record")
        if source.label in (earlier.label for earlier in sources):
            raise ConfigError(
                f"--filter {name}: another filter is called {source.label} too, by which the manifest counts what a "
                "filter drops; name each once, and give functions or files of one name different names"
            )
        sources.append(source)
    return tuple(sources)


@cache
def load_filter(source: FilterSource) -> Filter:
    """Load the function into this process.

    Raises:
        DataError: Its file has changed since the run was planned.
    """
    if sha256_of(Path(source.file)) != source.sha256:
        raise DataError(f"--filter {source.label} has changed since the run started; start again")
    # The code that --filter names on the command line.
    spec = importlib.util.spec_from_file_location(  # noqa: TID251
        f"filters_{source.sha256[:16]}", source.file
    )
    assert spec and spec.loader, source.file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations that are strings
    spec.loader.exec_module(module)
    return cast(Filter, getattr(module, source.function))


def apply_filters(batch: RecordBatch, sources: Sequence[FilterSource], shard: str) -> RecordBatch:
    """Return what the filters leave of a batch; each one gets what the one before has left.

    Raises:
        DataError: The file of a filter has changed since the run was planned.
    """
    if not sources:
        return batch
    left = replace(batch, texts=[], origins=[], utf8_bytes=0)
    filters = [(source.label, load_filter(source)) for source in sources]
    for text, origin in zip(batch.texts, batch.origins, strict=True):
        record = Record(text, shard, origin.fields)
        for label, function in filters:
            try:
                answer = function(record)
                if not isinstance(answer, Record | str | None):
                    raise TypeError(f"returned {type(answer).__name__}, and not a record, a reason to drop it or None")
                if isinstance(answer, Record) and not isinstance(answer.text, str):
                    raise TypeError(f"returned a record whose text is of type {type(answer.text).__name__}, and no str")
            except Exception as error:
                detail = f"{label}: {type(error).__name__}: {error}"
                reject(left, FILTER_FAILED, origin.number, detail, text.encode())
                break
            if isinstance(answer, str):
                left.dropped[f"{label}: {answer}"] += 1
                break
            record = answer or record
        else:
            add_text(left, record.text, origin=origin)
    left.rejected.sort(key=lambda rejected: rejected.number)
    return left
