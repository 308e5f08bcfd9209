"""Features that attach to the engine: precision, recomputation, activation offloading, pipeline steps, safety, ..."""
