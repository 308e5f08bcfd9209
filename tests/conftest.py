"""Settings that hold for every test."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import dear

# A busy machine is no failure: speed is measured by benchmarks, not by tests.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Before anything imports torch: thread pools read these once, when they are loaded.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

#: What ``--every-case`` repeats on debug transports (``shardwise.testing.transports``): beginnings of paths in tests/.
ON_TRANSPORTS = (
    *("parallel/context/test_context_parity", "parallel/context/test_context_ranks", "parallel/sharded_embedding/"),
    *("engine/test_experts", "engine/test_tied_weights", "parallel/experts/test_expert", "generation/test_generat"),
    *("parallel/pipeline/test_deferred_weights", "parallel/pipeline/test_pipeline.py"),
    *("parallel/pipeline/test_pipeline_calls", "parallel/pipeline/test_pipeline_families"),
    *("parallel/pipeline/test_pipeline_fp16", "parallel/pipeline/test_pipeline_overlap"),
    *("parallel/pipeline/test_pipeline_state", "parallel/pipeline/test_pipeline_steps.py", "product/test_product.py"),
    *("parallel/tensor/test_tensor.py", "parallel/tensor/test_tensor_families", "parallel/tensor/test_tensor_mistakes"),
    "train/test_train_divided",
)
TRANSPORTS = ("in-order", "early-free")
#: Layouts and agreed orders, which `make test` repeats on 3 ranks: beginnings of paths in tests/. Any other repetition
#: is marked long, but for the smallest number of ranks above 1.
ON_THREE = (
    *("comm/", "engine/test_disagreement", "engine/test_prefetch", "engine/test_different_paths"),
    *("engine/test_parameters", "engine/test_parity", "engine/test_released_units", "engine/test_tied_weights"),
    *("engine/test_trace_of_steps", "optim/test_granularity_ranks", "optim/test_muon"),
    "weights/state/test_logical_state",
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


@pytest.fixture(autouse=True)
def _transport(request: pytest.FixtureRequest) -> None:
    """The debug transport that a test runs on, where it is repeated on them."""
    if getattr(request, "param", None) is not None:
        request.getfixturevalue("monkeypatch").setenv("SHARDWISE_TRANSPORT", request.param)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out modules that start ranks")
    parser.addoption(
        "--every-case",
        action="store_true",
        help="every preset, and every debug transport for ON_TRANSPORTS",
    )
    parser.addoption(
        "--durations-file", metavar="FILE", help="write the seconds of each test to FILE, show the dearest files"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("every_case"):
        os.environ["SHARDWISE_EVERY_CASE"] = "1"  # read by tests.common.oracle, in the ranks too
    os.environ["SHARDWISE_TEST_WEEK"] = str(dear.week())  # the same in workers that begin after midnight
    if hasattr(config, "workerinput"):
        return
    dry_runs = tempfile.TemporaryDirectory(prefix="shardwise-dry-runs-")  # read by tests.train.train_here
    config.add_cleanup(dry_runs.cleanup)
    os.environ["SHARDWISE_TEST_DRY_RUNS"] = dry_runs.name
    if config.getoption("durations_file"):
        config.pluginmanager.register(Durations(Path(config.getoption("durations_file"))))


def pytest_report_header() -> str:
    return f"dear tests (tests/dear.py) of week {dear.week()}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_long = metafunc.config.getoption("every_case") and _place(metafunc.definition.path).startswith(ON_TRANSPORTS)
    if is_long or metafunc.definition.get_closest_marker("transports"):
        metafunc.parametrize("_transport", (None, *TRANSPORTS), ids=("gloo", *TRANSPORTS), indirect=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.match("test_*.py"):
        return None
    return True if config.getoption("quick") and _starts_ranks(collection_path) else None


def _place(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()


@functools.cache
def _starts_ranks(path: Path) -> bool:
    return STARTS.search(path.read_text("utf-8")) is not None


def _mark_repetitions(items: list[pytest.Item]) -> None:
    """A test with the same arguments on several numbers of ranks is long on those that ``ON_THREE`` does not name."""
    worlds: dict[tuple[object, ...], dict[int, pytest.Item]] = {}
    for item in items:
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        world = params.pop("world", None)
        if isinstance(world, int) and _starts_ranks(item.path) and not item.get_closest_marker("long"):
            key = (item.path, item.originalname, tuple(sorted((name, repr(value)) for name, value in params.items())))
            worlds.setdefault(key, {})[world] = item
    for (path, *_), found in worlds.items():
        kept = {min(found, key=lambda world: (world == 1, world))} | (
            {3} if _place(path).startswith(ON_THREE) else set()
        )
        for world, item in found.items():
            if world not in kept:
                item.add_marker(pytest.mark.long)


def _mark_more_cases(items: list[pytest.Item]) -> None:
    """Of a test that is marked ``cases(n)`` n cases, chosen by the hash of their names, are not long."""
    found: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cases") and not item.get_closest_marker("long"):
            found.setdefault((item.path, getattr(item, "originalname", "")), []).append(item)
    for cases in found.values():
        marker = cases[0].get_closest_marker("cases")
        assert marker is not None
        for item in sorted(cases, key=lambda each: zlib.crc32(each.name.encode()))[marker.args[0] :]:
            item.add_marker(pytest.mark.long)


def _mark_dear(items: list[pytest.Item]) -> None:
    """Five of six tests that take seconds are long (``tests.dear``)."""
    names = {item.nodeid: item for item in items if not item.get_closest_marker("long")}
    for name in dear.left_out(names, dear.week()):
        names[name].add_marker(pytest.mark.long)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_repetitions(items)
    _mark_more_cases(items)
    _mark_dear(items)
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


class Durations:
    """Writes how long every test took, and shows the dearest test files beside what they took in the last run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.seconds:
            return
        before = _by_file(json.loads(self.file.read_text())) if self.file.exists() else {}
        now = _by_file(self.seconds)
        terminalreporter.section("dearest test files: seconds now and in the last run")
        for name in sorted(now, key=now.__getitem__, reverse=True)[:10]:
            terminalreporter.write_line(f"{now[name]:8.1f} {before.get(name, float('nan')):8.1f}  {name}")
        terminalreporter.write_line(f"{sum(now.values()):8.1f} {sum(before.values()):8.1f}  all {len(now)} files")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({name: round(took, 3) for name, took in self.seconds.items()}, indent=0))


def _by_file(seconds: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, took in seconds.items():
        file = name.partition("::")[0]
        found[file] = found.get(file, 0.0) + took
    return found
