"""Integrations that were tested in parts only: the top of each module says what has never been run."""
