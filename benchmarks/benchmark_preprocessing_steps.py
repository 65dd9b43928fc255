"""Steps of benchmark_preprocessing.py that need large libraries: inputs, other tools, and counting of tokens.

    python benchmarks/benchmark_preprocessing_steps.py STEP '{"argument": value, ...}'

Prints the result of the step as JSON. Each step is a process, because the peak memory of a process that the benchmark
starts is at least the benchmark's memory at that time.
"""

import hashlib
import json
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from megatron_neobert.cli import Parser
from megatron_neobert.errors import ConfigError, DataError, run_command
from megatron_neobert.text import parse_json

BATCH_DOCUMENTS = 1000  # for the other tools; from 128 to 5,000, their speed hardly changes but their memory does
SAMPLE_DOCUMENTS = 64  # for the warm-up
DTYPE_BYTES = {4: 4, 8: 2}  # by Megatron's codes of int32 and uint16


def main() -> None:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("arguments", type=parse_json, metavar="JSON", help="the step's arguments by name")
    options = parser.parse_args()
    print(json.dumps(STEPS[options.step](**options.arguments)))


# ---- inputs


def prepare(patterns: Sequence[str], text_key: str, model: str, folder: str) -> dict[str, Any]:
    """Read all input files into the page cache. Write a sample, and a tokenizer for the other tools, to `folder`.

    Returns:
        "files" and "sample": paths of the input files and of the sample. "corpus": number of "documents" and
        "text_bytes". "job": all fields of `Job` except `folder` and `megatron_lm`.

    Raises:
        MissingInputError: An input file or the tokenizer does not exist.
        DataError: The tokenizer is damaged.
        ConfigError: An input file is not parquet, or has no column `text_key`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from megatron_neobert.data.inputs.find import find_inputs

    files = find_inputs(patterns)
    documents = text_bytes = 0
    for file in files:
        try:
            parquet = pq.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{file} is not a parquet file; the tools are compared on parquet files.") from error
        if text_key not in parquet.schema_arrow.names:
            columns = ", ".join(parquet.schema_arrow.names)
            raise ConfigError(f"{file} has the columns {columns}, but no '{text_key}'; choose one with --text-key.")
        for batch in parquet.iter_batches(columns=[text_key]):
            documents += batch.num_rows
            text_bytes += pc.sum(pc.binary_length(batch[text_key])).as_py() or 0

    sample = next(pq.ParquetFile(files[0]).iter_batches(batch_size=SAMPLE_DOCUMENTS, columns=[text_key]))
    pq.write_table(pa.Table.from_batches([sample]), Path(folder, "sample.parquet"))
    return {
        "files": [str(Path(file).resolve()) for file in files],
        "sample": str(Path(folder, "sample.parquet")),
        "corpus": {"documents": documents, "text_bytes": text_bytes},
        "job": {
            "text_key": text_key,
            "tokenizer_model": str(Path(model).absolute()),
            **save_plain_tokenizer(model, Path(folder, "tokenizer")),
        },
    }


def save_plain_tokenizer(model: str, folder: Path) -> dict[str, Any]:
    """Write the tokenizer `model`, a file or folder, to `folder`, changed so that "[MASK]" in a text is ordinary text.

    Returns:
        "tokenizer_json": path of the new file. "special_tokens": number of special tokens that it adds to each text.
    """
    import tokenizers

    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    load_tokenizer(model).save_tokenizer_files(folder, model_max_length=512)
    path = folder / "tokenizer.json"
    content = parse_json(path.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    special_tokens = len(tokenizers.Tokenizer.from_file(str(path)).encode(""))
    return {"tokenizer_json": str(path), "special_tokens": special_tokens}


def write_json_lines(folder: str, text_key: str) -> None:
    """Write the texts of the parquet files in `folder` to FOLDER.jsonl, for Megatron-LM's tool.

    Also create the folder FOLDER.performance, which must not exist, with the file of timings that the tool reads.
    """
    import pyarrow.parquet as pq

    with Path(f"{folder}.jsonl").open("w", encoding="utf-8") as lines:
        for file in sorted(Path(folder).iterdir()):
            for batch in pq.ParquetFile(file).iter_batches(batch_size=BATCH_DOCUMENTS, columns=[text_key]):
                lines.writelines(json.dumps({text_key: text}) + "\n" for text in batch[text_key].to_pylist())
    Path(f"{folder}.performance").mkdir()
    Path(f"{folder}.performance", "1_workers.json").write_text('{"1": [1.0]}', encoding="utf-8")


# ---- other tools


def run_datatrove(folder: str, text_key: str, tokenizer_json: str, output: str, workers: int) -> None:
    """Tokenize parquet files in `folder` with datatrove. Write .bin and .idx to `output`, logs to logs/ next to it."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer

    reader = ParquetReader(folder, text_key=text_key, read_metadata=False, batch_size=BATCH_DOCUMENTS)
    # Without an end-of-sequence token, only the tokenizer's post-processor adds special tokens.
    writer = MegatronDocumentTokenizer(
        output, tokenizer_name_or_path=tokenizer_json, eos_token=None, batch_size=BATCH_DOCUMENTS
    )
    logs = str(Path(output).with_name("logs"))
    LocalPipelineExecutor([reader, writer], tasks=workers, workers=workers, logging_dir=logs).run()


def run_datasets(folder: str, text_key: str, tokenizer_json: str, output: str, workers: int) -> None:
    """Tokenize parquet files in `folder` with datasets as NeoBERT's authors do, but untruncated. Save to `output`."""
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_json)
    dataset = load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train")

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch[text_key], return_token_type_ids=False)

    processes = workers if workers > 1 else None
    encoded = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, num_proc=processes)
    encoded.save_to_disk(output, num_proc=processes)


# ---- outputs


def count(output: str, special_tokens: int) -> dict[str, Any]:
    """Count documents and tokens in the folder `output`: Megatron's .bin and .idx files, or files of `datasets`.

    Args:
        special_tokens: Number of special tokens around each document. They are not counted.

    Returns:
        "documents"; "tokens"; "ids_sha256": sha256 of all .bin files, or None if `special_tokens` is not 0.

    Raises:
        DataError: A .bin file does not have the size that follows from its .idx file.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    documents = tokens = 0
    digest = hashlib.sha256()
    for index in sorted(Path(output).glob("*.idx")):
        _, _, code, number = struct.unpack("<9sQBQ", index.read_bytes()[:26])
        lengths = np.fromfile(index, dtype=np.int32, count=number, offset=34)  # after the 34-byte header
        ids = index.with_suffix(".bin").read_bytes()
        if len(ids) != DTYPE_BYTES[code] * int(lengths.sum()):
            raise DataError(
                f"{index} has {int(lengths.sum()):,} tokens, but its .bin has {len(ids):,} bytes; run again."
            )
        digest.update(ids)
        documents += number
        tokens += int(lengths.sum())
    for path in sorted(Path(output).glob("*.arrow")):
        with pa.memory_map(str(path)) as source:
            for batch in pa.ipc.open_stream(source):
                documents += batch.num_rows
                tokens += pc.sum(pc.list_value_length(batch["input_ids"])).as_py() or 0
    sha256 = None if special_tokens else digest.hexdigest()
    return {"documents": documents, "tokens": tokens - special_tokens * documents, "ids_sha256": sha256}


STEPS: dict[str, Callable[..., Any]] = {
    "prepare": prepare,
    "json-lines": write_json_lines,
    "datatrove": run_datatrove,
    "datasets": run_datasets,
    "count": count,
}

if __name__ == "__main__":
    run_command(main)
