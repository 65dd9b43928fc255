"""Checkpoints as Hugging Face folders or ONNX graphs, and back, each compared with its source."""
