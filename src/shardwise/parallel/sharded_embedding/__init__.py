"""Embeddings whose rows are spread over all ranks."""
