"""Document attributes, and the choice of documents by an expression over them.

PREFIX.attributes.parquet has one row per document, in the order of the corpus, and one column per --record-key.
Attributes that were added to the finished corpus are in PREFIX.attributes_00000.parquet and so on, with the same rows.
Two attributes need no column: `length` (the tokens of a document) is in the index, and `input` (the name of its input
file) follows from the manifest. An expression is evaluated once, in steps of bounded memory. The result has one bit per
document, so 10^9 documents take 125 MB.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import accumulate, pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from megatron_neobert.config.data_path import names_in, parse_expression
from megatron_neobert.data.corpus.attribute_columns import DERIVED, attribute_name, write_columns
from megatron_neobert.data.corpus.drop_list import read_drop_list
from megatron_neobert.data.corpus.format import DAMAGED, write_manifest
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.runtime.atomic_files import sync_to_disk
from megatron_neobert.runtime.jobs import JobFolder

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BLOCK = 256  # documents per block; ChosenDocuments keeps one cumulative count per block
_STEP = 1 << 18  # documents for which an expression is evaluated in one step
# By the value of a byte: its bits, lowest first; how many are set; and the positions of its bits, set bits first.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BITS_SET = _BITS.sum(axis=1, dtype=np.uint8)
_SET_BITS_FIRST = np.argsort(1 - _BITS, axis=1, kind="stable")
# Types that expressions can compare. "null" is the type of a column without any value.
_TYPES = ("a number", "a text", "true or false", "null")
_COMPARE = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}


class ChosenDocuments:
    """The documents of a corpus whose bits are set.

    Finding the n-th chosen document takes a binary search for its block and a search in the bits of that block. `bits`
    is a result of `choose_documents` in which the bits after the last document are 0.
    """

    def __init__(self, bits: NDArray[np.uint8]) -> None:
        self._blocks = bits.reshape(-1, _BLOCK // 8)
        # Number of chosen documents before each block.
        self._before = np.append(0, np.cumsum(_BITS_SET[self._blocks].sum(axis=1, dtype=np.int64)))

    def __len__(self) -> int:
        return int(self._before[-1])

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document number in the corpus for each index of a chosen document, in [0, len(self))."""
        blocks = np.searchsorted(self._before, indices, side="right") - 1
        ranks_in_block = indices - self._before[blocks]
        up_to_byte = np.cumsum(_BITS_SET[self._blocks[blocks]], axis=1, dtype=np.int16)
        at = np.argmax(up_to_byte > ranks_in_block[:, None], axis=1)
        byte = self._blocks[blocks, at]
        before_byte = up_to_byte[np.arange(len(at)), at] - _BITS_SET[byte]
        return blocks * _BLOCK + 8 * at + _SET_BITS_FIRST[byte, ranks_in_block - before_byte]


