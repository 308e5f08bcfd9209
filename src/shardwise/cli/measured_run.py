"""``plan --measured``: calibrates the predictions by the user's runs, given as tokens per second or a run's folder."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.run_files import CONFIG

if TYPE_CHECKING:
    from shardwise.planner import Cluster, Estimate, Workload

#: Fields of a measured run besides those of its plan, and their names in the cluster and the workload.
_OTHERS = {"gpus": "num_gpus", "seq": "seq_len", "global_batch": "global_batch"}


def rescale_cluster(
    measured: list[str], first: Estimate, workload: Workload, fixed: dict[str, Any]
) -> tuple[Cluster, list[str]]:
    """Return the cluster calibrated by one or two runs, and sentences about the changed figures.

    ``first`` is the plan that ran, unless a run names fields of another.
    """
    from shardwise.planner import rescale

    gpu, lines = rescale(*(_run(text, first, workload, fixed) for text in measured))
    return replace(first.cluster, gpu=gpu), lines


def _run(text: str, first: Estimate, workload: Workload, fixed: dict[str, Any]) -> tuple[Estimate, float]:
    from shardwise.planner import search

    speed, *fields = re.split(r",(?=[a-z_]+=)", text)
    if Path(speed).is_dir():
        return _of_folder(Path(speed), first.cluster)
    try:
        tokens_per_s = float(speed)
    except ValueError:
        raise ConfigError(
            f"--measured {text}: {speed!r} is not a number of tokens/s, and no folder of a run.\n"
            "  Write for example --measured 41000, or --measured 41000,strategy=zero3,micro_batch=1."
        ) from None
    values = read_fixed(fields, _OTHERS)
    others = {_OTHERS[name]: values.pop(name) for name in _OTHERS if name in values}
    if not values and not others:
        return first, tokens_per_s
    cluster = replace(first.cluster, num_gpus=others.pop("num_gpus", first.cluster.num_gpus))
    axes = dict.fromkeys(("tp", "pp", "cp", "ep"), 1) if "strategy" in values else {}  # as in a plan that sets none
    return search(first.shape, cluster, replace(workload, **others), **{**axes, **fixed, **values})[0], tokens_per_s


def read_fixed(texts: list[str], others: Container[str] = ()) -> dict[str, Any]:
    """Parse ``field=value`` entries with values in YAML. ``others`` are accepted names besides fields of a plan."""
    import yaml

    from shardwise.planner.candidate import check_fixed

    fixed: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--fix {text}: expected field=value.\n  Write for example --fix tp=2.")
        try:
            fixed[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(
                f"--fix {text}: {value!r} is not a value.\n  Write it as in a configuration file."
            ) from None
    check_fixed({name: value for name, value in fixed.items() if name not in others})
    return fixed


def _of_folder(folder: Path, cluster: Cluster) -> tuple[Estimate, float]:
    """Return the estimate for a run of ``train``, and its measured tokens/s without the first steps."""
    from shardwise.planner import estimate
    from shardwise.report.run import read_run
    from shardwise.train.config.resolve import resolve
    from shardwise.train.config.sections import read_config
    from shardwise.train.predicted.workload import resolved_plan, shape_of, workload_of

    run = read_run(folder)
    world, spent = run.plan.get("world_size"), run.step_time_s
    is_timed = run.summary.get("timed_steps") != 0 and run.summary.get("world_size", world) == world
    if not isinstance(world, int) or not spent or not is_timed:  # records may be of an earlier start with other ranks
        raise ConfigError(
            f"--measured {folder}: its last start timed no step.\n  Name the folder of a run that made a few steps."
        )
    if run.environment.get("devices") == ["cpu"] and cluster.device.device_type != "cpu":
        raise ConfigError(
            f"--measured {folder}: the run was made on a CPU, which says nothing of {cluster.device.name}.\n"
            "  Name a run on such a GPU, or as --gpu a file that `shardwise calibrate` wrote here."
        )
    resolved = resolve(read_config(folder / CONFIG), world, min(world, cluster.gpus_per_node), checks_data=False)
    there = replace(cluster, num_gpus=world)
    shape = shape_of(resolved, reads_iterables=True)
    estimated = estimate(shape, resolved_plan(resolved), there, workload_of(resolved, shape))
    return estimated, estimated.workload.global_batch * estimated.workload.seq_len / spent
