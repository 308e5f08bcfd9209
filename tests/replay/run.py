"""Runs a case and writes down what happened: collectives, numbers, state, checkpoint and predictions, as plain data."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.replay.cases import Case
from tests.replay.models import batch, gpt

STEPS = 3
_DIGITS = 12

Run = dict[str, Any]


def run(case: Case) -> Run:
    """What the ranks of a case did, and what was predicted for its first rank.

    Returns:
        ``predicted`` (``events``, ``bytes`` by category) unless the model cannot run without values, ``ranks`` (of
        each: ``steps`` with ``loss``, ``norm`` and ``events``), ``state`` (digests of the whole tensors) and
        ``checkpoint`` (of each file, digests of the names and shapes in it and of the values).
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_on_ranks(_train, case.world, case, folder, timeout_s=120)
        checkpoint = _digests_of_files(Path(folder) / "checkpoint")
    found: Run = {"ranks": [{"steps": rank["steps"]} for rank in ranks]}
    found["state"], found["checkpoint"] = ranks[0]["state"], checkpoint
    if case.model not in {"branches", "drops", "experts"}:  # these look at values
        found["predicted"] = _predict(case)
    return found


def probe() -> str:
    """A digest of what one plain process computes: numbers are compared only between machines where it is the same."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(*batch("gpt", step, 0, 0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return _digest([*losses, *_digests(model.state_dict()).values()])


def _train(case: Case, folder: str) -> dict[str, Any]:
    model = sw.parallelize(case.build(), case.parallel_plan)
    optimizer = _optimizer(case, model)
    average = sw.ExponentialMovingAverage(model, decay=0.5) if case.has_average else None
    scaler = sw.GradScaler("cpu", init_scale=256.0) if case.has_scaler else None
    reader = sw.data_parallel_rank(model)
    steps = []
    for step in range(STEPS):
        with sw.record_collectives(model) as events:
            for call in range(case.calls):
                parts = [batch(case.model, step, call, index, reader) for index in range(case.num_microbatches or 1)]
                inputs = tuple(torch.cat(column) for column in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
                with sw.gradient_sync(model, call == case.calls - 1):
                    loss = sw.train_step(model, inputs, num_microbatches=case.num_microbatches, scaler=scaler)
            norm = _norm_and_step(case, model, optimizer, scaler)
            if average is not None:
                average.update()
        steps.append({"loss": loss.item().hex(), "norm": norm, "events": [_line(event) for event in events]})
    sw.save(f"{folder}/checkpoint", model, optimizer, average=average)
    return {"steps": steps, "state": _digests(sw.full_state_dict(model))}


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    parameters = model.parameters() if case.optimizer == "names" else sw.flat_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    if case.optimizer == "in_backward":
        sw.optimizer_in_backward(model, optimizer)
    return optimizer


def _norm_and_step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: sw.GradScaler | None
) -> str | None:
    norm = None
    if scaler is not None:
        scaler.unscale_(optimizer)
    if case.optimizer != "in_backward":
        norm = sw.clip_grad_norm(model, 0.3).item().hex()
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    return norm


def _predict(case: Case) -> dict[str, Any]:
    plan = case.parallel_plan
    # A dry run cuts no batch: it is told one microbatch, and how many there are.
    found = sw.dry_run(
        case.build,
        plan,
        world_size=case.world,
        batch=batch(case.model, 0, 0, 0, 0),
        optimizer="adamw",
        backend="gloo",
        num_microbatches=case.num_microbatches,
        has_average=case.has_average,
    )
    return {"events": [_line(event) for event in found.events], "bytes": found.bytes_by_category}


def _line(event: sw.CollectiveEvent) -> str:
    return f"{event.kind} {event.axis} {event.unit} {event.dtype} {event.sent_bytes}"


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: _digest_of(tensor) for name, tensor in sorted(tensors.items())}


def _digest_of(tensor: Tensor) -> str:
    content = (
        tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )
    return _digest([str(tensor.dtype), str(tuple(tensor.shape)), hashlib.sha256(content).hexdigest()])


def _digest(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_DIGITS]


def _digests_of_files(folder: Path) -> list[dict[str, str]]:
    """Of each file with tensors, by rank and then by kind: what else a file's name holds differs from run to run."""
    found = []
    for path in sorted(folder.rglob("*.safetensors"), key=lambda path: path.stem.split("-")[::-2]):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        names = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()]
        found.append({"names": _digest(names), "values": _digest(list(_digests(tensors).values()))})
    return found
