"""What a run is: sections and fields, files, checks across sections."""
