"""What attaches to the engine: precision, recomputation, the update inside backward, safety, ..."""
