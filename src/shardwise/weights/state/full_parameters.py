"""Full parameters inside a context, as FSDP's ``summon_full_params``.

Inside, the model's own Parameter objects show full tensors, so that ``state_dict()``, ``p.norm()`` and other PyTorch
functions see the plain model. Sharded parameters are gathered into new memory. If a rank stores the full group anyway
(a replica, or a single rank), that memory is shown, and a copy restores it at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.comm.base import Done, Handle
from shardwise.comm.control import all_gather_json
from shardwise.engine.attach import Observer
from shardwise.engine.engine import Engine
from shardwise.engine.group import Form, Group
from shardwise.engine.storage.attachment import engine_of, engine_of_unit, mark_of
from shardwise.engine.storage.flat_parameters import group_of
from shardwise.engine.storage.inner import Around
from shardwise.engine.storage.part import set_shard_class, unset_shard_class
from shardwise.engine.unit import Unit
from shardwise.spec.errors import StateError
from shardwise.spec.order import EntryPoint
from shardwise.spec.slice import slice_of
from shardwise.weights.state.extents import gather_metadata, gather_ranges, scatter_ranges
from shardwise.weights.state.stored_ranges import gathered_pieces, of_group


@dataclass(slots=True)
class ShownMode:
    """The options of the context that shows full parameters of a unit."""

    is_written_back: bool  # whether changes are kept
    is_on_root_only: bool  # whether only rank 0 shows full parameters
    has_computed: bool = False  # whether a forward inside has used the full parameters


@contextlib.contextmanager
def full_parameters(
    module: nn.Module,
    writeback: bool = False,  # noqa: FBT001, FBT002 - the public contract
    *,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Show full parameters inside the context, as FSDP1's ``summon_full_params`` does.

    Inside, ``module.state_dict()``, ``module.parameters()`` and arithmetic on parameters work as in the plain model, in
    the master's dtype. A forward without grad computes with the current values of the parameters and gathers nothing.
    ``.grad`` is ``None``. Training, ``optimizer.step()`` and functions that work on shards (``sw.save``,
    ``sw.clip_grad_norm``, ``sw.full_state_dict``, ...) are refused.

    All units with a parameter of ``module`` are gathered at once, so the context needs the memory of all of
    ``module``'s parameters. To get only a state dict, call ``sw.full_state_dict``, which gathers range by range.

    Args:
        module: A parallelized model, or any module in it; units inside are included.
        writeback: Keep the changes that rank 0 has made inside, on all ranks. Otherwise, and after an exception inside
            the context, changes are dropped.
        rank0_only: Show full parameters on rank 0 only; on other ranks they stay shards, and no forward can run inside.
        offload_to_cpu: Show them in host memory; the device stores one group at a time.

    Collective:
        One all-gather per group, nothing for ``ddp``. With ``rank0_only`` sharded parameters are gathered on rank 0 as
        by ``sw.full_state_dict``; with ``writeback`` rank 0's values are scattered at the end as by
        ``sw.load_full_state_dict``. All ranks must enter and leave.

    Raises:
        StateError: The model uses tensor, expert or pipeline parallelism, or ``module`` has a row-sharded embedding
            (``ParallelPlan.row_sharded``), so that modules cannot use full parameters; it is called inside a forward or
            backward, on a unit gathered by hand, or inside a context that shows or keeps less; or parameters were
            replaced or trained inside.
    """
    _refuse_sliced_rows(module)
    units = _units_in(module)
    _check_layout(units)
    mode = ShownMode(is_written_back=writeback, is_on_root_only=rank0_only)
    fresh = _check_entry(units, mode)
    by_engine: dict[Engine, list[Group]] = {}
    for engine, unit in fresh:
        by_engine.setdefault(engine, []).extend(unit.groups)
    shown: list[_Shown] = []
    with _refuse_training(list(by_engine), mode):
        try:
            for engine, groups in by_engine.items():
                engine.sync_buffers()
                shown.extend(_show(engine, groups, mode, offload_to_cpu=offload_to_cpu))
            yield
        except BaseException:
            _close(fresh, shown, keeps=False)
            raise
    problems = [problem for each in shown for problem in each.problems()]
    if writeback and fresh:
        problems = [p for found in all_gather_json(fresh[0][0].comms.control, problems) for p in found]
    _close(fresh, shown, keeps=writeback and not problems)
    if problems:
        raise StateError(
            f"sw.full_parameters: {problems[0]}.\n"
            "  Change values in place (p.copy_(...), p.data = ...); train and replace parameters outside of it."
        )
    for engine, groups in by_engine.items():
        if writeback:
            stored_ranges = [of_group(group) for group in groups]
            metadata, _ = gather_metadata(engine.comms.world, stored_ranges, lambda _: None)
            values = {name: view for each in shown if each.group in groups for name, view in each.views.items()}
            names = [spec.name for group in groups for spec in group.layout.params]
            scatter_ranges(engine.comms.world, stored_ranges, metadata, values, names)
        if writeback or mode.has_computed:
            engine.invalidate()


