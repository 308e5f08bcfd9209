"""Integrations that were tested only in part: the top of each module says what has never been run."""
