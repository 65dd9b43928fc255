"""Input files: find them, recognise their format, and read their texts.

Read `recognise.py` first: it cuts a file into chunks and calls the reader of the format (`tables.py`, `text_files.py`,
`web_archives.py`). `input_reader.py` is the lowest module, and `records.py` defines the result of all readers. The
package imports nothing else of `megatron_neobert.data`.
"""
