"""Imported once by the fork server of :mod:`shardwise.testing.ranks`, so that a rank starts with everything loaded.

Names of further modules may stand in ``SHARDWISE_TESTING_MODULES``, separated by spaces. Only imports: a fork must not
inherit threads, open groups or a used autograd engine. A module that fails to import is left out here; the test that
needs it then fails in its own process, where the traceback is seen.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import sys

#: What tests use besides shardwise. ``torch._dynamo`` is what the first optimizer step would otherwise import (1 s).
_THIRD_PARTY = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "numpy",
    "safetensors.torch",
    "pytest",
    "hypothesis",
)


def _modules() -> list[str]:
    package = importlib.import_module(__name__.partition(".")[0])
    found = [info.name for info in pkgutil.walk_packages(package.__path__, "shardwise.", onerror=lambda _name: None)]
    return [name for name in found if not name.startswith("shardwise.testing.") and not name.endswith("__main__")]


def _preload() -> None:
    sys.modules["torchao"] = None  # type: ignore[assignment]  # transformers would import it, and it begins to use the GPU
    for name in (*_THIRD_PARTY, *os.environ.get("SHARDWISE_TESTING_MODULES", "").split()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        import torch

        torch.set_num_threads(1)
    for name in _modules():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with contextlib.suppress(Exception):  # the hash of all source files, which the first model of each rank asks for
        importlib.import_module("shardwise.launch.environment").program()
    del sys.modules["torchao"]
    # Every rank inherits some 300,000 objects that live as long as it does. Out of the collector's sight they cost no
    # rank a quarter of a second at each collection, nor a copy of the pages that a collection would write to.
    gc.collect()
    gc.freeze()


if os.environ.get("SHARDWISE_TESTING_PRELOAD") == "1":
    _preload()
