"""What attaches to the engine: precision, recomputation, uneven inputs, the update inside backward, safety, ..."""
