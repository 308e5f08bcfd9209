"""Settings that hold for every test."""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# A busy machine is no failure: speed is measured by benchmarks, not by tests.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Before anything imports torch: thread pools read these once, when they are loaded.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

#: What runs on the debug transports (``shardwise.comm.debug``) too, by the beginning of a module's path in tests/.
ON_TRANSPORTS = (
    *("context/test_context_parity", "context/test_context_ranks", "embedding/", "engine/test_experts"),
    *("engine/test_tied_weights", "expert/test_expert", "generation/test_generat"),
    *("pipeline/test_deferred_weights", "pipeline/test_pipeline.py", "pipeline/test_pipeline_calls"),
    *("pipeline/test_pipeline_families", "pipeline/test_pipeline_fp16", "pipeline/test_pipeline_overlap"),
    *("pipeline/test_pipeline_state", "pipeline/test_pipeline_steps.py", "product/test_product.py"),
    *("tensor/test_tensor.py", "tensor/test_tensor_families", "tensor/test_tensor_mistakes"),
    *("train/test_train_context", "train/test_train_pipeline"),
)
#: A module in which one of these stands starts processes that take seconds: no part of a quick look (``--quick``).
STARTS = re.compile(r"on_ranks\(|train_here|launch\.elastic|pytestmark = pytest\.mark\.(slow|long)")


@pytest.fixture(autouse=True)
def _leaves_no_process_group() -> Iterator[None]:
    """A world of one that a test has joined ends with it: the tests behind it run in any order."""
    before = _has_process_group()
    yield
    if not before and _has_process_group():
        importlib.import_module("shardwise.launch.world").shutdown()


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        choices=("in-order", "early-free"),
        help="run the tests of model parallelism and generation, and no others, on this debug transport",
    )
    parser.addoption("--quick", action="store_true", help="leave out modules that start ranks")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("transport"):
        os.environ["SHARDWISE_TRANSPORT"] = config.getoption("transport")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.match("test_*.py"):
        return None
    if config.getoption("quick") and STARTS.search(collection_path.read_text("utf-8")):
        return True
    place = collection_path.relative_to(config.rootpath / "tests").as_posix()
    return True if config.getoption("transport") and not place.startswith(ON_TRANSPORTS) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(config.rootpath / "tests" / "gpu"):
            item.add_marker(pytest.mark.gpu)
    # Read when the first ranks are started: what many ranks would import is imported once.
    wanted = [name for item in items for marker in item.iter_markers("preload") for name in marker.args]
    os.environ["SHARDWISE_TESTING_MODULES"] = " ".join(dict.fromkeys(wanted))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    reason = _why_no_gpu()
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


#: How many modules a test may import before what it imported is put out of the collector's sight too.
FEW_MODULES = 100
_num_frozen_modules = 0


def pytest_collection_finish() -> None:
    _keep_what_is_imported()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if len(sys.modules) > _num_frozen_modules + FEW_MODULES:
        _keep_what_is_imported()


def _keep_what_is_imported() -> None:
    """What was imported stays: no test has to look through it at each collection, or where it asks what is alive."""
    global _num_frozen_modules
    gc.collect()
    gc.freeze()
    _num_frozen_modules = len(sys.modules)


def _why_no_gpu() -> str | None:
    import torch  # only where a GPU test was collected: importing it takes longer than many tests

    if torch.cuda.is_available():
        return None
    return "no CUDA device here" if torch.version.cuda else "this torch is built without CUDA"
