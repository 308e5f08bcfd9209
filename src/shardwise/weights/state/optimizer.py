"""An optimizer's state as ranges of logical tensors, for checkpoints.

================================  ==============================================  ====================================
state of a parameter              stored as                                       loads if
================================  ==============================================  ====================================
one value per element             a tensor of the parameter's shape               always
one per row or block, of an       one value for each row or block of the full     no shard or slice divides a row or
optimizer that works on those     parameter                                       block
another tensor, such as the       itself, by the rank with the full parameter     one rank has the full parameter
factors of a matrix
a number                          JSON                                            always
================================  ==============================================  ====================================

A tensor subclass that wraps plain tensors (8-bit codes and their scales) is stored as these: ``<key>.<attribute>``. A
wrapped tensor that is neither per element nor per block is a table that all pieces share.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import dtype_name, memory_order, torch_dtype
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.flat_parameters import FlatParameter, split, states_by_name
from shardwise.engine.storage.optimizer import needed_by
from shardwise.spec.errors import CheckpointError
from shardwise.spec.extent import Extent
from shardwise.spec.granularity import Granularity, first_row_dim, row_numel
from shardwise.spec.layout import ParamSpec, Piece
from shardwise.spec.slice import Cut, slice_of
from shardwise.weights.state.extents import Pairs
from shardwise.weights.state.stored_ranges import Names, owned_pieces

#: Prefix of the names of optimizer state in checkpoints.
_OPTIMIZER = "optimizer/"
#: Words of a problem with a shape, which another granularity solves.
_SHAPE = "has shape"
#: State that torch's optimizers keep once per parameter, as a tensor without dimensions. If the parameter has no
#: dimensions either, only the key distinguishes it from the state of its single element.
PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})


def _is_elementwise(key: str, value: object, view: Tensor) -> bool:
    """Whether optimizer state has one value for each element of ``view``, this rank's part of a parameter."""
    return isinstance(value, Tensor) and value.shape == view.shape and (value.dim() > 0 or key not in PER_PARAMETER)


