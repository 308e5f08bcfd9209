"""What ``state_dict()`` gives on later pipeline stages, for rank 0 to put beside its own.

A module's ``state_dict`` may be its own work: hooks that rename, extra state. So each stage walks its own modules, with
parameters of logical shape on ``meta`` in their places, and tells rank 0 what each entry is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.engine import Engine
from shardwise.features.precision import saved_dtypes
from shardwise.spec.errors import StateError
from shardwise.state.assemble import Survey, is_first_of_stage, sliced_alone


class StageState:
    """Of a later stage the entries of its state dict, of others nothing.

    Attributes:
        entries: ``[key, "parameter", name]``, ``[key, "tensor", dtype, shape]``, ``[key, "value", value]``, or
            ``[key, "opaque", type]`` for what cannot be sent.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.entries: list[list[Any]] = []
        self._tensors: list[Tensor] = []
        pp = engine.comms.pp
        if pp is None or pp.rank == 0 or not is_first_of_stage(engine):
            return
        specs = [spec for group in engine.groups for spec in group.layout.params]
        on_meta = {
            spec.name: torch.empty(spec.logical_shape, dtype=torch_dtype(spec.dtype), device="meta") for spec in specs
        }
        with whole_tensors_in(engine, on_meta) as shown:
            state = model.state_dict(keep_vars=True)
        dtypes = saved_dtypes(model)
        names = shown | {id(parameter): name for name, parameter in sliced_alone(engine).items()}
        for key, value in state.items():
            is_cast = key in dtypes and isinstance(value, Tensor)
            self._add(key, value.to(dtypes[key]) if is_cast else value, names.get(id(value)))

    def _add(self, key: str, value: Any, name: str | None) -> None:
        if name is not None:
            self.entries.append([key, "parameter", name])
        elif isinstance(value, Tensor) and not value.is_meta:
            self.entries.append([key, "tensor", dtype_name(value.dtype), list(value.shape)])
            self._tensors.append(value.detach())
        elif is_json(value):
            self.entries.append([key, "value", value])
        else:
            self.entries.append([key, "opaque", type(value).__name__])

    def send(self, world: Comm) -> None:
        """Send the tensors among the entries to rank 0.

        Collective:
            A message for each; rank 0 calls :func:`later_stages`.
        """
        for tensor in self._tensors:
            world.send(as_bytes(tensor.to(world.device)), to=0, unit="state").wait()


def refuse_opaque(found: Survey) -> None:
    """Refuse what a stage cannot send.

    Raises:
        StateError: There is such; on every rank alike.
    """
    opaque = [(key, rest[0]) for said in found.more.values() for key, kind, *rest in said or () if kind == "opaque"]
    if opaque:
        shown = "".join(f"\n  {key}: a {kind}" for key, kind in opaque[:12])
        raise StateError(
            f"modules of later pipeline stages have state that JSON does not hold:{shown}\n"
            "  Let get_extra_state() return numbers, strings, lists and dicts; or use sw.save()."
        )


def later_stages(world: Comm, found: Survey, whole: Mapping[str, Tensor]) -> dict[str, Any]:
    """The entries of later stages, on rank 0.

    Args:
        world: All ranks.
        found: What they hold.
        whole: The parameters by name; others are left out.
    """
    state: dict[str, Any] = {}
    for source in sorted(found.more):
        for key, kind, *rest in found.more[source] or ():
            if kind == "parameter":
                if rest[0] in whole:
                    state[key] = whole[rest[0]]
            elif kind == "value":
                state[key] = rest[0]
            else:
                dtype, shape = rest
                tensor = torch.empty(shape, dtype=torch_dtype(dtype), device=world.device)
                world.receive(as_bytes(tensor), source=source, unit="state").wait()
                state[key] = tensor.cpu()
    return state


def in_module_order(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries in the order of the modules that they belong to, as the plain model's ``state_dict()`` has them."""
    places = {path: place for place, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def known(key: str) -> str:
        path = key.rpartition(".")[0]
        while path and path not in places:
            path = path.rpartition(".")[0]
        return path

    # Of these rank 0 has no more than what is tied to its own: the order of the stage that has all of it counts.
    partial = {known(key) for key in state if known(key) != key.rpartition(".")[0]} - {""}

    def place(key: str) -> int:
        parts = key.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        return places[next((path for path in above if path in partial), known(key))]

    return {key: state[key] for key in sorted(state, key=place)}


def beside_siblings(state: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` and ``more``, each new entry after those with which it shares most of its path."""
    tree: dict[str, Any] = {}
    for key in (*state, *more):
        node = tree
        for part in key.split("."):
            node = node.setdefault(part, {})

    def walk(node: dict[str, Any], path: str) -> Iterator[str]:
        if not node:
            yield path
        for part, below in node.items():
            yield from walk(below, f"{path}.{part}" if path else part)

    both = {**state, **more}
    return {key: both[key] for key in walk(tree, "")}


@contextlib.contextmanager
def whole_tensors_in(engine: Engine, whole: Mapping[str, Tensor]) -> Iterator[dict[int, str]]:
    """Let the modules show whole parameters, so that torch's own ``state_dict`` walks them, hooks and all.

    Yields:
        The name of each parameter that is shown, by its ``id``.
    """
    shown: dict[int, nn.Parameter] = {}
    names: dict[int, str] = {}
    for group in engine.groups:
        for shard, spec in zip(group.shards, group.layout.params, strict=True):
            parameter = shown[id(shard)] = nn.Parameter(whole[spec.name], requires_grad=shard.requires_grad)
            names[id(parameter)] = spec.name
    for unit in engine.units:
        unit.shows_logical_state = True
        for owner in unit.owners:
            owner.parameters.update({attribute: shown[id(shard)] for attribute, shard in owner.shards.items()})
    try:
        yield names
    finally:
        for unit in engine.units:
            unit.shows_logical_state = False
            for member in unit.members:
                for owner in member.owners:
                    owner.parameters.update(owner.fulls if member.is_swapped else owner.shards)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor; a view of it where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def is_json(value: Any) -> bool:
    """Whether a value comes back from JSON as it was."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RuntimeError):
        return False