def _units_in(module: nn.Module) -> list[tuple[Engine, Unit]]:
    """Return the units with a parameter of ``module``, sorted by engine and number."""
    found: dict[int, tuple[Engine, Unit]] = {}
    for parameter in module.parameters():
        group = group_of(parameter)
        engine = engine_of_unit(group.unit) if group is not None else None
        if group is not None and engine is not None:
            found[id(group.unit)] = (engine, group.unit)
    if not found:
        engine_of(module, "sw.full_parameters", on_shards=False)  # refuses a plain module
    order = {id(engine): place for place, (engine, _) in enumerate(found.values())}
    return sorted(found.values(), key=lambda pair: (order[id(pair[0])], pair[1].index))


def _refuse_sliced_rows(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        rows = slice_of(parameter)
        if rows is not None and mark_of(parameter) is None:
            raise StateError(
                f"sw.full_parameters(): of {name!r}, of shape {list(rows.shape)}, this rank's module holds and uses"
                f" {list(rows.local_shape)} only (row_sharded).\n"
                "  Use sw.full_state_dict(model), or pass a module without it."
            )


def _check_layout(units: Sequence[tuple[Engine, Unit]]) -> None:
    for engine, unit in units:
        axes = [axis for axis, comm in (("tp", engine.comms.tp), ("pp", engine.comms.pp)) if comm is not None]
        if any(group.comms is not engine.comms for group in unit.groups):
            axes.append("ep")
        if axes:
            raise StateError(
                f"sw.full_parameters() under {', '.join(axes)}: the modules of this rank work on a part of the model's"
                " parameters, and could not use whole ones.\n"
                "  Use sw.full_state_dict(model), which gathers the logical tensors of every layout."
            )


def _check_entry(units: Sequence[tuple[Engine, Unit]], mode: ShownMode) -> list[tuple[Engine, Unit]]:
    """Return the units that no outer context shows; refuses an outer context that shows or keeps less."""
    for engine, unit in units:
        engine.require_idle("sw.full_parameters()")
        outer = unit.shown_mode
        if outer is None and unit.uses_unsharded:
            raise StateError(
                f"sw.full_parameters(): unit {unit.name!r} was gathered by hand.\n  Call its reshard() first."
            )
        if outer is not None and mode.is_written_back and not outer.is_written_back:
            raise StateError(
                f"sw.full_parameters(writeback=True) inside one without it: changes to unit {unit.name!r} would be"
                " dropped.\n  Give the outer one writeback=True."
            )
        if outer is not None and outer.is_on_root_only and not mode.is_on_root_only:
            raise StateError(
                f"sw.full_parameters() inside one with rank0_only=True: unit {unit.name!r} is whole on rank 0 only.\n"
                "  Leave rank0_only out of the outer one."
            )
    return [(engine, unit) for engine, unit in units if unit.shown_mode is None]


def _show(engine: Engine, groups: Sequence[Group], mode: ShownMode, *, offload_to_cpu: bool) -> Iterator[_Shown]:
    """Gather groups and show them, one by one; with ``rank0_only`` gather all of them on rank 0."""
    is_root = engine.comms.world.rank == 0
    to_root: list[Group] = []
    if mode.is_on_root_only:
        to_root = [group for group in groups if group.resident_buffer is None or group.facts.has_separate_master]
    on_root: dict[Group, Tensor] = {}
    views: dict[str, Tensor] = {}
    if is_root:
        for group in to_root:
            on_root[group] = torch.empty(
                group.layout.numel, dtype=group.dtype, device="cpu" if offload_to_cpu else group.device
            )
            views |= _views(group, on_root[group])
    if to_root:
        stored_ranges = [of_group(group, gathered_pieces(engine, group)) for group in to_root]
        metadata, _ = gather_metadata(engine.comms.world, stored_ranges, lambda _: None)
        gather_ranges(engine.comms.world, stored_ranges, metadata, lambda extent: views[extent.name])
    for group in groups:
        full = on_root.get(group) if group in to_root else gather_group(group)
        yield _Shown(group, full if is_root or not mode.is_on_root_only else None, mode, offload_to_cpu=offload_to_cpu)


def gather_group(group: Group) -> Tensor:
    """Return the full group in its master's dtype, on every rank.

    Collective:
        All-gather on ``dp_shard``; nothing if the optimizer is replicated. All ranks must call.
    """
    comm, resident = group.comms.gather, group.resident_buffer
    if resident is not None and not group.facts.has_separate_master:
        # Also with rank0_only, because a gather to one rank would leave the other ranks' replicas out of date.
        if group.placements.shards_optimizer:
            comm.all_gather(resident, unit=group.unit.name, bounds=group.layout.uneven_bounds).wait()
        return resident
    if not group.placements.shards_optimizer:
        return group.values().clone()
    full = torch.empty(group.layout.numel, dtype=group.dtype, device=comm.device)
    full[group.layout.slice_of(comm.rank)].copy_(group.values())
    comm.all_gather(full, unit=group.unit.name, bounds=group.layout.uneven_bounds).wait()
    return full


def _views(group: Group, full: Tensor) -> dict[str, Tensor]:
    """Return views of the parameters in the full group, by name."""
    return {
        spec.name: full.as_strided(spec.shape, spec.strides, full.storage_offset() + offset)
        for spec, offset in zip(group.layout.params, group.layout.offsets, strict=True)
    }


def _close(units: Sequence[tuple[Engine, Unit]], shown: Sequence[_Shown], *, keeps: bool) -> None:
    """Put the shards back. With ``keeps``, replicas keep the changes that were made inside."""
    for each in shown:
        each.close(keeps=keeps)
    for _, unit in units:
        unit.shown_mode = None
        unit.shows_logical_state = False
        for owner in unit.owners:
            owner.set_parameters(owner.shards)


class _ShownForm(Around):
    """The form of a group while it is shown: its unit computes with the present values of the shown parameters."""

    is_shown = True

    def __init__(self, inner: Form, full: Tensor, mode: ShownMode) -> None:
        super().__init__(inner)
        self._full = full
        self._mode = mode

    def gather(self, group: Group) -> Handle:
        """Copy the shown parameters into the gathered buffer."""
        self._mode.has_computed = True
        if self._full.data_ptr() != group.gathered.data_ptr():
            group.gathered.copy_(self._full)
        return Done()


class _RefusesTraining(Observer):
    """Refuses training while parameters are shown; forwards without grad are allowed if every rank shows them."""

    def __init__(self, mode: ShownMode) -> None:
        self._mode = mode

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:  # noqa: ARG002
        """Refuse a forward with grad, or on some ranks only."""
        if torch.is_grad_enabled() or self._mode.is_on_root_only:
            raise StateError(
                "a forward with grad, or on some ranks only, inside sw.full_parameters(): gradients could not be"
                " reduced.\n"
                "  Train outside of it; inside, use torch.no_grad(), without rank0_only."
            )


@contextlib.contextmanager
def _refuse_training(engines: Sequence[Engine], mode: ShownMode) -> Iterator[None]:
    observer = _RefusesTraining(mode)
    for engine in engines:
        engine.extras.add(observer, is_first=True)
    try:
        yield
    finally:
        for engine in engines:
            engine.extras.remove(observer)


class _Shown:
    """One group whose full parameters are shown until :meth:`close`; if ``full`` is ``None``, nothing is shown."""

    def __init__(self, group: Group, full: Tensor | None, mode: ShownMode, *, offload_to_cpu: bool) -> None:
        self.group = group
        self.views: dict[str, Tensor] = {}  # the full parameters, by name
        self._grads: list[Tensor | None] = []
        self._saved: Tensor | None = None
        unit = group.unit
        unit.shown_mode = mode
        if full is None:
            return
        resident = group.resident_buffer
        is_resident = resident is not None and _address(full) == _address(resident)
        if offload_to_cpu:
            full = full.cpu()
        if is_resident:
            self._saved = full.clone()
        group.form = _ShownForm(group.form, full, mode)
        unit.shows_logical_state = True
        self.views = _views(group, full)
        unset_shard_class(group)
        for shard, view in zip(group.shards, self.views.values(), strict=True):
            self._grads.append(shard.grad)
            shard.grad = None
            shard.data = view

    def problems(self) -> list[str]:
        """Describe changes made inside that cannot be kept. Values set by ``p.data = ...`` can be kept."""
        found = []
        present = {id(p) for owner in self.group.unit.owners for p in owner.parameters.values() if p is not None}
        for shard, (name, view) in zip(self.group.shards, self.views.items(), strict=False):
            if id(shard) not in present:
                found.append(f"parameter {name!r} was replaced by another object")
            elif shard.shape != view.shape or shard.dtype != view.dtype:
                found.append(
                    f"parameter {name!r} became {list(shard.shape)} {shard.dtype}, from {list(view.shape)} {view.dtype}"
                )
            elif shard.grad is not None:
                found.append(f"a gradient for {name!r} arrived inside")
        return found

    @torch.no_grad()
    def close(self, *, keeps: bool) -> None:
        """Point the parameters at their shards again; :attr:`views` keep the full parameters, with changes."""
        group = self.group
        for shard, view in zip(group.shards, self.views.values(), strict=False):
            if shard.data_ptr() != view.data_ptr() and shard.shape == view.shape:
                view.copy_(shard.data)
        if group.resident_buffer is not None and self._saved is not None and not keeps:
            group.resident_buffer.copy_(self._saved)
        for shard, grad, view in zip(group.shards, self._grads, group.views, strict=False):
            shard.grad = None
            shard.data = view
            shard.grad = grad
        set_shard_class([group])
        if isinstance(group.form, _ShownForm):
            group.form = group.form.inner


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
