"""The configuration of a run: sections and fields, files, checks across sections."""
