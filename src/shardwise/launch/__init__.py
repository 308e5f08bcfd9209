"""Worlds and processes: which rank this is, starting workers, what they leave behind, exit codes."""
