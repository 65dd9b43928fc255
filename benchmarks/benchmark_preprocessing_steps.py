"""One step of benchmark_preprocessing.py, which starts this for its inputs, its peers, and counting tokens.

    python benchmarks/benchmark_preprocessing_steps.py STEP '{"argument": value, ...}'

prints the step's result as JSON. The benchmark itself loads none of these libraries: the peak memory of a process that
it starts is at least its own.
"""

import hashlib
import json
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.cli import Parser
from megatron_neobert.errors import ConfigError, DataError, run_command
from megatron_neobert.text import parse_json

BATCH_DOCUMENTS = 1000  # of the peers: their speed is about the same from 128 to 5,000, their memory is not
SAMPLE_DOCUMENTS = 64  # of the warm-up
DTYPE_BYTES = {4: 4, 8: 2}  # Megatron's codes of int32 and uint16


def main() -> None:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("arguments", type=parse_json, metavar="JSON", help="the step's arguments by name")
    given = parser.parse_args()
    print(json.dumps(STEPS[given.step](**given.arguments)))


# ---- inputs


def prepare(patterns: Sequence[str], text_key: str, model: str, folder: str) -> dict[str, Any]:
    """Read all shards once, so that every tool finds them in memory, and write a sample and the peers' tokenizer."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from megatron_neobert.data.inputs.find import find_inputs

    shards = find_inputs(patterns)
    documents = text_bytes = 0
    for shard in shards:
        try:
            parquet = pq.ParquetFile(shard)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{shard} is not a parquet file; the tools are compared on parquet shards.") from error
        if text_key not in parquet.schema_arrow.names:
            found = ", ".join(parquet.schema_arrow.names)
            raise ConfigError(f"{shard}: no column is named '{text_key}'; it has {found}. Use --text-key.")
        for batch in parquet.iter_batches(columns=[text_key]):
            documents += batch.num_rows
            text_bytes += pc.sum(pc.binary_length(batch[text_key])).as_py() or 0

    sample = next(pq.ParquetFile(shards[0]).iter_batches(batch_size=SAMPLE_DOCUMENTS, columns=[text_key]))
    pq.write_table(pa.Table.from_batches([sample]), Path(folder, "sample.parquet"))
    return {
        "shards": [str(Path(shard).resolve()) for shard in shards],
        "sample": str(Path(folder, "sample.parquet")),
        "corpus": {"documents": documents, "text_bytes": text_bytes},
        "job": {
            "text_key": text_key,
            "tokenizer_model": str(Path(model).absolute()),
            **save_tokenizer_of_peers(model, Path(folder, "tokenizer")),
        },
    }


def save_tokenizer_of_peers(model: str, folder: Path) -> dict[str, Any]:
    """Write a tokenizer.json for which "[MASK]" in a text is text; return it and the number of tokens it adds."""
    import tokenizers

    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    load_tokenizer(model).save_tokenizer_files(folder, model_max_length=512)
    path = folder / "tokenizer.json"
    content = parse_json(path.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    special_tokens = len(tokenizers.Tokenizer.from_file(str(path)).encode(""))
    return {"tokenizer_json": str(path), "special_tokens": special_tokens}


def write_json_lines(shards: str, text_key: str) -> None:
    """Write SHARDS.jsonl and SHARDS.performance for Megatron-LM's tool, which reads no parquet."""
    import pyarrow.parquet as pq

    with Path(f"{shards}.jsonl").open("w", encoding="utf-8") as lines:
        for shard in sorted(Path(shards).iterdir()):
            for batch in pq.ParquetFile(shard).iter_batches(batch_size=BATCH_DOCUMENTS, columns=[text_key]):
                lines.writelines(json.dumps({text_key: text}) + "\n" for text in batch[text_key].to_pylist())
    Path(f"{shards}.performance").mkdir()
    Path(f"{shards}.performance", "1_workers.json").write_text('{"1": [1.0]}', encoding="utf-8")


# ---- peers


def run_datatrove(shards: str, text_key: str, tokenizer_json: str, output: str, workers: int) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer

    reader = ParquetReader(shards, text_key=text_key, read_metadata=False, batch_size=BATCH_DOCUMENTS)
    # Without an end-of-sequence token the tokenizer's own post-processor decides what surrounds a document.
    writer = MegatronDocumentTokenizer(
        output, tokenizer_name_or_path=tokenizer_json, eos_token=None, batch_size=BATCH_DOCUMENTS
    )
    logs = str(Path(output).with_name("logs"))
    LocalPipelineExecutor([reader, writer], tasks=workers, workers=workers, logging_dir=logs).run()


def run_datasets(shards: str, text_key: str, tokenizer_json: str, output: str, workers: int) -> None:
    """Tokenize as NeoBERT's authors do, without their truncation: `map` in batches, then `save_to_disk`."""
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_json)
    rows = load_dataset("parquet", data_files=f"{shards}/*.parquet", split="train")

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch[text_key], return_token_type_ids=False)

    processes = workers if workers > 1 else None
    encoded = rows.map(tokenize, batched=True, remove_columns=rows.column_names, num_proc=processes)
    encoded.save_to_disk(output, num_proc=processes)


# ---- what a tool has written


def count(output: str, special_tokens: int) -> dict[str, Any]:
    """Count what a tool has written, as Megatron's .bin and .idx or as a folder of `datasets`, without its reader.

    Returns:
        Documents, tokens without the special tokens around documents, and the sha256 of bare ids.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    documents = tokens = 0
    digest = hashlib.sha256()
    for index in sorted(Path(output).glob("*.idx")):
        _, _, code, number = struct.unpack("<9sQBQ", index.read_bytes()[:26])
        lengths = np.fromfile(index, dtype=np.int32, count=number, offset=34)  # after the number of document ends
        ids = index.with_suffix(".bin").read_bytes()
        if len(ids) != DTYPE_BYTES[code] * int(lengths.sum()):
            raise DataError(f"{index}: {int(lengths.sum()):,} tokens, but {len(ids):,} bytes in its .bin.")
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
