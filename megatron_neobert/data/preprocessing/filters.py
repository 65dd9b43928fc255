"""The user's filters: functions that keep, drop or rewrite a record. The worker that reads the record calls them.

    def no_lists(record):
        if record.text.count("\\n- ") > 50:
            return "mostly a list"                        # drop the record, counted under this reason
        # Keep the record with another text and another field; None keeps it unchanged.
        return record._replace(text=record.text.strip(), fields=record.fields | {"lines": record.text.count("\\n")})

The result must depend only on the record. Otherwise the corpus depends on the number of workers.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from megatron_neobert.data.inputs.records import Reason, RecordBatch
from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.runtime.atomic_files import sha256_of

_LONGEST_REASON = 200  # characters of a filter's answer that the manifest keeps


class Record(NamedTuple):
    """Argument of a filter."""

    text: str  # not empty, valid Unicode
    input_file: str  # path or URL of the input file
    fields: dict[str, Any]  # by --record-key; None if the record does not have the field. A filter may return others


Filter = Callable[[Record], str | Record | None]


class FilterSource(NamedTuple):
    """File and function of a filter."""

    file: str  # absolute path, because workers may have another current folder
    function: str
    sha256: str  # of the file

    @property
    def label(self) -> str:
        """Name of the filter in the manifest."""
        return f"{Path(self.file).stem}:{self.function}"


def find_filters(names: Sequence[str]) -> tuple[FilterSource, ...]:
    """Import the functions given as FILE.py:FUNCTION, and return one FilterSource for each, in the same order.

    Raise ConfigError if a file cannot be imported, its function is missing or not callable, or two labels are equal.
    """
    sources: list[FilterSource] = []
    for name in names:
        path, _, function = name.rpartition(":")
        file = Path(path).absolute()
        try:
            source = FilterSource(str(file), function, sha256_of(file))
            if not callable(load_filter(source)):
                raise TypeError(f"{function} is not a function")
        # Importing the file may raise anything. A script that ends in sys.exit(main()) would end this command.
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"--filter {name}: {type(error).__name__}: {error}; use FILE.py:FUNCTION of a file that can be imported"
            ) from error
        if source.label in (earlier.label for earlier in sources):
            raise ConfigError(
                f"--filter {name}: two filters have the label {source.label}, under which the manifest counts dropped "
                "records; use each filter once, and rename the function or its file"
            )
        sources.append(source)
    return tuple(sources)


@cache
def load_filter(source: FilterSource) -> Filter:
    """Import and return the function, once per process. Raise DataError if the file changed since `source` was made."""
    if sha256_of(Path(source.file)) != source.sha256:
        raise DataError(f"{source.file} has changed since the run started; start again")
    # The user names this file on the command line, so its code may be executed.
    spec = importlib.util.spec_from_file_location(  # noqa: TID251
        f"filters_{source.sha256[:16]}", source.file
    )
    assert spec and spec.loader, source.file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve annotations through sys.modules
    spec.loader.exec_module(module)
    return cast(Filter, getattr(module, source.function))


def apply_filters(batch: RecordBatch, sources: Sequence[FilterSource], input_name: str) -> RecordBatch:
    """Return a batch with the texts that all filters keep or rewrite, in order. Without filters, return `batch`.

    A record whose filter raises an exception or returns a wrong type is rejected. The new batch shares `rejected` and
    `dropped` with the argument, so rejected and dropped records are added to both.
    """
    if not sources:
        return batch
    filtered = replace(batch, texts=[], text_numbers=[], fields=[], utf8_bytes=0)
    filters = [(source.label, load_filter(source)) for source in sources]
    for text, number, fields in zip(batch.texts, batch.text_numbers, batch.fields, strict=True):
        record = Record(text, input_name, dict(fields))
        for label, function in filters:
            try:
                result = function(record)
                if not isinstance(result, Record | str | None):
                    raise TypeError(
                        f"returned {type(result).__name__} instead of a record, a reason to drop it or None"
                    )
                for name, kind in {"text": str, "fields": dict}.items() if isinstance(result, Record) else ():
                    if not isinstance(value := getattr(result, name), kind):
                        found = type(value).__name__
                        raise TypeError(f"returned a record whose {name} is {found} instead of {kind.__name__}")
            except (Exception, SystemExit) as error:
                detail = f"{label}: {type(error).__name__}: {error}"
                filtered.reject(Reason.FILTER_FAILED, number, detail, text.encode())
                break
            if isinstance(result, str):
                filtered.dropped[f"{label}: {result[:_LONGEST_REASON]}"] += 1
                break
            record = result or record
        else:
            filtered.add_text(record.text, number, record.fields)
    filtered.rejected.sort(key=lambda rejected: rejected.number)
    return filtered
