"""Settings that hold for every test."""

from __future__ import annotations

import gc
import os
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
    *("parity/test_context", "parity/test_experts", "parity/test_generate", "parity/test_pipeline"),
    *("parity/test_product", "parity/test_tensor", "ranks/test_context", "ranks/test_deferred_weights"),
    *("ranks/test_expert", "ranks/test_generat", "ranks/test_pipeline_calls", "ranks/test_pipeline_overlap"),
    *("ranks/test_pipeline_state", "ranks/test_pipeline_steps", "ranks/test_row_sharded", "ranks/test_tensor_mistakes"),
    *("ranks/test_tied_weights", "ranks/test_train_context", "ranks/test_train_pipeline"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        choices=("in-order", "early-free"),
        help="run the tests of model parallelism and generation, and no others, on this debug transport",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("transport"):
        os.environ["SHARDWISE_TRANSPORT"] = config.getoption("transport")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("transport") or collection_path.is_dir():
        return None
    place = collection_path.relative_to(config.rootpath / "tests").as_posix()
    return None if place.startswith(ON_TRANSPORTS) else True


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


def pytest_collection_finish() -> None:
    """What was imported stays: no test has to look through it at each collection, or where it asks what is alive."""
    gc.collect()
    gc.freeze()


def _why_no_gpu() -> str | None:
    import torch  # only where a GPU test was collected: importing it takes longer than many tests

    if torch.cuda.is_available():
        return None
    return "no CUDA device here" if torch.version.cuda else "this torch is built without CUDA"
