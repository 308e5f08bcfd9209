"""A parallelized model's weights: as the plain model's state dict on rank 0, and as the ranges of checkpoints.

A module may customize its ``state_dict`` with hooks that rename, and extra state. So every pipeline stage runs torch's
``state_dict()`` on its modules, and later stages send rank 0 a list of their entries: names of gathered tensors, and
other values as JSON.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.buffers import saved_dtypes
from shardwise.engine.storage.ignored import ignored_of
from shardwise.spec.errors import StateError
from shardwise.spec.extent import Extent
from shardwise.weights.state.extents import (
    Pairs,
    RankMetadata,
    Targets,
    gather_metadata,
    gather_ranges,
    refuse_gaps,
    scatter_ranges,
)
from shardwise.weights.state.stored_ranges import (
    BUFFER,
    gather_order,
    gathered_pieces,
    is_first_of_stage,
    make_extent,
    of_group,
    of_sliced,
    of_tensor,
    owned_pieces,
    pairs_of,
    persistent_buffers,
    sliced_parameters,
)

#: Suffix of the keys of extra state in state dicts.
EXTRA_STATE = "_extra_state"
#: Prefix of the names under which later pipeline stages send tensors that are not parameters.
_STAGE = "stage/"

# -- full state dicts


def full_state_dict(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Any]:
    """Return the plain model's ``state_dict()``: its keys, shapes and dtypes, tied names and buffers, on the CPU.

    Shards, slices and pipeline stages are joined: the result is that of the full model on every mesh.

    Args:
        model: A parallelized model.
        trainable_only: Leave out parameters that require no gradient (as torch's ``ignore_frozen_params`` does), such
            as the base model of adapters; frozen parameters are not gathered.

    Returns:
        The state dict on rank 0 of the world, ``{}`` on other ranks.

    Collective:
        A gather of JSON (about 100 bytes for each range of a parameter that a rank owns) and a broadcast of a verdict,
        then one message to rank 0 for each range: every element is sent once. Nothing is sent for parameters that rank
        0 stores in full. In addition to the result, rank 0 stores one range at a time. All ranks must call.

    Raises:
        StateError: Modules of a later stage have extra state that JSON cannot represent, or the ranks do not store full
            tensors; on every rank.
    """
    engine = engine_of(model, "sw.full_state_dict")
    engine.need_values("sw.full_state_dict()")
    engine.apply_user_changes()
    engine.sync_buffers()
    world = engine.comms.world
    entries, tensors = _stage_entries(model, engine)
    tensors = _not_of_earlier_stages(tensors, engine)

    def is_chosen(parameter: nn.Parameter) -> bool:
        return parameter.requires_grad or not trainable_only

    groups = [(group, gathered_pieces(engine, group)) for group in gather_order(engine)]
    stored_ranges = [
        of_group(group, chosen)
        for group, pieces in groups
        if (chosen := [piece for piece in pieces if is_chosen(group.shards[piece.index])])
    ]
    stored_ranges += of_sliced(engine, lambda parameter, part: part.is_counted and is_chosen(parameter))
    stored_ranges += [of_tensor(f"{_STAGE}{key}", tensor, copies=None) for key, tensor in tensors.items()]
    metadata, _ = gather_metadata(world, stored_ranges, _refuse_partial, extra=entries)
    full = gather_ranges(world, stored_ranges, metadata)
    if world.rank > 0:
        return {}
    with _full_tensors_in(engine, _meta_stand_ins(engine, full) | full):
        state = model.state_dict()
    if trainable_only:
        frozen = {name for name, p in ignored_of(engine).parameters.items() if not p.requires_grad}
        state = {
            key: value for key, value in state.items() if key not in frozen and not getattr(value, "is_meta", False)
        }
    gathered = {tensor.untyped_storage().data_ptr() for tensor in full.values()}
    state = {key: _on_cpu(value, gathered) if isinstance(value, Tensor) else value for key, value in state.items()}
    state |= {key: state[key].to(dtype) for key, dtype in saved_dtypes(model).items() if key in state}
    state |= {name: full[name] for name in sliced_parameters(engine) if name in full}
    later = {
        key: full[item] if kind == "tensor" else item
        for rank_metadata in metadata
        for key, kind, item in rank_metadata.extra
        if kind == "value" or item in full
    }
    state = _in_module_order(model, later | state) if later else state
    if engine.comms.ep is None:
        return state
    others = [name for name in full if name not in state and not name.startswith(_STAGE)]  # of experts of other ranks
    places = {name: place for place, name in enumerate(dict.fromkeys(key.rpartition(".")[2] for key in state))}
    others.sort(key=lambda name: places.get(name.rpartition(".")[2], len(places)))  # weight before bias, as in modules
    return _merge_by_path(state, {name: full[name] for name in others})


def _refuse_partial(metadata: list[RankMetadata]) -> None:
    refuse_gaps(metadata)
    opaque = [(key, name) for rank_metadata in metadata for key, kind, name in rank_metadata.extra if kind == "opaque"]
    if opaque:
        shown = "".join(f"\n  {key}: a {name}" for key, name in opaque[:12])
        raise StateError(
            f"modules of later pipeline stages have state that JSON does not hold:{shown}\n"
            "  Let get_extra_state() return numbers, strings, lists and dicts; or use sw.save()."
        )


def _stage_entries(model: nn.Module, engine: Engine) -> tuple[list[list[Any]], dict[str, Tensor]]:
    """Return the state dict entries of a later pipeline stage, and its tensors that are not parameters; else nothing.

    An entry is ``[key, "tensor", name]``, ``[key, "value", value]``, or ``[key, "opaque", type]`` if JSON cannot
    represent the value.
    """
    entries: list[list[Any]] = []
    tensors: dict[str, Tensor] = {}
    pp = engine.comms.pp
    if pp is None or pp.rank == 0 or not is_first_of_stage(engine):
        return entries, tensors
    dtypes = saved_dtypes(model)
    with _full_tensors_in(engine, _meta_stand_ins(engine, {})) as names:
        state = model.state_dict(keep_vars=True)
    names |= {id(parameter): name for name, parameter in sliced_parameters(engine).items()}
    for key, value in state.items():
        if id(value) in names:
            entries.append([key, "tensor", names[id(value)]])
        elif isinstance(value, Tensor) and not value.is_meta:
            entries.append([key, "tensor", f"{_STAGE}{key}"])
            tensors[key] = value.detach().to(dtypes.get(key, value.dtype))
        elif _is_json(value):
            entries.append([key, "value", value])
        else:
            entries.append([key, "opaque", type(value).__name__])
    return entries, tensors


def _meta_stand_ins(engine: Engine, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make stand-ins on meta for parameters that were not gathered."""
    specs = [spec for group in engine.groups for spec in group.layout.params if spec.name not in full]
    return {spec.name: torch.empty(spec.logical_shape, dtype=torch_dtype(spec.dtype), device="meta") for spec in specs}


def _on_cpu(tensor: Tensor, gathered: set[int]) -> Tensor:
    """Return ``tensor`` on the CPU, in memory that the model does not use."""
    is_live = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in gathered
    return tensor.clone() if is_live else tensor.cpu()


@contextlib.contextmanager
def _full_tensors_in(engine: Engine, full: Mapping[str, Tensor]) -> Iterator[dict[int, str]]:
    """Put full parameters into the modules, so that torch's ``state_dict()``, with its hooks, returns them.

    Yields:
        The name of each of these parameters, by its ``id``.
    """
    shown: dict[int, nn.Parameter] = {}
    names: dict[int, str] = {}
    for group in engine.groups:
        for shard, spec in zip(group.shards, group.layout.params, strict=True):
            parameter = shown[id(shard)] = nn.Parameter(full[spec.name], requires_grad=shard.requires_grad)
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
                    owner.parameters.update(owner.unsharded if member.uses_unsharded else owner.shards)


def _in_module_order(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the entries in the order of their modules, as in the plain model's ``state_dict()``."""
    places = {path: place for place, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def known(key: str) -> str:
        path = key.rpartition(".")[0]
        while path and path not in places:
            path = path.rpartition(".")[0]
        return path

    # Of these modules rank 0 has only tied parameters, so their entries keep the order of the stage that has all.
    partial = {known(key) for key in state if known(key) != key.rpartition(".")[0]} - {""}

    def place(key: str) -> int:
        parts = key.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        return places[next((path for path in above if path in partial), known(key))]

    return {key: state[key] for key in sorted(state, key=place)}


def _merge_by_path(state: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``state`` and ``more``, each new entry after those with which it shares most of its path."""
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


def _is_json(value: Any) -> bool:
    """Whether a value is unchanged after a round trip through JSON."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RuntimeError):
        return False


class Keys(NamedTuple):
    """Names that only the model or only the state dict has, as torch's ``load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Keys:
    """Load a plain model's state dict from rank 0 into every rank's shards and buffers, of every slice and stage.

    Args:
        model: A parallelized model.
        state: On rank 0 of the world the full tensors by name; not read on other ranks.
        strict: Whether to refuse missing and unexpected names.

    Returns:
        On every rank ``(missing_keys, unexpected_keys)``, as ``nn.Module.load_state_dict``, tied parameters by their
        first names; both are empty if strict.

    Collective:
        A gather of JSON (about 100 bytes for each range of a tensor on each rank), a broadcast of a verdict with the
        names and the modules' extra state, then one message from rank 0 for each range and a broadcast to the ranks
        with copies (replicas, and all data-parallel ranks if parameters are not sharded). In addition to ``state``,
        rank 0 stores one range at a time. All ranks must call.

    Raises:
        StateError: Names are missing or unexpected, shapes differ, or JSON cannot represent extra state. It is raised
            on all ranks, and nothing is loaded.
    """
    engine = engine_of(model, "sw.load_full_state_dict")
    engine.apply_user_changes()
    comms = engine.comms
    buffers = persistent_buffers(model)
    sliced = sliced_parameters(engine)
    plain_tensors = {name: p for name, p in ignored_of(engine).parameters.items() if name not in sliced} | buffers
    stored_ranges = [of_group(group) for group in gather_order(engine)]
    stored_ranges += [of_tensor(name, tensor, copies=comms.control) for name, tensor in plain_tensors.items()]
    stored_ranges += of_sliced(engine)
    aliases = {spec.name: spec.aliases for group in engine.groups for spec in group.layout.params if spec.aliases}
    metadata, (names, extra, missing, unexpected) = gather_metadata(
        comms.world, stored_ranges, lambda found: _match_names(found, state, strict=strict), [aliases, _names(model)]
    )
    values = _by_first_name(metadata, state)
    scatter_ranges(comms.world, stored_ranges, metadata, values, names)
    load_extra_state(model, extra, is_stage=comms.pp is not None)
    unfilled = engine.extras.find(Unfilled)
    if unfilled is not None:
        unfilled.fill(names)
    engine.invalidate()
    return Keys(missing, unexpected)


def _names(model: nn.Module) -> list[str]:
    """Return every name of a parameter or buffer in the modules, also of tied ones."""
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return [name for name, _ in (*parameters, *buffers)]


def _by_first_name(metadata: Sequence[RankMetadata], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict; entries under another name of a tied parameter also under its first name."""
    found = dict(state) if metadata else {}
    for rank_metadata in metadata:
        for name, aliases in rank_metadata.extra[0].items():
            value = next((state[each] for each in (name, *aliases) if each in state), None)
            if value is not None:
                found[name] = value
    return found


def _match_names(metadata: list[RankMetadata], state: Mapping[str, Any], *, strict: bool) -> list[Any]:
    """Return names and extra state of a state dict that fits the model, and the missing and unexpected names.

    Raises:
        StateError: The state dict does not fit.
    """
    expected = {extent.name: extent.shape for rank_metadata in metadata for extent in rank_metadata.extents}
    known = {*expected, *(name for rank_metadata in metadata for name in rank_metadata.extra[1])}
    known |= {alias for rank_metadata in metadata for aliases in rank_metadata.extra[0].values() for alias in aliases}
    values, extra = (
        _by_first_name(metadata, state),
        {key: each for key, each in state.items() if key.endswith(EXTRA_STATE)},
    )
    advice = _without_prefix(known, state) or "Load a state dict of this very model"
    if strict:
        advice += ", or pass strict=False to skip missing and unexpected names"
    elif state and known.isdisjoint(state):
        raise StateError(
            f"the state dict has none of the model's names: it has {next(iter(state))!r}, the model"
            f" {min(known, default=None)!r}. Nothing would be loaded.\n  {advice}."
        )
    problems = [
        f"{name}: extra state that JSON cannot hold; call set_extra_state() on every rank"
        for name, value in extra.items()
        if not _is_json(value)
    ]
    missing = [name for name in expected if values.get(name) is None]
    unexpected = [name for name in state if name not in known and not name.endswith(EXTRA_STATE)]
    for name, shape in expected.items():
        value = values.get(name)
        if value is None:
            problems += [f"{name}: missing (expected {list(shape)})"] * strict
        elif not isinstance(value, Tensor):
            problems.append(f"{name}: expected a tensor of shape {list(shape)}, got {type(value).__name__}")
        elif tuple(value.shape) != shape:
            problems.append(f"{name}: expected {list(shape)}, got {list(value.shape)}")
    problems += [f"{name}: unexpected" for name in unexpected if strict]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:12])
        more = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        differences = "1 difference" if len(problems) == 1 else f"{len(problems)} differences"
        raise StateError(f"the state dict does not fit the model ({differences}):\n{shown}{more}\n  {advice}.")
    return [[name for name in values if values[name] is not None], extra, missing, unexpected]


def _without_prefix(known: Container[str], state: Mapping[str, Any]) -> str:
    """Return advice if names have a prefix that the model's lack, such as ``module.`` of torch's DDP; else ``""``."""
    first = next(iter(state), "")
    prefixes = [first[: i + 1] for i, letter in enumerate(first) if letter == "."]
    prefix = next((each for each in prefixes if first.removeprefix(each) in known), None)
    if prefix is None or first in known:
        return ""
    return f"Load {{name.removeprefix({prefix!r}): value for name, value in state.items()}}"


def load_extra_state(model: nn.Module, state: Mapping[str, Any], *, is_stage: bool) -> None:
    """Set the extra state of every module for which ``state`` has an entry."""
    for path, module in model.named_modules():
        key = f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
        is_stand_in = is_stage and type(module).set_extra_state is nn.Module.set_extra_state
        if key in state and not is_stand_in:
            module.set_extra_state(state[key])


class Unfilled:
    """The tensors of a parallelized model that are not initialized yet; refuses calls that need their values."""

    def __init__(self, reason: str, names: Collection[frozenset[str]]) -> None:
        self._reason, self._names = reason, names

    def fill(self, names: Iterable[str]) -> None:
        """Record that tensors with these names have been loaded."""
        loaded = set(names)
        self._names = {each for each in self._names if not each & loaded}

    def attach(self, engine: Engine) -> None:
        """Attach to ``engine`` as the first guard."""
        engine.extras.add(self)
        engine.extras.guards.insert(0, self.refuse)

    def detach(self, engine: Engine) -> None:
        """Detach from ``engine``, because all values have been loaded."""
        engine.extras.remove(self)
        engine.extras.guards.remove(self.refuse)

    def refuse(self, engine: Engine, call: str) -> None:  # noqa: ARG002
        """Refuse ``call``, which needs values, if some tensors have none."""
        if self._names:
            first = min(name for each in self._names for name in each)
            raise StateError(
                f"{call}: {len(self._names)} tensors of the model were built on the meta device and have no values yet,"
                f" {first!r} among them; sw.parallelize() did not initialise them, since {self._reason}.\n"
                "  Call sw.load_full_state_dict(model, state) or sw.load(path, model) first, build the model with"
                " sw.deferred_init(build_model), or pass sw.parallelize(..., init=...): a function that initialises"
                " what a module owns, or a state dict."
            )


# -- ranges, for checkpoints


def owned_extents(model: nn.Module) -> Pairs:
    """Return the ranges that this rank writes to a checkpoint: over all ranks, every element exactly once.

    Parameters are stored under their names, buffers under ``buffer/<name>``. Of ranks with copies, the first writes; if
    all data-parallel ranks store a full parameter, each writes a part. Every tensor is a flat view of live memory: copy
    it before changing the model. Quantized weights are unpacked into new memory.

    Collective:
        With ``pp``, an all-gather of the names of buffers.
    """
    engine = engine_of(model, "sw.save")
    engine.need_values("sw.save()")
    engine.apply_user_changes()
    buffers = own_buffers(model, engine)
    if engine.comms.replica:
        return []
    found: Pairs = []
    for group in engine.groups:
        found += pairs_of(group, owned_pieces(engine, group), group.values())
    dtypes = saved_dtypes(model)
    for name, buffer in buffers.items():
        flat = buffer.detach().to(dtypes.get(name, buffer.dtype)).contiguous().view(-1)
        found.append((make_extent(f"{BUFFER}{name}", flat, buffer.shape, None), flat))
    return found


def own_buffers(model: nn.Module, engine: Engine) -> dict[str, Tensor]:
    """Return the buffers that this rank writes: those of its stage that no earlier stage has."""
    buffers = _not_of_earlier_stages(persistent_buffers(model), engine)
    return buffers if is_first_of_stage(engine) else {}


def _not_of_earlier_stages(tensors: dict[str, Tensor], engine: Engine) -> dict[str, Tensor]:
    """Return the tensors whose names no earlier rank of a pipeline has. All ranks must call."""
    if (pp := engine.comms.pp) is None:
        return tensors
    before = {name for names in all_gather_json(pp, list(tensors))[: pp.rank] for name in names}
    return {name: tensor for name, tensor in tensors.items() if name not in before}


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of this rank's parameters in the engine that require no gradient."""
    engine = engine_of(model, "sw.save")
    return {
        spec.name
        for group in engine.groups
        for spec, shard in zip(group.layout.params, group.shards, strict=True)
        if not shard.requires_grad
    }


def frozen_extents(model: nn.Module, pairs: Pairs) -> set[str]:
    """Return the names among ``pairs`` of parameters in fully frozen groups, which a checkpoint can leave out."""
    engine = engine_of(model, "sw.save")
    frozen = {spec.name for group in engine.groups if not _trains(group) for spec in group.layout.params}
    return frozen.intersection(extent.name for extent, _ in pairs)


def _trains(group: Group) -> bool:
    return any(shard.requires_grad for shard in group.shards)


def load_targets(model: nn.Module, stored: Mapping[str, Extent] | None = None, *, with_frozen: bool = True) -> Targets:
    """Return this rank's parameters and buffers as targets to load into; fully frozen groups only if asked for.

    They are the live tensors, except quantized weights and cast buffers, which ``Targets.install`` converts.
    """
    engine = engine_of(model, "sw.load")
    engine.apply_user_changes()
    groups = [group for group in engine.groups if with_frozen or _trains(group)]
    stored_ranges = [of_group(group) for group in groups]
    dtypes = saved_dtypes(model)
    stored = stored or {}
    for name, buffer in persistent_buffers(model).items():
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise StateError(
                f"buffer {name!r} of shape {list(buffer.shape)} is expanded: several of its elements are one in memory,"
                " and cannot be loaded in place.\n"
                "  Register its copy: self.register_buffer(name, tensor.contiguous())."
            )
        # An imported checkpoint has buffers without the prefix.
        key = name if name in stored and f"{BUFFER}{name}" not in stored else f"{BUFFER}{name}"
        saved = stored.get(key)
        is_as_stored = saved is not None and saved.dtype == dtype_name(buffer.dtype)
        flat = (
            buffer.detach().contiguous().view(-1).to(buffer.dtype if is_as_stored else dtypes.get(name, buffer.dtype))
        )
        stored_ranges.append(of_tensor(key, buffer, copies=None, flat=flat))
    return Targets(stored_ranges)


def load_ranges(model: nn.Module, read: Callable[[Pairs], None], names: Container[str]) -> None:
    """Replace this rank's ranges of every parameter in ``names`` by values that ``read`` writes into them.

    This works group by group, so that at most one group of packed weights (int8 blocks) is unpacked at a time. Either
    all or none of the parameters of a group must be in ``names``.
    """
    engine = engine_of(model, "sw.load")
    engine.apply_user_changes()
    for group in engine.groups:
        if group.layout.params[0].name not in names:
            continue
        targets = Targets([of_group(group)])
        with torch.no_grad():
            read(targets.extents)
        targets.install()
    engine.invalidate()
