"""The .bin, .idx and .json of a corpus: format, writer, reader, document attributes, object storage."""
