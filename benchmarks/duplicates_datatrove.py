"""datatrove's MinHash on FOLDER/shards, up to the list of what it would remove; benchmark_duplicates.py starts it."""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.utils.hashing import HashConfig

    folder = Path(sys.argv[1], "datatrove")
    shutil.rmtree(folder, ignore_errors=True)
    # xxhash 4 refuses the text that datatrove 0.10.1 gives it.
    hashing = HashConfig(hash_fc="xxhash" if version("xxhash") < "4" else "sha1")
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=hashing)
    signatures, buckets, remove = (str(folder / name) for name in ("signatures", "buckets", "remove"))
    reader = ParquetReader(str(folder.with_name("shards")), text_key="text", read_metadata=False)
    stages = [
        ([reader, MinhashDedupSignature(signatures, config)], 1),
        ([MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets),
        ([MinhashDedupCluster(buckets, remove, config)], 1),
    ]
    for number, (pipeline, tasks) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(folder / f"logs{number}")).run()


if __name__ == "__main__":
    main()
