"""The launcher's side: start the workers of a case, wait, and read what they found."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.compare.request import Request
from bench.compare.result import Result, make_result
from shardwise.launch.elastic import launch
from shardwise.spec.errors import ShardwiseError


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory, devices, system and versions."""
    import torch

    devices = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": ", ".join(devices) or "cpu",
        "backend": "nccl" if devices else "gloo",
        "threads_per_rank": 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shardwise": metadata.version("shardwise"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_ENTRY = "bench.compare.rank"
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_ROOT = Path(__file__).parents[2]


class ComparisonFailed(ShardwiseError):  # noqa: N818  named for what happened
    """The workers did not finish; the launcher has said why."""

    def __init__(self, exit_code: int) -> None:
        """Keep the code of the rank that is the cause."""
        super().__init__("the comparison did not finish.\n  See the message above.")
        self.exit_code = exit_code


def run(request: Request) -> Result:
    """Measure one case.

    Raises:
        ComparisonFailed: A worker failed, or a signal asked to stop.
    """
    folder = Path(tempfile.mkdtemp(prefix="shardwise-compare-"))
    try:
        path = folder / "request.json"
        path.write_text(json.dumps(request.as_dict()), "utf-8")
        found_in = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = _ENVIRONMENT | {"PYTHONPATH": found_in}  # the workers import this package by its name
        code = launch(_ENTRY, [str(path), str(folder)], request.num_ranks, env=environment, grace_s=5)
        if code:
            raise ComparisonFailed(code)
        found = [
            {int(index): values for index, values in json.loads((folder / f"rank-{rank}.json").read_text()).items()}
            for rank in range(request.num_ranks)
        ]
        return make_result(request, machine_facts(), found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
