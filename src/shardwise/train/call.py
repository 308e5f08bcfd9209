"""``sw.train``: ``shardwise train`` called from a script or a notebook."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwise.launch.elastic import num_workers
from shardwise.launch.function import serialize
from shardwise.launch.world import read_world
from shardwise.spec.errors import ShardwiseError
from shardwise.spec.run_files import SUMMARY
from shardwise.spec.text import printable
from shardwise.train import folder
from shardwise.train.config.sections import RawConfig, read_config
from shardwise.train.launcher import launch_training, named_config, train_worker
from shardwise.train.spec import TrainSpec, with_code


def train(
    config: str | os.PathLike[str] | Mapping[str, Any],
    spec: TrainSpec | None = None,
    *,
    nproc: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool | str = False,
    max_restarts: int = 0,
) -> dict[str, Any]:
    """Train as ``shardwise train`` does, and return the content of ``summary.json``.

    ::

        found = sw.train({"parallel": {"strategy": "zero3"}, "train": {"steps": 1000}}, spec, nproc=2)
        found["final_loss"], found["directory"]

    This call starts the processes, unless it runs on a rank already, as under ``torchrun``.

    Args:
        config: A run.yaml, its content, or the folder of a run, which ``resume`` continues.
        spec: Replaces parts of the run. Sent to the processes by cloudpickle, so that classes and functions from
            notebook cells work.
        nproc: Number of processes; by default one for each GPU, or two on a CPU.
        run_dir: The run's folder; by default ``runs/NAME``.
        resume: Continue from the newest checkpoint, or from the one named.
        max_restarts: How many times all processes are started again after one was lost.

    Returns:
        The content of ``summary.json``, and ``directory``, the run's folder.

    Raises:
        ConfigError, DataError, PlanError, MemoryBudgetError: The run is refused before a process is started, as by the
            command.
        ShardwiseError: A rank failed and has printed the reason; ``exit_code`` is the launcher's.
        SystemExit: This process is a rank, and the run was stopped or failed; with the exit code of the rank.
    """
    checkpoint = ("latest" if resume else None) if isinstance(resume, bool) else resume
    directory = None if run_dir is None else Path(run_dir)
    world = read_world()
    if spec is not None:
        spec = with_code(spec)
    if world.source != "alone":
        found: dict[str, Any] = {}
        raw, directory = _read(config, directory, checkpoint)
        code = train_worker(
            raw,
            world,
            run_dir=directory,
            resume=checkpoint,
            is_demo=False,
            spec=spec,
            found=found,
        )
        if code:
            raise SystemExit(code)
        return found
    with tempfile.TemporaryDirectory(prefix="shardwise-train-") as private:  # mode 0700
        file, spec_file = _write_config(config, Path(private)), None
        if spec is not None:
            spec_file = Path(private) / "spec.pkl"
            spec_file.write_bytes(serialize(spec))
        raw, directory = _read(file, directory, checkpoint)
        raw.raise_if_any()
        to = raw.config.checkpoint.upload_to
        directory = folder.choose(
            raw.config.name, directory, is_resuming=checkpoint is not None, resume=checkpoint, upload_to=to
        )
        code = launch_training(
            raw,
            num_workers(nproc),
            ["train", str(file), *([] if checkpoint is None else ["--resume", checkpoint])],
            run_dir=directory,
            resume=checkpoint,
            max_restarts=max_restarts,
            say=_say,
            spec=spec,
            spec_file=spec_file,
        )
    if code:
        failed = ShardwiseError(f"sw.train: the run ended with exit code {code}.\n  See above for what it said.")
        failed.exit_code = code
        raise failed
    return {**json.loads((directory / SUMMARY).read_text()), "directory": str(directory)}


def _say(text: str) -> None:
    print(printable(text, is_block=True))  # noqa: T201 - printed in the caller's cell or terminal


def _read(
    config: str | os.PathLike[str] | Mapping[str, Any], run_dir: Path | None = None, resume: str | None = None
) -> tuple[RawConfig, Path | None]:
    """Read the configuration, and return it with the run's folder if one is named."""
    if isinstance(config, Mapping):
        return read_config(None, base=dict(config), title="sw.train"), run_dir
    raw, _, run_dir = named_config(Path(config), [], run_dir=run_dir, resume=resume)
    return raw, run_dir


def _write_config(config: str | os.PathLike[str] | Mapping[str, Any], private: Path) -> Path:
    """Return the path of the configuration's file, which workers read again; a mapping is written to a file."""
    if not isinstance(config, Mapping):
        return Path(config)
    _read(config)[0].raise_if_any()
    file = private / "run.yaml"
    plain = json.loads(json.dumps(dict(config)))  # NumPy's floats and OrderedDict are no values of YAML
    file.write_text(yaml.safe_dump(plain))
    return file
