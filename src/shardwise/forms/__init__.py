"""How a shard is held, and how it becomes the gathered buffer: in int8, on the host, kept over a few ranks."""
