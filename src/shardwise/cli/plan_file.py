"""``plan --out``: a configuration for ``train``, and the command that starts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.output import write
from shardwise.planner.explain import gib, seconds, title
from shardwise.planner.memory import num_microbatches
from shardwise.planner.screen import plan_fields_of
from shardwise.spec.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.planner import Estimate


def command(estimate: Estimate, path: str) -> str:
    """Return the command that starts the run. On several nodes, the same command is run on each."""
    gpus, node = estimate.cluster.num_gpus, min(estimate.cluster.gpus_per_node, estimate.cluster.num_gpus)
    if gpus == node:
        return f"torchrun --nproc-per-node {node} -m shardwise train {path}"
    return (
        f"torchrun --nnodes {gpus // node} --nproc-per-node {node} --rdzv-backend c10d \\\n"
        f"    --rdzv-endpoint HOST:29500 -m shardwise train {path}"
    )


def configuration(estimate: Estimate, model: dict[str, Any], base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the configuration of a plan.

    Keeps the other sections of ``base``, such as data and schedule.
    """
    workload = estimate.workload
    config: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in (base or {}).items()
    }
    if model or "spec" not in config:
        config["model"] = model
    if "spec" not in config:
        data = dict(config.get("data") or {})
        config["data"] = ({} if data.get("mix") else {"source": "random"}) | data | {"seq_len": workload.seq_len}
    config["parallel"] = plan_fields_of(estimate.plan)
    config["parallel"].pop("dp_shard", None) if estimate.plan.dp_replicate == 1 else None
    pipeline = config["parallel"].get("pipeline")
    if isinstance(pipeline, dict):
        pipeline.pop("num_microbatches", None)  # train derives them from the batch
    optimizer = dict(config.get("optimizer") or {})
    if "name" not in optimizer and "spec" not in config:
        name = workload.optimizer.partition("-")[0]
        optimizer |= {"name": name} | ({"momentum": 0.0} if workload.optimizer == "sgd" else {})
    train = {
        key: value
        for key, value in (config.get("train") or {}).items()
        if key not in {"micro_batch_size", "global_batch_size", "gradient_accumulation_steps"}
    }
    train |= {"micro_batch_size": workload.micro_batch, "global_batch_size": workload.global_batch}
    if workload.lora_rank is not None:
        config["lora"] = {**(config.get("lora") or {}), "rank": workload.lora_rank}
    if workload.chunked_loss:
        train["chunked_cross_entropy"] = True
    if workload.in_backward:
        optimizer["in_backward"] = True
        train["clip_grad_norm"] = None
    return {**config, "optimizer": optimizer, "train": train}


def write_plan(path: Path, estimate: Estimate, model: dict[str, Any], base: dict[str, Any] | None) -> str:
    """Write the configuration, with a comment that shows the predictions, and return what to do with it."""
    import yaml

    cluster = estimate.cluster
    lines = [
        (
            f"# {estimate.shape.name} on {cluster.num_gpus} x {cluster.device}: {title(estimate)},"
            f" {num_microbatches(estimate.plan, estimate.workload)} microbatches a step"
        ),
        (
            f"# predicted: {seconds(estimate.step_time_s)} a step, {gib(estimate.memory.device_bytes)} of"
            f" {gib(cluster.device.memory_bytes)} on the fullest GPU"
        ),
    ]
    start, does_train, note = command(estimate, str(path)), True, ""
    if base is None:
        does_train, note = _how_to_train(model)
        lines.append(f"# {note}")
    if does_train:
        lines.append("# start: " + start.replace("\n", "\n# "))
    content = configuration(estimate, model, base)
    write(path, "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    said = f"written to {path}. {note}".rstrip()
    return f"{said} Start it with\n  {start}" if does_train else said


def _how_to_train(model: dict[str, Any]) -> tuple[bool, str]:
    """Return whether ``train`` trains a model, and a sentence about its data or about the loop that it needs."""
    from shardwise.train.config.hf import NotTrainedError, read_language_model
    from shardwise.train.data.tokenizer import has_tokenizer
    from shardwise.train.task import CAUSAL

    folder = Path(model.get("hf", ""))
    try:
        task = read_language_model(folder).task if "hf" in model else CAUSAL
    except (NotTrainedError, ShardwiseError):
        return False, "`shardwise train` does not train this model: give the fields of `parallel` to sw.parallelize."
    copy = "" if task is CAUSAL or has_tokenizer(folder) else f" Copy its tokenizer's files into {folder}."
    if task.has_pairs:
        return True, f"The model is trained for {task.name}: name rows of a data set in data.source.{copy}"
    return True, f"It trains on random tokens until data.source in it names your data.{copy}"


def write_model_folder(folder: Path, config: dict[str, Any]) -> None:
    """Write a folder with a ``config.json`` alone, from which ``train`` initializes weights. Keeps an existing file."""
    path = folder / "config.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(config, indent=1) + "\n")
