"""Train any PyTorch model on many devices: DDP, ZeRO and FSDP in one engine, combined with model parallelism.

The stub beside this module, ``__init__.pyi``, lists every public name and the module that defines it. A name is
imported when it is first used, so that ``import shardwise`` and plans need no torch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

#: Packages among the public names. ``launch`` and ``train`` can be called.
_PACKAGES = {"launch", "models", "planner", "train"}
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_bytes())
_MODULES = {
    alias.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}

__all__ = sorted([*_MODULES, "__version__"])  # noqa: PLE0605 - it is a list


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"shardwise.{name}")
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
