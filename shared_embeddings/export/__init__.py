"""Exporting models and embeddings as ONNX."""
