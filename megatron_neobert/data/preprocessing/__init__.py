"""Raw input files to a corpus: settings and plan, the job that tokenizes a chunk, filters, and the run."""
