"""A corpus on disk or in object storage: format, writer, reader, document attributes, drop lists.

The package imports input files (`data.inputs`), tokenizers (`data.tokenizer`) and `runtime`, but neither batches nor
torch. Read format.py first, then shard_files.py (the binary layout), writer.py and reader.py.
"""
