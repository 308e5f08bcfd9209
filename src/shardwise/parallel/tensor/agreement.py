"""Checks that all ranks of ``tp`` use the same batch and random state, and get equal gradients of copies.

Different samples on the ranks of one model, or different seeds as in data parallelism, would not be noticed: all shapes
are correct, and copies of a parameter drift apart. This also happens if each rank uses a replicated parameter with
different features, such as a learned slope of an activation between a column- and a row-parallel layer: each rank then
gets a part of the gradient. A table of styles does not say where a model calls its modules, but the first gradients do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json, refuse_different
from shardwise.comm.dtype import as_real
from shardwise.parallel.tensor.layer import SharedParameters
from shardwise.spec.errors import RankDisagreement
from shardwise.spec.slice import slice_of
from shardwise.spec.styles import generalized


class BatchCheck:
    """Compares the ranks at the first call of a model with grad, and at the first such call with active dropout.

    Collective:
        Two small all-gathers on ``tp`` in each of those calls.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._seen: set[bool] = set()
        self._dropouts: list[Any] = []  # checked in every step, where a walk over all modules is slow

    def install(self, model: nn.Module) -> None:
        """Compare the arguments of calls of ``model`` from now on."""
        self._dropouts = [module for module in model.modules() if "Dropout" in type(module).__name__]
        model.register_forward_pre_hook(self._check_call, with_kwargs=True)

    def _check_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return  # generation compares prompts itself
        may_drop = model.training and any(_drops(module) for module in self._dropouts)
        if may_drop in self._seen:
            return
        self._seen.add(may_drop)
        batch = [_digest(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        state = _digest(_random_state(self._comm.device)) if may_drop else 0
        by_rank = all_gather_json(self._comm, [batch, state])
        refuse_different(
            self._comm,
            [batch for batch, _ in by_rank],
            "the ranks of a tensor-parallel group, which compute one model together, got different batches",
            "Divide the samples by sw.data_parallel_rank(model) and sw.data_parallel_size(model), not by the world.",
        )
        refuse_different(
            self._comm,
            [state for _, state in by_rank],
            "the ranks of a tensor-parallel group have different random states, so that dropout would make copies of"
            " the same values differ",
            "Seed by sw.data_parallel_rank(model), not by the rank of the world.",
        )


def _drops(module: nn.Module) -> bool:
    rate = getattr(module, "p", 0.0)
    return isinstance(rate, float) and rate > 0


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _digest(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


#: Allowed relative difference of gradients. On the CPU there is none, but GPU kernels may add in any order.
_ROUNDING, _ROUNDING_16_BIT = 1e-3, 2e-2


class GradientCheck:
    """Compares the first gradient of every replicated parameter, at the end of the backward that computes it.

    Collective:
        Two small all-gathers on ``tp`` at the end of a backward in which parameters got their first (finite) gradient.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._hooks: dict[str, RemovableHandle] = {}  # hooks of parameters that have not been compared
        self._seen: dict[str, tuple[float, float, int, float]] = {}  # norm, sum, elements and allowed difference
        self._parts: dict[str, tuple[float, float]] = {}  # norm and sum of gradients before their sum over ranks
        self._backward = -1  # number of the backward at whose end gradients are compared
        self._summing: dict[str, SharedParameters] = {}  # modules that sum their gradients over ranks, by path

    def install(self, model: nn.Module, *, divides_sequence: bool) -> None:
        """Compare the first gradients of the replicated parameters of ``model``, to which the plan has been applied."""
        for path, module in model.named_modules():
            whole = [name for name, parameter in module.named_parameters(recurse=False) if not _is_cut(parameter)]
            if whole:
                call = _FirstCall(self, path, whole)
                call.handle = module.register_forward_hook(call)
            layer = module.__dict__.get("forward")
            if isinstance(layer, SharedParameters) and not divides_sequence:
                layer.watch = partial(self._watch_partial, path)
                self._summing[path] = layer

    def watch(self, name: str, parameter: Tensor) -> None:
        """Compare the next gradient of ``parameter``."""
        self._hooks[name] = parameter.register_hook(partial(self._on_gradient, name))

    def _watch_partial(self, path: str, name: str, parameter: Tensor) -> None:
        if torch.is_grad_enabled() and parameter.requires_grad:
            parameter.register_hook(partial(self._on_partial_gradient, f"{path}.{name}"))

    def _on_partial_gradient(self, name: str, gradient: Tensor) -> None:
        if name not in self._parts:
            self._parts[name] = _norm_and_sum(gradient)

    def _on_gradient(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None or gradient.layout != torch.strided or not gradient.numel():
            self._hooks.pop(name).remove()  # a deferred gradient, or a sparse one
            return
        backward = torch._C._current_graph_task_id()  # noqa: SLF001 - both as in engine.torch_private, which is not below
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._compare)  # type: ignore[attr-defined]  # noqa: SLF001
        rounding = _ROUNDING if gradient.element_size() > 2 else _ROUNDING_16_BIT
        self._seen[name] = *_norm_and_sum(gradient), gradient.numel(), rounding

    def _compare(self) -> None:
        seen, self._seen = self._seen, {}
        parts, self._parts = self._parts, {}
        by_rank = all_gather_json(self._comm, [{name: found[:2] for name, found in seen.items()}, parts])
        different, counted = [], []
        for name, (_, _, numel, rounding) in seen.items():
            found = [other.get(name, (0.0, 0.0)) for other, _ in by_rank]
            if not all(math.isfinite(value) for pair in found for value in pair):
                continue  # a 16-bit overflow: compare the next gradient instead
            self._hooks.pop(name).remove()
            adding = self._summing.pop(name.rpartition(".")[0], None)
            if adding is not None:
                adding.watch = None
            norms, sums = zip(*found, strict=True)
            allowed = rounding * max(norms)
            if max(norms) - min(norms) > allowed or max(sums) - min(sums) > allowed * math.sqrt(numel):
                different.append(name)
            if (
                name in parts
                and norms[0] > 0
                and all(other.get(name) == by_rank[0][1].get(name) for _, other in by_rank)
            ):
                counted.append(name)
        if different:
            raise RankDisagreement(self._describe_different(different))
        if counted:
            raise RankDisagreement(self._describe_counted(counted))

    def _describe_different(self, names: list[str]) -> str:
        pattern = generalized(names[0])
        return (
            f"all {self._comm.size} ranks of a tensor-parallel group hold {_first_of(names)} whole, but got different"
            " gradients: each uses it with its own features or heads, as between a column- and a row-parallel layer.\n"
            f"  Have its gradients added up, tp_plan={{{pattern.rpartition('.')[0]!r}:"
            " 'replicated_with_grad_allreduce'}, or, where it has one value per feature, divide it,"
            f" tp_plan={{{pattern!r}: 'colwise'}}."
        )

    def _describe_counted(self, names: list[str]) -> str:
        size = self._comm.size
        return (
            f"all {size} ranks of a tensor-parallel group use {_first_of(names)} with the same values, but the style"
            f" 'replicated_with_grad_allreduce' adds up their gradients: it would count {size} times.\n"
            f"  Take the style from it: tp_plan={{{generalized(names[0]).rpartition('.')[0]!r}: 'replicate'}}."
        )


def _first_of(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _norm_and_sum(gradient: Tensor) -> tuple[float, float]:
    values = as_real(gradient)
    return torch.linalg.vector_norm(values).item(), values.sum().item()


class _FirstCall:
    """Hook of a module's first forward, during which the module has the full parameters that autograd sees."""

    def __init__(self, copies: GradientCheck, path: str, names: Sequence[str]) -> None:
        self.handle: RemovableHandle | None = None
        self._copies, self._path, self._names = copies, path, names

    def __call__(self, module: nn.Module, _args: object, _output: object) -> None:
        """Watch the module's parameters."""
        if not torch.is_grad_enabled() or self.handle is None:
            return
        self.handle.remove()
        self.handle = None
        for name in self._names:
            parameter = module._parameters[name]  # noqa: SLF001 - named_parameters may show another tensor
            if parameter is not None and parameter.requires_grad:
                self._copies.watch(f"{self._path}.{name}" if self._path else name, parameter)


def _is_cut(parameter: nn.Parameter) -> bool:
    part = slice_of(parameter)
    return part is not None and bool(part.cuts)
