"""From units to a running engine: numbers, places in the tree, slots, buffers, hooks; and units that change trees."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from torch import nn

from shardwise.comm.axes import Comms
from shardwise.engine import attach
from shardwise.engine.build import is_below
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.hooks import AfterForward, BeforeForward, eager_hook, refuse_on_shard
from shardwise.engine.options import EngineOptions
from shardwise.engine.unit import Unit
from shardwise.features import added
from shardwise.features.guard import install_guards
from shardwise.forms.inner import InnerShard
from shardwise.forms.packed import gathered_cuts, reduced_cuts
from shardwise.spec.memory.activations import eager_numel
from shardwise.spec.memory.footprint import size_class
from shardwise.spec.merge import merged_name
from shardwise.spec.placement import Placements


def start_engine(
    root: nn.Module, units: Sequence[Unit], row: Placements, comms: Comms, options: EngineOptions
) -> Engine:
    """Make the engine of ``units`` (the root first), and attach it to their modules."""
    engine = Engine(units, row, comms, options)
    _number(engine)
    _relate(units)
    _deal_slots(engine)
    for unit in units:
        unit.is_resident = not row.shards_parameters and all(group.slot is None for group in unit.groups)
        _give_buffers(engine, unit)
        _install_hooks(engine, unit)
        _link_fulls(unit)
        for member in unit.members:
            module = member.module()
            assert module is not None
            attach.attach_engine(module, engine, unit)
    install_guards(root, engine)
    added.watch(engine, root)
    return engine


def _number(engine: Engine) -> None:
    me = weakref.ref(engine)
    for index, unit in enumerate(engine.units):
        unit.index = index
        unit.engine = me


def _relate(units: Sequence[Unit]) -> None:
    """Tell every unit who is above and below it."""
    for unit in units:
        above, ancestor = set(), unit.parent
        while ancestor is not None:
            above.add(ancestor.index)
            ancestor = ancestor.parent
        unit.depth = len(above)
        unit.family = frozenset({unit.index, *above})
    for unit in units:
        below = {other.index for other in units if unit.index in other.family}
        unit.family |= below


def _deal_slots(engine: Engine) -> None:
    """Give every group its slot, and make the full parameters there."""
    slots = {group: engine.slots.hold(group.master) for group in engine.groups if group.is_alone}
    gathered = [(u, group) for u in engine.units for group in u.groups if group.uses_slot and not group.is_alone]
    together = Counter((_slot_key(unit, group), unit.recomputed_in) for unit, group in gathered)
    for (key, place), count in together.items():
        if place is not None:
            engine.slots.reserve(key, count)
    for unit, group in gathered:
        is_shared = unit.reshards_after_forward and unit.depth > 0
        slots[group] = engine.slots.assign(_slot_key(unit, group), group.layout.numel, is_shared=is_shared)
    for group in engine.groups:
        group.use_slot(slots.get(group))
    for slot in engine.slots.slots:
        slot.owner = None  # where slots are not kept, this frees them


def _slot_key(unit: Unit, group: Group) -> Hashable:
    return unit.depth, size_class(group.layout.numel), group.compute_dtype, group.is_trainable, group.is_expert


def _give_buffers(engine: Engine, unit: Unit) -> None:
    """What gathers and reductions of a unit need besides its slots."""
    for group in unit.groups:
        group.gradient.keeps_home = engine.options.keeps_buffers or group.offload is not None
        if unit.inner_size is not None:
            group.inner = InnerShard(group.gathered, group.layout, engine.comms.inner_comm(unit.inner_size))
        if group.sent_as is not None:
            group.packed_pool = engine.packed
            engine.packed.announce(gathered_cuts(group)[-1])
        if not group.layout.params:
            continue
        if group.reduced_as is not None:
            places = reduced_cuts(group)
            engine.gradients.packed.announce(places[-1])
            engine.gradients.packed.announce(group.layout.size * (places[group.rank + 1] - places[group.rank]))
        engine.gradients.announce(group.gradient.pool_key, group.reduce_layout.numel)


def _install_hooks(engine: Engine, unit: Unit) -> None:
    least = eager_numel(engine.comms.gather.device_type, keeps_buffers=engine.options.keeps_buffers)
    for group in unit.groups:
        for index, full in enumerate(group.fulls):
            if full.requires_grad and full.numel() >= least:  # torch refuses a hook on others
                hook = eager_hook(weakref.ref(engine), weakref.ref(group), index)
                engine.hooks.append(full.register_post_accumulate_grad_hook(hook))
        for index, shard in enumerate(group.shards):
            if shard.requires_grad and group.holds_part:
                refusal = refuse_on_shard(weakref.ref(group), index)
                engine.hooks.append(shard.register_post_accumulate_grad_hook(refusal))
    for member in unit.members:
        module = member.module()
        assert module is not None
        engine.hooks.append(module.register_forward_pre_hook(BeforeForward(engine, unit, member), prepend=True))
        engine.hooks.append(module.register_forward_hook(AfterForward(engine, unit, member), always_call=True))


def _link_fulls(unit: Unit) -> None:
    """Tell the unit's modules which full parameters replace their shards (after the slots were dealt out)."""
    by_shard = {id(shard): full for group in unit.groups for shard, full in zip(group.shards, group.fulls, strict=True)}
    for owner in unit.owners:
        owner.fulls = {attribute: by_shard[id(shard)] for attribute, shard in owner.shards.items()}


def move_below(path: str, places: Mapping[str, str]) -> str:
    """Where ``path`` of a model that was built by itself lies once parts of that model lie at other places.

    Args:
        path: Of a module or a parameter.
        places: The new path of each part, by its path in the model that was built by itself (``""``: all of it).
    """
    part = max((other for other in places if other == "" or is_below(path, other)), key=len)
    rest = path[len(part) :].removeprefix(".")
    return f"{places[part]}.{rest}" if rest else places[part]


def rename(unit: Unit, places: Mapping[str, str]) -> None:
    """Give a unit that was built in a model by itself the names of the model around it, as :func:`move_below`."""
    for group in unit.groups:
        params = tuple(
            dataclasses.replace(
                spec,
                name=move_below(spec.name, places),
                aliases=tuple(move_below(alias, places) for alias in spec.aliases),
            )
            for spec in group.layout.params
        )
        group.relabel(dataclasses.replace(group.layout, params=params))
    for named in (*unit.members, *unit.owners):
        named.path = move_below(named.path, places)
    unit.name = merged_name([member.path for member in unit.members])


def nest(units: Iterable[Unit]) -> list[Unit]:
    """Set every unit's parent from the paths; returns them outermost first, in order of registration."""
    units = list(units)
    for unit in units:
        above = {
            place: other for other in units if other is not unit and (place := _place_above(other, unit)) is not None
        }
        unit.parent = above[max(above, key=len)] if above else None
    return [unit for unit in units if unit.parent is None] + [unit for unit in units if unit.parent is not None]


def _place_above(outer: Unit, unit: Unit) -> str | None:
    """The path of the member of ``outer`` that ``unit``, or its first member, lies in; ``None`` if it does not."""
    paths = [member.path for member in outer.members]
    if paths == [""]:
        return ""
    if not all(any(is_below(member.path, path) for path in paths) for member in unit.members):
        return None
    return next(path for path in paths if is_below(unit.path, path))
