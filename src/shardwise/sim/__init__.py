"""A step as tasks on streams: which waits for which, when each begins and ends. No torch."""
