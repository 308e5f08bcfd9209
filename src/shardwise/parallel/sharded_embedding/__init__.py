"""Embeddings whose rows are sharded over all ranks."""
