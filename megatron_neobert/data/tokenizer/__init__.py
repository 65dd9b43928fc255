"""Tokenizers from WordPiece, SentencePiece and tokenizer.json files, fast back ends, and training."""