class _Part:
    """The piece of a parameter on this rank, and the shapes that its optimizer state may have."""

    def __init__(self, spec: ParamSpec, piece: Piece, view: Tensor, needed: Granularity | None) -> None:
        self.spec, self.piece, self.view = spec, piece, view
        self._block_numel = None  # elements of a row or block, if the optimizer works on those
        if needed is not None and spec.stride is None:
            self._block_numel = {"block": needed.numel, "row": row_numel(spec.logical_shape)}.get(needed.kind)

    @classmethod
    def of_group(cls, group: Group, index: int, needed: Granularity | None) -> Self:
        """Make the piece of a parameter in a group of the engine."""
        return cls(group.layout.params[index], group.pieces[index], group.views[index], needed)

    @classmethod
    def of_ignored(cls, parameter: nn.Parameter, name: str) -> Self:
        """Make the piece of an ignored parameter, stored under ``name``."""
        spec = ParamSpec(name, tuple(parameter.shape), dtype_name(parameter.dtype), slice=slice_of(parameter))
        return cls(spec, Piece(0, 0, spec.numel, 0), parameter.detach(), None)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The cuts that make the parameter a slice of the logical tensor; empty for the full tensor."""
        return self.spec.extent(0, 0).cuts

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no element of a parameter that has some."""
        return self.piece.numel == 0 < self.spec.numel

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the full logical parameter."""
        return self.piece.numel == self.spec.numel and not self.cuts

    @property
    def has_origin(self) -> bool:
        """Whether the logical tensor's first element is in this slice, which is true of exactly one slice."""
        return all(any(start == 0 for start, _ in cut.ranges) for cut in self.cuts)

    def extent(self, shape: tuple[int, ...], name: str = "", dtype: str = "") -> Extent | None:
        """Return the logical range of state of ``shape``; ``None`` if only a full parameter can have such state."""
        if shape == tuple(self.view.shape):
            return self.spec.extent(self.piece.start, self.piece.stop, name=name, dtype=dtype)
        for local, full, cuts in self._per_block():
            if shape == local and self._block_numel:
                start, stop = self.piece.start // self._block_numel, -(-self.piece.stop // self._block_numel)
                return Extent(name, full, dtype, start, stop, cuts=cuts)
        return Extent(name, shape, dtype, 0, math.prod(shape)) if self.is_whole else None

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return this rank's shape of state whose logical shape is ``stored``; ``None`` if it cannot be loaded here."""
        if stored == self.spec.logical_shape:
            return tuple(self.view.shape)
        if self.is_whole:
            return stored
        return next((local for local, full, _ in self._per_block() if full == stored), None)

    def _per_block(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[Cut, ...]]]:
        """Yield shapes with one value per row or block: on this rank, of the full parameter, and cuts of the slice."""
        if not self._block_numel:
            return
        logical = self.spec.logical_shape
        cuts = self._cuts_of_blocks(self._block_numel)
        if cuts is not None:
            yield (-(-self.piece.numel // self._block_numel),), (-(-math.prod(logical) // self._block_numel),), cuts
        first = first_row_dim(len(logical))
        ones = (1,) * (len(logical) - first)
        if ones and all(cut.dim < first for cut in self.cuts):
            yield (*self.view.shape[:first], *ones), (*logical[:first], *ones), self.cuts

    def _cuts_of_blocks(self, part: int) -> tuple[Cut, ...] | None:
        """Return the rows or blocks of this slice as cuts; ``None`` if the slice divides a row or block."""
        if not self.cuts:
            return ()
        inner = math.prod(self.spec.logical_shape[1:])
        ranges = [(start * inner, stop * inner) for start, stop in self.cuts[0].ranges]
        if len(self.cuts) > 1 or self.cuts[0].dim or any(edge % part for span in ranges for edge in span):
            return None
        return (Cut(0, tuple((start // part, stop // part) for start, stop in ranges)),)


def _tensors(state: Mapping[str, Any], view: Tensor) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield name and tensor of a parameter's state, except scalars, and whether the tensor is part of a subclass."""
    for key, value in state.items():
        if not isinstance(value, Tensor) or (value.dim() == 0 and not _is_elementwise(key, value, view)):
            continue
        inner = torch_private.wrapped_tensors(value)
        if inner is None:
            yield key, value, False
        else:
            yield from ((f"{key}.{attribute}", tensor, True) for attribute, tensor in inner.items())


def _parts(engine: Engine, optimizer: torch.optim.Optimizer, ignored: Names) -> Iterator[tuple[nn.Parameter, _Part]]:
    """Yield every parameter of the engine, and the ignored ones in ``ignored``, with their pieces."""
    needed = needed_by(optimizer)
    for group in engine.groups:
        for index, shard in enumerate(group.shards):
            yield shard, _Part.of_group(group, index, needed)
    for parameter, name in ignored.items():
        yield parameter, _Part.of_ignored(parameter, name)


# -- saving


def optimizer_extents(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ignored: Names | None = None
) -> Pairs:
    """Return the ranges of the optimizers' state that this rank writes, as ``optimizer/<parameter name>/<key>``."""
    engine = engine_of(model, "sw.save")
    found: Pairs = []
    for optimizer in optimizers:
        needed, states = needed_by(optimizer), states_by_name(optimizer)
        owned = [
            (group.shards[piece.index], _Part.of_group(group, piece.index, needed), piece)
            for group in engine.groups
            for piece in owned_pieces(engine, group)
        ]
        of_ignored = ((parameter, _Part.of_ignored(parameter, name)) for parameter, name in (ignored or {}).items())
        owned += [(parameter, part, part.piece) for parameter, part in of_ignored]
        for parameter, part, piece in owned:
            found += _written(part, piece, states.get(parameter, {}))
    return found


def _written(part: _Part, owned: Piece, state: Mapping[str, Any]) -> Iterator[tuple[Extent, Tensor]]:
    """Yield the ranges of a parameter's state that this rank writes; of copies, the first rank writes."""
    for key, value, is_inner in _tensors(state, part.view):
        name, shape, dtype = f"{_OPTIMIZER}{part.spec.name}/{key}", tuple(value.shape), dtype_name(value.dtype)
        extent = part.extent(shape, name, dtype)
        is_alike = owned.numel < part.piece.numel  # every rank has the full parameter
        is_table = extent is None and is_inner
        if is_table:
            extent, is_alike = Extent(name, shape, dtype, 0, value.numel()), True
        if extent is None:
            continue  # optimizer_scalars has refused it
        extent, flat = _in_memory_order(value, extent, part)
        if is_alike and extent.shape == part.spec.logical_shape:
            extent, flat = replace(extent, start=owned.start, stop=owned.stop), flat[owned.start : owned.stop]
        elif (is_alike and owned.start > 0) or (is_table and not part.has_origin):
            continue
        yield extent, flat


def _in_memory_order(value: Tensor, extent: Extent, part: _Part) -> tuple[Extent, Tensor]:
    """Return the elements, flat, with their extent; the extent keeps the parameter's strides if ``value`` has them."""
    value = value.detach()
    if extent.stride is not None:
        steps = zip(value.shape, value.stride(), part.view.stride(), strict=True)
        is_all = value.shape == part.view.shape and value.numel() == part.spec.numel
        if not is_all or all(here == there for size, here, there in steps if size > 1):
            return extent, memory_order(value)
        extent = replace(extent, stride=None)  # full state with other strides than the parameter
    return extent, value.contiguous().view(-1)


def optimizer_scalars(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ignored: Names
) -> dict[str, dict[str, float]]:
    """Return per-parameter state that is a number, of all ranks: ``{parameter name: {key: value}}``.

    Collective:
        One all-gather of JSON over the world, because only ranks with a piece of a parameter know its scalars. All
        ranks must call.
    """
    engine = engine_of(model, "sw.save")
    own_scalars: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for optimizer in optimizers:
        states = states_by_name(optimizer)
        for parameter, part in _parts(engine, optimizer, ignored):
            state = states.get(parameter, {})
            if not state or part.is_empty:
                continue  # some optimizers keep state of empty pieces, which is never updated
            scalars = {
                key: value
                for key, value in state.items()
                if isinstance(value, (int, float))
                or (isinstance(value, Tensor) and value.dim() == 0 and not _is_elementwise(key, value, part.view))
            }
            if scalars:
                own_scalars[part.spec.name] = scalars
            problems += _unsaved(type(optimizer).__name__, part, state)
    everyone = all_gather_json(engine.comms.world, [as_numbers(own_scalars), problems])
    found = list(dict.fromkeys(problem for _, problems in everyone for problem in problems))
    if found:
        is_cut = engine.comms.tp is not None
        better = "an optimizer with a value per element" if is_cut else "granularity='tensor' or strategy 'ddp'"
        advice = f"Use {better}, or save" if any(_SHAPE in problem for problem in found) else "Save"
        raise CheckpointError(
            "optimizer state cannot be saved:\n"
            + "\n".join(f"  - {problem}" for problem in found[:8])
            + f"\n  {advice} without the optimizer: sw.save(path, model)."
        )
    merged: dict[str, dict[str, float]] = {}
    for scalars, _ in everyone:
        merged |= scalars
    return merged


def as_numbers(scalars: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Replace tensors in ``scalars`` by numbers. The host waits once for each device and dtype."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for state in scalars.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                alike[value.device, value.dtype].append((state, key))
    for places in alike.values():
        for (state, key), number in zip(
            places, torch.stack([state[key] for state, key in places]).tolist(), strict=True
        ):
            state[key] = number
    return scalars


def _unsaved(name: str, part: _Part, state: Mapping[str, Any]) -> Iterator[str]:
    """Describe the state of a parameter that cannot be saved."""
    for key, value in state.items():
        if value is not None and not isinstance(value, (int, float, Tensor)):
            yield f"{key!r} of {part.spec.name!r} in {name} is a {type(value).__name__}, not a tensor or number"
    for key, value, is_inner in _tensors(state, part.view):
        if part.extent(tuple(value.shape)) is None and not is_inner:
            yield (
                f"{key!r} of {part.spec.name!r} in {name} {_SHAPE} {list(value.shape)}, but a rank holds a piece of"
                f" that parameter only ({list(part.view.shape)} of {list(part.spec.logical_shape)})"
            )


# -- loading


def _allocate_range(extent: Extent, part: _Part) -> Tensor | None:
    """Allocate this rank's range of a stored tensor; ``None`` if it cannot be loaded here."""
    if extent.shape == part.spec.logical_shape:
        return torch.zeros_like(part.view, dtype=torch_dtype(extent.dtype))
    shape = part.shape(extent.shape)
    return None if shape is None else torch.zeros(shape, dtype=torch_dtype(extent.dtype), device=part.view.device)


class OptimizerState:
    """New state of one optimizer, to be filled from a checkpoint and installed when everything has been read."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, ignored: Names, stored: Mapping[str, Extent]
    ) -> None:
        engine = engine_of(model, "sw.load")
        self.extents: Pairs = []  # this rank's ranges of the stored tensors, as targets to load into
        self.problems: list[str] = []  # stored state that this rank cannot load
        self._optimizer = optimizer
        self._names: dict[nn.Parameter, str] = {}
        self._new_state: dict[str, dict[str, Any]] = {}
        keys: defaultdict[str, dict[str, Extent]] = defaultdict(dict)
        for full_name, extent in stored.items():
            if full_name.startswith(_OPTIMIZER):
                name, _, key = full_name.removeprefix(_OPTIMIZER).rpartition("/")
                keys[name][key] = extent
        self._settings = {
            parameter: settings for settings in optimizer.param_groups for parameter in settings["params"]
        }
        self._numbers: dict[str, dict[str, Any]] = {}
        self._flats = {parameter: {} for parameter in self._settings if isinstance(parameter, FlatParameter)}
        self._settings |= {shard: self._settings[flat] for flat in self._flats for shard in flat.shards}
        found = ((p, part) for p, part in _parts(engine, optimizer, ignored) if p in self._settings)
        owned = [(parameter, part) for parameter, part in found if not part.is_empty]
        for parameter, part in owned:
            self._names[parameter] = part.spec.name
            self._new_state[part.spec.name] = {}
        for flat in self._flats:
            self._allocate_flat(flat, keys)
        for parameter, part in owned:
            self._allocate(part, parameter, keys[part.spec.name])

    def _allocate_flat(self, flat: FlatParameter, keys: Mapping[str, Mapping[str, Extent]]) -> None:
        """Make the parameters of a flat one share its tensors, if the same keys and dtypes were stored for all."""
        names = [self._names[shard] for shard in flat.shards]
        stored = [{key: extent.dtype for key, extent in keys.get(name, {}).items()} for name in names]
        if any(other != stored[0] for other in stored):
            return
        for key, dtype in stored[0].items():
            full = self._flats[flat][key] = torch.zeros_like(flat, dtype=torch_dtype(dtype), requires_grad=False)
            for name, part in zip(names, flat.views_in(full), strict=True):
                self._new_state[name][key] = part

    def _allocate(self, part: _Part, shard: nn.Parameter, stored: Mapping[str, Extent]) -> None:
        """Allocate the state of one parameter as it is stored."""
        state = self._new_state[part.spec.name]
        wrapped: dict[str, Tensor] = {}
        if any("." in key for key in stored):
            made = torch_private.state_after_step(self._optimizer, self._settings[shard], part.view)
            state |= {key: value for key, value in made.items() if any(k.startswith(f"{key}.") for k in stored)}
            wrapped = {key: tensor for key, tensor, is_inner in _tensors(state, part.view) if is_inner}
        for key, extent in stored.items():
            target = wrapped.get(key)
            if target is None and key.rpartition(".")[0] not in state:  # else plain here, a subclass there
                target = state[key] if key in state else _allocate_range(extent, part)
                if target is not None:
                    state[key] = target
            found = None if target is None else part.extent(tuple(target.shape), extent.name, extent.dtype)
            if found is None and key in wrapped:
                found = extent  # a table that all pieces share
            if target is None or found is None or found.shape != extent.shape:
                self.problems.append(
                    f"{key!r} of {part.spec.name!r} is stored with shape {list(extent.shape)}, which a rank that holds"
                    f" {list(part.view.shape)} of {list(part.spec.logical_shape)} cannot take"
                )
                continue
            found, flat = _in_memory_order(target, found, part)
            assert flat.data_ptr() == target.data_ptr()
            self.extents.append((found, flat))

    def set_numbers(
        self, scalars: Mapping[str, Mapping[str, float]], settings: Mapping[int, Mapping[str, Any]]
    ) -> list[str]:
        """Store the numbers of each parameter's state, and check whether the optimizer can continue with the state.

        For optimizers of torch and shardwise, a copy makes a step with one element, which shows the expected state.
        ``scalars`` are by parameter name and key; ``settings`` has the new settings of each group, by its ``id``.

        Returns:
            Descriptions of the problems.
        """
        problems: list[str] = []
        made: dict[Any, dict[str, Any]] = {}
        for parameter, name in self._names.items():
            group, kind = self._settings[parameter], (parameter.dim(), parameter.dtype, parameter.device)
            if (id(group), kind) not in made:
                like = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
                found = _after_step(self._optimizer, {**group, **settings[id(group)]}, like)
                if isinstance(found, Exception) and isinstance(_after_step(self._optimizer, group, like), dict):
                    problems.append(f"no step can be made with the settings of {name}: {found}")
                made[id(group), kind] = found if isinstance(found, dict) else {}
            own, numbers = self._new_state[name], scalars.get(name, {})
            expected = {k: v for k, v in made[id(group), kind].items() if v is not None} if own or numbers else {}
            problems += [f"{name}.{key} is missing" for key in expected.keys() - own.keys() - numbers.keys()]
            self._numbers[name] = {key: _as_scalar(value, expected.get(key)) for key, value in numbers.items()}
            for key, value in self._numbers[name].items():
                if value is None or (isinstance(value, Tensor) and key in expected and not value.isfinite()):
                    problems.append(f"{name}.{key} is {numbers[key]!r}")
        return problems

    def install(self) -> None:
        """Replace the optimizer's state; a flat parameter whose parameters have different numbers of steps is split."""
        of_flat: dict[FlatParameter, dict[str, Any]] = {}
        for flat, state in self._flats.items():
            names = [self._names[shard] for shard in flat.shards]
            first = self._numbers[names[0]]
            if all(self._new_state[name].keys() == state.keys() and self._numbers[name] == first for name in names):
                of_flat[flat] = state | first
        split(self._optimizer, lambda flat: flat not in of_flat)
        in_flats = {id(shard) for flat in of_flat for shard in flat.shards}
        by_name = {
            shard: self._new_state[name] | self._numbers[name]
            for shard, name in self._names.items()
            if id(shard) not in in_flats
        }
        for parameter, state in (*of_flat.items(), *by_name.items()):
            if state:
                self._optimizer.state[parameter] = state
            else:
                self._optimizer.state.pop(parameter, None)


def _after_step(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], like: Tensor
) -> dict[str, Any] | Exception:
    """Return the state of a parameter after a step, or the exception of the step; ``{}`` for third-party optimizers."""
    cls = type(optimizer)
    if not cls.__module__.startswith(("torch.optim.", "shardwise.optim.")):
        return {}
    try:
        if cls.__module__.startswith("torch"):  # torch's constructors check the settings
            accepted = inspect.signature(cls).parameters.keys() & settings.keys() - {"params"}
            cls([nn.Parameter(like)], **{key: settings[key] for key in accepted})
        return torch_private.state_after_step(optimizer, settings, like)
    except Exception as error:  # noqa: BLE001  a wrong setting may lead to any exception
        return error


def _as_scalar(value: Any, like: Any) -> Any:
    """Convert a number to the type of ``like``, which the optimizer keeps; ``None`` if it does not fit.

    Torch's optimizers keep counts as tensors, mostly float32 on the CPU, which they change in place.
    """
    if like is None:
        return torch.tensor(value, dtype=torch.float32) if isinstance(value, float) else value
    if isinstance(value, bool) is not isinstance(like, bool) or (isinstance(like, Tensor) and like.dim()):
        return None
    return like.new_tensor(value) if isinstance(like, Tensor) else type(like)(value)
