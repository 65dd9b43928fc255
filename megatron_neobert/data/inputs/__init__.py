"""Find input files, recognise their format, and read their texts: one module per format."""