def choose_documents(corpus: Corpus, conditions: Sequence[str], drop: Sequence[str] = ()) -> NDArray[np.uint8]:
    """Return one bit per document, set if all conditions hold and no drop list drops the document.

    `conditions` are expressions of config/data_path.py, and `drop` contains paths of drop lists. A missing value
    satisfies neither a comparison nor its negation. Each byte covers eight documents, the first in the lowest bit. Bits
    after the last document pad the array to whole blocks of 256 bits; their values have no meaning. Raise ConfigError
    if a condition does not fit the attributes, and DataError if a file is damaged.
    """
    bits = np.full(-(-len(corpus) // _BLOCK) * _BLOCK // 8, 0 if conditions else 255, dtype=np.uint8)
    if conditions:
        tree = ast.BoolOp(ast.And(), [parse_expression(condition) for condition in conditions])
        for first, columns in _read_columns(corpus, names_in(tree)):
            chosen = _evaluate(tree, columns).fill_null(False).to_numpy(zero_copy_only=False)
            packed = np.packbits(np.append(np.zeros(first % 8, dtype=np.bool_), chosen), bitorder="little")
            bits[first // 8 : first // 8 + len(packed)] |= packed
    for path in drop:
        _, dropped = read_drop_list(Path(path), corpus)
        bits[: len(dropped)] &= ~dropped
    return bits


def attribute_types(corpus: Corpus) -> dict[str, str]:
    """Return {name: type} of all attributes, and of `length` and `input`, which every corpus has.

    A type is "a number", "a text", "true or false" or an Arrow type. Raise DataError if the attributes are damaged.
    """
    types: dict[str, str] = {}
    for path in corpus.attribute_files:
        types |= _types_in(path)
    return types | DERIVED


def check_attributes(corpus: Corpus) -> None:
    """Read all attributes. Raise DataError if a file cannot be decoded, even if the file's checksum is right."""
    for path in corpus.attribute_files:
        for _ in _read_file(path, corpus, list(_types_in(path))):
            pass


def _types_in(path: Path) -> dict[str, str]:
    with _open_file(path) as file:
        names = [field.name for field in file.schema_arrow]
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise DataError(f"{path} has the column {min(duplicates)!r} more than once; {DAMAGED}")
        return {field.name: _type_of(field.type) for field in file.schema_arrow}


@contextmanager
def _open_file(path: Path, **options: Any) -> "Iterator[pq.ParquetFile]":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # pyarrow refuses paths that are not valid UTF-8, so it gets an open file.
        with path.open("rb") as stream, pq.ParquetFile(stream, page_checksum_verification=True, **options) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); {DAMAGED}") from error


def _read_columns(corpus: Corpus, names: set[str]) -> "Iterator[tuple[int, dict[str, pa.Array]]]":
    """Yield (number of the first document, {name: column}) for each batch of documents.

    Raises:
        ConfigError: An attribute is missing, or its values are not numbers, texts or truth values.
        DataError: A file of attributes is damaged.
    """
    stored = sorted(names - DERIVED.keys())
    types = attribute_types(corpus) if stored else {}
    if unknown := [name for name in stored if types.get(name) not in _TYPES]:
        listed_types = ", ".join(f"{name} ({type_})" for name, type_ in types.items())
        raise ConfigError(
            f"{corpus.prefix} has no attribute {unknown[0]} of numbers, texts, or true and false; its attributes are "
            f"{listed_types}. Correct the expression."
        )
    if not stored:
        for first in range(0, len(corpus), _STEP):
            yield first, _derive_columns(corpus, names, first, min(first + _STEP, len(corpus)))
        return
    names_in_file = {path: [name for name in _types_in(path) if name in names] for path in corpus.attribute_files}
    files = [_read_file(path, corpus, here) for path, here in names_in_file.items() if here]
    for (rows, columns), *others in zip(*files, strict=False):
        if any(other != rows for other, _ in others):
            raise DataError(f"{corpus.prefix}: its files of attributes have different row groups; {DAMAGED}")
        for _, added in others:
            columns |= added
        yield rows.start, columns | _derive_columns(corpus, names, rows.start, rows.stop)


def _read_file(path: Path, corpus: Corpus, names: list[str]) -> "Iterator[tuple[range, dict[str, pa.Array]]]":
    """Yield (range of document numbers, {name: column}) for each row group. Raise DataError if the file is damaged."""
    first = 0
    with _open_file(path, read_dictionary=names) as file:
        if file.metadata.num_rows != len(corpus):
            raise DataError(f"{path}: expected {len(corpus)} rows, found {file.metadata.num_rows}; {DAMAGED}")
        for group in range(file.num_row_groups):
            rows = range(first, first + file.metadata.row_group(group).num_rows)
            first = rows.stop
            table = file.read_row_group(group, names)
            table.validate(full=True)  # texts are UTF-8
            yield rows, {name: table[name].combine_chunks() for name in names}


def _derive_columns(corpus: Corpus, names: set[str], first: int, stop: int) -> "dict[str, pa.Array]":
    """Return the columns `length` and `input` of documents [first, stop), if listed in `names`."""
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}
    if "length" in names:
        columns["length"] = pa.array(corpus.lengths_between(first, stop))
    if "input" in names:
        inputs = corpus.manifest.inputs
        counts = [record.documents for record in inputs.values()]
        numbers = np.searchsorted([*accumulate(counts)], np.arange(first, stop), side="right")
        # The manifest of a corpus that another program wrote may have no inputs.
        names_or_none = [name.encode(errors="backslashreplace").decode() for name in inputs] or [""]
        utf8_names = pa.array(names_or_none, pa.string())
        columns["input"] = pa.DictionaryArray.from_arrays(numbers, utf8_names)
    return columns


def _evaluate(node: ast.expr, columns: "dict[str, pa.Array]") -> "pa.Array":
    """Evaluate a condition for each row. The result is null if it depends on a missing value.

    Raise ConfigError if the condition compares different types.
    """
    import pyarrow.compute as pc

    match node:
        case ast.BoolOp(op=operator, values=conditions):
            combine = pc.and_kleene if isinstance(operator, ast.And) else pc.or_kleene
            return reduce(combine, [_evaluate(condition, columns) for condition in conditions])
        case ast.UnaryOp(operand=condition):
            return pc.invert(_evaluate(condition, columns))
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as operator], comparators=[ast.List(elts=values)]):
            is_in = reduce(pc.or_kleene, [_compare(left, ast.Eq(), value, columns) for value in values])
            return pc.invert(is_in) if isinstance(operator, ast.NotIn) else is_in
        case ast.Compare(left=left, ops=operators, comparators=comparators):
            pairs = zip(operators, pairwise([left, *comparators]), strict=True)
            return reduce(pc.and_kleene, [_compare(a, operator, b, columns) for operator, (a, b) in pairs])
    # The name of an attribute of truth values.
    return _compare(node, ast.Eq(), ast.Constant(value=True), columns)


