"""Imports for the fork server of :mod:`shardwise.testing.ranks`, so that ranks start with all modules loaded.

``SHARDWISE_TESTING_MODULES`` may name further modules, separated by spaces. This module only imports, because a fork
must not inherit threads, open groups or a used autograd engine. Errors of imports are ignored here; the test that needs
the module fails in its own process, where the traceback is shown.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import sys

#: Modules that tests use in addition to shardwise. The first optimizer step would otherwise import ``torch._dynamo``
#: (1 s).
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
    with contextlib.suppress(Exception):  # the cached hash of all source files, which every rank's first model needs
        importlib.import_module("shardwise.launch.environment").code_versions()
    del sys.modules["torchao"]
    # Every rank inherits some 300,000 permanent objects. Freezing them saves a quarter of a second at each garbage
    # collection of a rank, and copies of the memory pages that a collection writes to.
    gc.collect()
    gc.freeze()


if os.environ.get("SHARDWISE_TESTING_PRELOAD") == "1":
    _preload()
