"""Steps from raw input files to global batches: inputs, tokenizer, preprocessing, corpus, deduplication and batches.

No package here imports the model or the training loop, and only `batches` imports torch. Read corpus/format.py first:
it describes the files that preprocessing writes and training reads.
"""
