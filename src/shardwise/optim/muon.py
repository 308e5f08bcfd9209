"""Muon on shards: the state is sharded like AdamW's, and each matrix is orthogonalized once, by one rank.

A step updates the momentum element by element on every rank's slices, sends slices of the updates to the owners of the
matrices and the results back (``optim.matrices``), and updates the slices. Both exchanges use bfloat16. The
Newton-Schulz iteration begins by rounding to bfloat16 and its result is bfloat16, so that nothing is lost.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardwise import torch_private
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import memory_order
from shardwise.engine.storage.attachment import engine_of_unit, group_and_index
from shardwise.engine.storage.flat_parameters import FlatParameter, group_of
from shardwise.optim.matrices import Exchange, Matrix, RankRanges, assign_owners
from shardwise.spec.errors import StateError
from shardwise.spec.extent import Extent, decode_extent, encode_extent

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

_WIRE = torch.bfloat16


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for matrices and AdamW for the rest, under every strategy, ``tp`` and ``pp``.

    ::

        optimizer = sw.Muon(sw.muon_groups(model, lr=0.02, adamw_lr=3e-4))

    With the same gradients, the updates equal bitwise those of ``torch.optim.Muon`` and ``torch.optim.AdamW`` on full
    parameters in one process. Without :func:`muon_groups`, all parameters must be matrices.

    Args:
        params: Parameters, or groups as :func:`muon_groups` makes them. A group has ``kind`` ``"muon"`` or ``"adamw"``.
            For fused matrices it has ``parts``: the sizes of the matrices along ``dim``. ``is_stacked`` says that its
            parameters are stacks of matrices, such as weights of experts, which are orthogonalized separately.
        lr: Learning rate of matrices.
        weight_decay: Decoupled weight decay, as in AdamW.
        momentum: Momentum of the average of gradients.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: Coefficients of the Newton-Schulz iteration.
        eps: In ``muon`` groups, the least norm by which a matrix is divided.
        ns_steps: Number of iterations.
        adjust_lr_fn: Factor of ``lr`` by a matrix's shape. ``"original"`` (``None``): sqrt(max(1, rows / columns)).
            ``"match_rms_adamw"``: 0.2 sqrt(max(rows, columns)) (Liu et al. 2025), for rates tuned for AdamW.

    Collective:
        ``step()``: two all-to-alls over all ranks of the mesh. For P elements in matrices on N ranks of ``zero1`` to
        ``zero3``, each rank sends and receives about 2 P / N bytes in each of them. Under ``tp``, ``pp`` and ``ep`` the
        first step gathers about 100 bytes for each matrix and rank. All ranks must call.

    Raises:
        StateError: A parameter is no matrix, or comes from ``sw.flat_parameters``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise StateError(f"sw.Muon(adjust_lr_fn={adjust_lr_fn!r}): expected None, 'original' or 'match_rms_adamw'.")
        defaults = {
            "kind": "muon",
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": (0.9, 0.95),
            "parts": (),
            "dim": 0,
            "is_stacked": False,
        }
        self._owners: weakref.WeakKeyDictionary[Engine, dict[str, Matrix]] = weakref.WeakKeyDictionary()
        self._exchanges: weakref.WeakKeyDictionary[Engine, dict[frozenset[str], Exchange]] = weakref.WeakKeyDictionary()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as :func:`muon_groups` makes them.

        Raises:
            StateError: A parameter is no matrix, or comes from ``sw.flat_parameters``.
        """
        if param_group.get("kind") == "adamw":
            param_group.setdefault("eps", 1e-8)  # AdamW's default instead of that of matrices
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _refuse_odd(parameter, self.param_groups[-1])
        self._owners.clear()
        self._exchanges.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore [bad-override]
        """Update the parameters that have gradients.

        Args:
            closure: Computes the loss and the gradients again.

        Returns:
            The result of the closure.

        Collective:
            See the class. All ranks must call.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: dict[Tensor, Tensor] = {}
        settings: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            if group["kind"] == "adamw":
                self._adamw(group)
            else:
                updates |= self._momentum(group)
                settings |= dict.fromkeys(group["params"], group)
        for parameter, orthogonal in self._orthogonalized(updates, settings).items():
            group = settings[parameter]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            shape = _part_shapes(logical_shape(parameter)[-2:], group)[0]
            parameter.add_(orthogonal, alpha=-_adjusted(group["lr"], group["adjust_lr_fn"], shape))
        return loss

    def _momentum(self, group: dict[str, Any]) -> dict[Tensor, Tensor]:
        """Update the averages of a group; returns this rank's part of each update before orthogonalization.

        It is rounded here, because the iteration begins with that, and takes half of the memory.
        """
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return {}
        grads, buffers = [parameter.grad for parameter in trained], []
        for parameter in trained:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
            buffers.append(state["momentum_buffer"])
        momentum = group["momentum"]
        updates = []
        for grad, buffer in zip(grads, buffers, strict=True):
            buffer.lerp_(grad, 1 - momentum)
            updates.append((grad.lerp(buffer, momentum) if group["nesterov"] else buffer).to(_WIRE))
        return dict(zip(trained, updates, strict=True))

    def _orthogonalized(
        self, updates: dict[Tensor, Tensor], settings: Mapping[Tensor, dict[str, Any]]
    ) -> dict[Tensor, Tensor]:
        """Return this rank's part of every orthogonalized update."""
        found: dict[Tensor, Tensor] = {}
        for engine, names in self._by_engine().items():
            if engine is None:
                for parameter in updates.keys() & set(names.values()):
                    found[parameter] = _orthogonal(updates[parameter], settings[parameter])
                continue
            parts: dict[str, Tensor] = {}
            groups: dict[str, dict[str, Any]] = {}
            matrices_of: dict[str, list[str]] = {}  # the matrices of each parameter, in the order of memory
            for name, parameter in names.items():
                if parameter in updates:
                    extents = _matrices_in(name, matrix_extent(parameter))
                    sizes = [extent.numel for extent in extents.values()]
                    parts |= dict(
                        zip(extents, memory_order(updates.pop(parameter)).split(sizes or 1), strict=bool(sizes))
                    )
                    groups |= dict.fromkeys(extents, settings[parameter])
                    matrices_of[name] = list(extents)
            exchange = self._exchange(engine, names, frozenset(matrices_of))
            full = exchange.gather(parts, _WIRE)
            parts.clear()
            results = {name: _orthogonal(full.pop(name), groups[name]) for name in list(full)}
            scattered = exchange.scatter(results, _WIRE)
            for name, matrices in matrices_of.items():
                flats = [scattered[matrix] for matrix in matrices if matrix in scattered]
                if flats:
                    flat = flats[0] if len(flats) == 1 else torch.cat(flats)
                    found[names[name]] = _like(flat.to(names[name].device), names[name])
        return found

    def _by_engine(self) -> dict[Engine | None, dict[str, Tensor]]:
        """Return the matrices of each model by their names; matrices of no model under ``None``.

        A model with other parameters but no matrix on this rank is included, because all ranks take part in exchanges.
        """
        found: dict[Engine | None, dict[str, Tensor]] = {}
        for group in self.param_groups:
            if group["kind"] == "adamw":
                owners = filter(None, map(group_of, group["params"]))
                for unit in dict.fromkeys(owner.unit for owner in owners):
                    if (engine := engine_of_unit(unit)) is not None:
                        found.setdefault(engine, {})
                continue
            for parameter in group["params"]:
                place = group_and_index(parameter)
                if place is None:
                    others = found.setdefault(None, {})
                    others[str(len(others))] = parameter
                    continue
                name = place[0].layout.params[place[1]].name
                found.setdefault(engine_of_unit(place[0].unit), {})[name] = parameter
        return found

    def _exchange(self, engine: Engine, names: Mapping[str, Tensor], active: frozenset[str]) -> Exchange:
        if engine not in self._owners:
            self._owners[engine] = assign_owners(_ranges_on_all_ranks(engine, names), _work)
        known = self._exchanges.setdefault(engine, {})
        if active not in known:
            inactive = names.keys() - active
            owners = self._owners[engine].items()
            participating = {name: matrix for name, matrix in owners if name.partition("[")[0] not in inactive}
            known[active] = Exchange(participating, engine.comms.world)
        return known[active]

    def _adamw(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states = [self.state[parameter] for parameter in trained]
        adamw(
            trained,
            [parameter.grad for parameter in trained],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _refuse_odd(parameter: Tensor, group: Mapping[str, Any]) -> None:
    if isinstance(parameter, FlatParameter):
        raise StateError(
            "sw.Muon orthogonalizes each matrix by itself, but sw.flat_parameters() gave it several parameters as one"
            " tensor.\n  Give it sw.muon_groups(model)."
        )
    shape = logical_shape(parameter)
    num_dims = 3 if group["is_stacked"] else 2
    if group["kind"] == "muon" and (len(shape) != num_dims or not math.prod(shape)):
        raise StateError(
            f"sw.Muon takes matrices, and got a parameter of shape {list(shape)}.\n"
            "  Give it sw.muon_groups(model), which leaves vectors, embeddings and heads to AdamW."
        )
    if group["parts"] and sum(group["parts"]) != shape[-2:][group["dim"]]:
        raise StateError(
            f"sw.Muon: parts of {list(group['parts'])} rows or columns make {sum(group['parts'])}, but dimension"
            f" {group['dim']} of a parameter of shape {list(shape)} has {shape[-2:][group['dim']]}."
        )


def logical_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter in the plain model."""
    place = group_and_index(parameter)
    return tuple(parameter.shape) if place is None else place[0].layout.params[place[1]].logical_shape


def _ranges_on_all_ranks(engine: Engine, names: Mapping[str, Tensor]) -> list[RankRanges]:
    """Return the parts of the matrices on every rank. Only ``tp``, ``pp`` and ``ep`` need communication."""
    comms = engine.comms
    is_alike = comms.tp is None and comms.pp is None and comms.ep is None
    if is_alike or comms.world.device.type == "meta":  # a dry run has no peers
        return [_split_stacks(_ranges_on(engine, names, rank)) for rank in range(comms.world.size)]
    own = {name: encode_extent(matrix_extent(parameter)) for name, parameter in names.items()}
    everyone = all_gather_json(comms.world, own)
    return [_split_stacks({name: decode_extent(extent) for name, extent in ranges.items()}) for ranges in everyone]


def _split_stacks(ranges: RankRanges) -> RankRanges:
    """Return a rank's parts of every matrix, from its parts of the parameters."""
    return {matrix: part for name, extent in ranges.items() for matrix, part in _matrices_in(name, extent).items()}


def _matrices_in(name: str, extent: Extent) -> dict[str, Extent]:
    """Return the part of each matrix in a range of a parameter; matrices of a stack are called ``name[0]``, ..."""
    if len(extent.shape) == 2:
        return {name: extent}
    ranges = next((cut.ranges for cut in extent.cuts if cut.dim == 0), ((0, extent.shape[0]),))
    cuts = tuple(replace(cut, dim=cut.dim - 1) for cut in extent.cuts if cut.dim > 0)
    each = extent.slice_numel // sum(stop - start for start, stop in ranges)
    found = {}
    for place, index in enumerate(index for start, stop in ranges for index in range(start, stop)):
        start, stop = max(extent.start - place * each, 0), min(extent.stop - place * each, each)
        if start < stop:
            found[f"{name}[{index}]"] = replace(extent, shape=extent.shape[1:], start=start, stop=stop, cuts=cuts)
    return found


def _ranges_on(engine: Engine, names: Mapping[str, Tensor], rank: int) -> RankRanges:
    """Return another rank's parts of this rank's matrices, if ``tp`` divides evenly."""
    comms = engine.comms
    tp, stage_size = comms.tp.size if comms.tp is not None else 1, comms.world.size
    stage_size //= comms.pp.size if comms.pp is not None else 1
    if rank // stage_size != comms.world.rank // stage_size:
        return {}
    place, steps, found = rank // tp % comms.gather.size, rank % tp - comms.world.rank % tp, {}
    for name, parameter in names.items():
        shard_place = group_and_index(parameter)
        assert shard_place is not None
        facts = shard_place[0].facts
        if place % facts.ep == comms.gather.rank % facts.ep:
            extent = matrix_extent(parameter, facts.slice_index(place))
            found[name] = extent if facts.is_expert else _shifted(extent, steps)
    return found


def _shifted(extent: Extent, steps: int) -> Extent:
    """Return the same range in the slice of another rank of ``tp``, ``steps`` ranks further."""
    cuts = tuple(
        replace(cut, ranges=tuple((a + steps * (b - a), b + steps * (b - a)) for a, b in cut.ranges))
        for cut in extent.cuts
    )
    return replace(extent, cuts=cuts)


def matrix_extent(parameter: Tensor, rank: int | None = None) -> Extent:
    """Return the range of a matrix on this rank, or on the rank at place ``rank`` among those that share it."""
    place = group_and_index(parameter)
    assert place is not None
    (owner, index), pieces = place, place[0].pieces
    if rank is not None and owner.placements.shards_optimizer:
        pieces = owner.layout.owned_by_param(rank)
    return owner.layout.params[index].extent(pieces[index].start, pieces[index].stop)


def _like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of ``flat``, in memory order, with the shape and strides of ``parameter``."""
    return flat.as_strided(parameter.shape, parameter.stride())


def _work(shape: tuple[int, ...]) -> float:
    """Multiply-adds of an iteration: three products, of (s, l) by (l, s), (s, s) by (s, s), and (s, s) by (s, l)."""
    short, long = min(shape), max(shape)
    return 2.0 * short * short * long + short**3


def _orthogonal(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Orthogonalize the update of a full matrix, part by part.

    The learning rate is that for the first part's shape. Parts whose shapes need another one are scaled.
    """

    def one(part: Tensor) -> Tensor:
        matrix = part.clone() if part.dtype is _WIRE else part  # the iteration overwrites bfloat16 input
        return torch_private.orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

    if update.dim() == 3:
        return torch.stack([_orthogonal(matrix, group) for matrix in update.unbind()])
    if not group["parts"]:
        return one(update)
    rates = [_adjusted(1.0, group["adjust_lr_fn"], shape) for shape in _part_shapes(tuple(update.shape), group)]
    parts = [one(part) for part in update.split(group["parts"], dim=group["dim"])]
    scaled = [part if rate == rates[0] else part * (rate / rates[0]) for part, rate in zip(parts, rates, strict=True)]
    return torch.cat(scaled, dim=group["dim"])


def _part_shapes(shape: tuple[int, ...], group: Mapping[str, Any]) -> list[tuple[int, int]]:
    rows, columns = shape
    if not group["parts"]:
        return [(rows, columns)]
    return [(size, columns) if group["dim"] == 0 else (rows, size) for size in group["parts"]]


def _adjusted(lr: float, adjust_lr_fn: str | None, shape: tuple[int, ...]) -> float:
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))
