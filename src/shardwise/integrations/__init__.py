"""Adapters for trainers and servers of other projects. Each module needs the package in its name, unpatched."""
