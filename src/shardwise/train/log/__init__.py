"""The files and the terminal output of a run."""
