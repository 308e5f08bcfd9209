"""Model parallelism: tensor, pipeline, context and expert parallelism, and row-sharded embeddings."""
