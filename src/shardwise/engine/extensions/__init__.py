"""Features that attach to the engine: precision, recomputation, the update inside backward, safety, ..."""