def _compare(left: ast.expr, operator: ast.cmpop, right: ast.expr, columns: "dict[str, pa.Array]") -> "pa.Array":
    """Compare two operands (attribute names or literals) row by row; the result is null where a value is missing.

    With == and !=, `*` in a text matches any characters. For `input`, texts without "/" are compared with file names.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    operands = [
        columns[side.id] if isinstance(side, ast.Name) else pa.scalar(ast.literal_eval(side)) for side in (left, right)
    ]
    # A column without any value satisfies no comparison.
    if any(pa.types.is_null(side.type) for side in operands):
        return pa.nulls(max(len(side) for side in operands if isinstance(side, pa.Array)), pa.bool_())
    types, is_ordered = [_type_of(side.type) for side in operands], not isinstance(operator, ast.Eq | ast.NotEq)
    if types[0] != types[1] or (is_ordered and types[0] == "true or false"):
        raise ConfigError(
            f"{ast.unparse(left)} is {types[0]} and {ast.unparse(right)} is {types[1]}, which "
            f"{ast.unparse(ast.Compare(left, [operator], [right]))} cannot compare; correct the expression."
        )
    # Python compares integers and floats of any size. Arrow refuses integers from 2^53 beside a float.
    if any(pa.types.is_floating(side.type) or side.type == pa.uint64() for side in operands):
        operands = [side.cast(pa.float64(), safe=False) for side in operands]
    compare = getattr(pc, _COMPARE[type(operator)])
    for side, text in (operands, operands[::-1]):
        # Compare each distinct text of the column once.
        if isinstance(side, pa.DictionaryArray) and isinstance(text, pa.StringScalar):
            values, pattern = side.dictionary, text.as_py()
            if side is columns.get("input") and "/" not in pattern:
                values = pa.array([PurePosixPath(name).name for name in values.to_pylist()])
            if "*" in pattern and not is_ordered:
                regex = "(?s)^" + ".*".join(map(re.escape, pattern.split("*"))) + "$"
                holds = pc.match_substring_regex(values, regex)
                holds = pc.invert(holds) if isinstance(operator, ast.NotEq) else holds
            else:
                holds = compare(values, text) if side is operands[0] else compare(text, values)
            return holds.take(side.indices)
    return compare(*(side.dictionary_decode() if isinstance(side, pa.DictionaryArray) else side for side in operands))


def _type_of(arrow_type: "pa.DataType") -> str:
    """Return "a number", "a text" or "true or false", or Arrow's name for any other type."""
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return "a number"
    if types.is_boolean(arrow_type):
        return "true or false"
    return "a text" if types.is_string(arrow_type) or types.is_large_string(arrow_type) else str(arrow_type)


def attributes_folder(corpus: Corpus) -> JobFolder:
    """Return a context manager for PREFIX.attributes.partial, whose lock allows one addition to a corpus at a time."""
    return JobFolder(corpus.files.attributes.absolute().with_suffix(".partial"))


def is_added(corpus: Corpus, origin: str, name: str) -> bool:
    """Return True if the corpus already has an attribute from the same `origin`.

    Otherwise, return False. Raise ConfigError if an attribute `name` exists, or `name` cannot be used in expressions.
    """
    if origin in corpus.manifest.added_attributes:
        return True
    if name in attribute_types(corpus):
        raise ConfigError(f"{corpus.prefix} has the attribute {name} already; choose another name")
    if not name.isidentifier() or attribute_name(name) != name:
        raise ConfigError(
            f"{name!r} cannot name an attribute; use ASCII letters, digits and _, and no keyword of Python"
        )
    return False


def add_attribute(corpus: Corpus, origin: str, name: str, values: Sequence[Any] | NDArray[Any]) -> None:
    """Add an attribute, one value per document. Do nothing if the corpus already has one from the same `origin`.

    `origin` states what computed the attribute, for the manifest. Raise DataError if the corpus has been written again
    since it was opened. The file gets its name before the manifest lists it, so a kill at any moment leaves the corpus
    without the attribute or with the complete attribute. Token ids and `Manifest.documents_sha256` do not change.
    """
    import pyarrow as pa

    table = pa.table({name: values})
    with attributes_folder(corpus) as folder:
        work = folder.path / "column.parquet"
        record = write_columns(work, table.schema, [table])
        current, files = Corpus(corpus.prefix), corpus.files
        if current.manifest.documents_sha256 != corpus.manifest.documents_sha256:
            raise DataError(
                f"{corpus.prefix} has been written again since this run began; start again with --overwrite"
            )
        if is_added(current, origin, name):
            return
        added = current.manifest.added_attributes
        path = files.added_attributes(len(added))
        work.replace(path)
        sync_to_disk(path.parent)
        write_manifest(files.manifest, replace(current.manifest, added_attributes=added | {origin: record}))
