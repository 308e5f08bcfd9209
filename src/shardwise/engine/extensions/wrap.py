"""Choice of the modules that become units, and of the parameters that each unit owns.

Units nest: a unit owns the parameters below it that no enclosed unit owns. The model itself is always the root unit and
owns the remaining parameters, usually embeddings and heads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from shardwise import torch_private
from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm
from shardwise.engine.build import GroupKind, OwnedParameter, is_below
from shardwise.engine.extensions.precision import Policies
from shardwise.engine.storage.attachment import mark_of
from shardwise.engine.storage.ignored import NOTHING, Ignored
from shardwise.engine.storage.packed import is_quantizable
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.granularity import assign
from shardwise.spec.layout import is_dense
from shardwise.spec.module_chain import LEAST_UNITS, Mergeable, default_limit, merge
from shardwise.spec.placement import Placements
from shardwise.spec.policies import WrapByClass, WrapByName, WrapBySize, WrapPolicy, name_matcher
from shardwise.spec.quantize import Quantization
from shardwise.spec.slice import slice_of

#: Names of containers whose children are alternatives: a forward may use only some of them, and ranks may choose
#: differently. Such a container is never split, because the units that are gathered must not depend on a rank's data.
_ALTERNATIVES = re.compile(r"(^|_)(experts?|branch(es)?|paths?|routes?|adapters?|heads_by|choices?)($|_|s$)")


#: Share of a stage's parameters from which on the blocks inside it are units in its place.
_MOST = 0.8


def is_called(module: nn.Module) -> bool:
    """Whether the module can be called. Containers, and other classes without a ``forward``, only hold others."""
    return type(module).forward is not nn.Module.forward


def _is_chain(module: nn.Module) -> bool:
    """Whether the children run one after another: of lists, and of dicts with a forward or with numbers as keys."""
    if isinstance(module, nn.ModuleDict):
        return is_called(module) or all(key.isdigit() for key in module)
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _holds_alternatives(name: str, module: nn.Module) -> bool:
    """Whether a forward may use only some children: by the container's name, or in a dict by their equal class."""
    if not (name and isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))):
        return False  # the model itself may be a dict of models, each with an optimizer of its own
    is_choice = isinstance(module, nn.ModuleDict) and not _is_chain(module)
    has_one_class = len(module) > 1 and len({type(child) for child in module.children()}) == 1
    return (is_choice and has_one_class) or _ALTERNATIVES.search(name.rpartition(".")[2]) is not None


def find_units(model: nn.Module, policy: str | WrapPolicy) -> dict[str, nn.Module]:
    """Return the modules below ``model`` that become units, by qualified name in order of registration."""
    if policy == "none":
        return {}
    if policy == "auto":
        return _automatic(model)
    if isinstance(policy, WrapByClass):
        return _by_class(model, policy)
    if isinstance(policy, WrapByName):
        return _by_name(model, policy)
    if isinstance(policy, WrapBySize):
        return _by_size(model, policy)
    raise PlanError(
        f"auto_wrap_policy={policy!r} is not a policy.\n"
        "  Use 'auto', 'none', sw.wrap_by_class(...), sw.wrap_by_size(...) or sw.wrap_by_name(...)."
    )


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """The modules below the root that may be units: those with parameters that can be called, each once."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and is_called(module) and next(module.parameters(), None) is not None
    }


def _by_class(model: nn.Module, policy: WrapByClass) -> dict[str, nn.Module]:
    found = {name: module for name, module in _candidates(model).items() if policy.matches(module)}
    if not found:
        present = Counter(type(module).__name__ for module in _candidates(model).values())
        shown = ", ".join(f"{name} ({count})" for name, count in present.most_common(8)) or "none with parameters"
        raise PlanError(f"{policy} matches no module of {type(model).__name__}.\n  Classes in it: {shown}.")
    return found


def _by_name(model: nn.Module, policy: WrapByName) -> dict[str, nn.Module]:
    candidates = _candidates(model)
    found: dict[str, nn.Module] = {}
    for pattern in policy.patterns:
        matcher = name_matcher(pattern)
        hits = {name: module for name, module in candidates.items() if matcher(name)}
        if not hits:
            shown = ", ".join(list(candidates)[:8])
            raise PlanError(
                f"wrap_by_name({pattern!r}) matches no module of {type(model).__name__} that has parameters and is"
                f" called.\n  Names in it: {shown}{', ...' if len(candidates) > 8 else ''}."
            )
        twice = [name for name in hits if name in found]
        if twice:
            raise PlanError(
                f"wrap_by_name({', '.join(map(repr, policy.patterns))}): {pattern!r} overlaps an earlier pattern, both"
                f" match {twice[0]!r}.\n  Leave one of them out. Units may nest, but each is named once."
            )
        found |= hits
    return {name: module for name, module in candidates.items() if name in found}


def _by_size(model: nn.Module, policy: WrapBySize) -> dict[str, nn.Module]:
    """Choose units bottom up: a module is one if the parameters below it that are in no unit yet reach the size."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def free_parameters(module: nn.Module, name: str) -> dict[int, int]:
        free = {id(p): p.numel() for p in module.parameters(recurse=False)}
        splits = not _holds_alternatives(name, module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if splits:
                free |= free_parameters(child, path)
            else:
                free |= {id(p): p.numel() for p in child.parameters()}
        if name and id(module) not in seen and is_called(module) and sum(free.values()) >= policy.min_num_params:
            seen.add(id(module))
            found[name] = module
            return {}
        return free

    remaining = free_parameters(model, "")
    if not found and sum(remaining.values()) < policy.min_num_params:
        raise PlanError(
            f"{policy} finds no unit: {type(model).__name__} has {sum(remaining.values())} parameters in all.\n"
            "  Choose a smaller size, or auto_wrap_policy='none'."
        )
    return {name: module for name, module in _candidates(model).items() if name in found}


def chain_of(model: nn.Module, name: str) -> str | None:
    """Return the path of the chain that module ``name`` is in; ``None``: it is in none."""
    path = name.rpartition(".")[0]
    holder = model.get_submodule(path)
    return path if _is_chain(holder) and not _holds_alternatives(path, holder) else None


def _automatic(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks: those in ``_no_split_modules`` of a transformers model, else the blocks of chains."""
    names = getattr(model, "_no_split_modules", None)
    if names:
        found = {name: m for name, m in _candidates(model).items() if type(m).__name__ in set(names)}
        if found:
            return _without_nesting(model, found)
    found = {}
    _collect_chains(model, "", found, sum(_num_parameters(model)) // LEAST_UNITS)
    return found


def _without_nesting(model: nn.Module, found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop nested names: an attention in a layer that is named too (MBart), a stage around a named chain (ConvNeXt)."""
    outer = {name: {above for above in _above(name.rpartition(".")[0]) if above in found} for name in found}
    holders = set[str]().union(*(outer[name] for name in found if chain_of(model, name) is not None))
    return {name: m for name, m in found.items() if name not in holders and outer[name] <= holders}


def _collect_chains(module: nn.Module, name: str, found: dict[str, nn.Module], limit: int) -> None:
    """Add the blocks of every outermost chain. Blocks inside of it take the place of a stage above ``limit``."""
    if _holds_alternatives(name, module):
        return
    blocks = _repeated_blocks(module) if _is_chain(module) else {}
    for child_name, block in blocks.items():
        path, inner = f"{name}.{child_name}" if name else child_name, dict[str, nn.Module]()
        if (num_parameters := sum(_num_parameters(block))) > limit:
            _collect_chains(block, path, inner, limit)
        if sum(_num_parameters(*inner.values())) < _MOST * num_parameters:
            inner = {path: block}
        known = {id(each) for each in found.values()}
        found |= {path: each for path, each in inner.items() if id(each) not in known}
    for child_name, child in () if blocks else module.named_children():
        _collect_chains(child, f"{name}.{child_name}" if name else child_name, found, limit)


def _num_parameters(*modules: nn.Module) -> Iterable[int]:
    """Return the elements of each parameter below the modules."""
    return {id(p): p.numel() for module in modules for p in module.parameters()}.values()


def _repeated_blocks(chain: nn.Module) -> dict[str, nn.Module]:
    """Members with submodules and parameters whose class occurs at least twice in the chain."""
    children = {
        name: child
        for name, child in _members(chain)
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None
    }
    counts = Counter(type(child) for child in children.values())
    return {name: child for name, child in children.items() if counts[type(child)] >= 2}


def _members(holder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a chain that can be called; a container in the chain is replaced by its members."""
    for name, child in holder.named_children():
        if is_called(child):
            yield name, child
        elif not _holds_alternatives(name, child):
            yield from ((f"{name}.{path}", member) for path, member in _members(child))


def assign_parameters(
    root: nn.Module, unit_names: Iterable[str], ignored: Ignored = NOTHING
) -> dict[str, list[OwnedParameter]]:
    """Assign each parameter to the innermost unit that encloses all its uses; ``""`` is the root.

    Tied parameters are found by identity. Order within a unit is the order of registration. Parameters in ``ignored``
    are assigned to no unit.
    """
    units = sorted(unit_names, key=len)
    owned: dict[int, OwnedParameter] = {}
    paths_of: dict[int, list[str]] = {}  # a module may be registered in several places
    for path, module in root.named_modules(remove_duplicate=False):
        paths_of.setdefault(id(module), []).append(path)
        for attribute, parameter in torch_private.parameters_of(module).items():
            if parameter is None or parameter in ignored:
                continue
            entry = owned.setdefault(id(parameter), OwnedParameter(parameter))
            entry.names.append(f"{path}.{attribute}" if path else attribute)
            entry.uses.append((module, path, attribute))
    unit_at = {path: place for place, name in enumerate(units) for path in paths_of[id(root.get_submodule(name))]}
    result: dict[str, list[OwnedParameter]] = {"": [], **{name: [] for name in units}}
    for entry in owned.values():
        covering = set.intersection(
            *({unit_at[above] for above in _above(path) if above in unit_at} for _, path, _ in entry.uses)
        )
        result[units[max(covering)] if covering else ""].append(entry)
    return result


def _above(path: str) -> Iterator[str]:
    """Yield ``path`` and the paths of the enclosing modules, without the root's."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def refuse_scripted(module: nn.Module, path: str) -> None:
    """Refuse a module that torch.jit has compiled: it takes no other parameters and hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        raise StateError(
            f"{(path or type(module).__name__)!r} was compiled by torch.jit, which computes with parameters of its"
            " own.\n"
            "  Leave torch.jit.script() and trace() out; sw.ParallelPlan(compile=True) compiles units."
        )


def check_parameters(parameters: Iterable[OwnedParameter], *, allows_meta: bool = False) -> None:
    """Refuse parameters that a flat buffer cannot hold, by name."""
    by_address: dict[int, OwnedParameter] = {}
    for entry in parameters:
        parameter, name = entry.parameter, entry.names[0]
        _refuse_shared_memory(entry, by_address)
        if parameter.is_meta and not allows_meta:
            raise StateError(
                f"parameter {name!r} is on the meta device: it has no values to shard.\n"
                "  Build the model on a real device, or give the weights on rank 0 and set sync='rank0'."
            )
        for module, path, _ in entry.uses:
            refuse_scripted(module, path)
        if type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            _refuse_kind(name, parameter)
        if not is_dense(parameter.shape, parameter.stride()):
            raise StateError(
                f"parameter {name!r} has shape {list(parameter.shape)} with strides {list(parameter.stride())}: a view"
                " with holes or overlaps.\n  Replace it by nn.Parameter(p.detach().contiguous())."
            )
        existing_slice = slice_of(parameter)
        if existing_slice is not None and existing_slice.local_shape != tuple(parameter.shape):
            raise StateError(
                f"parameter {name!r} has shape {list(parameter.shape)}, but is marked as the part of shape"
                f" {list(existing_slice.local_shape)} of a tensor of shape {list(existing_slice.shape)}.\n"
                "  Mark it with the ranges that it holds (spec.slice.set_slice)."
            )
        if parameter.grad is not None:
            raise StateError(
                f"parameter {name!r} holds a gradient, which would be lost.\n"
                "  Call model.zero_grad() before sw.parallelize()."
            )
        if torch_private.has_gradient_hooks(parameter):
            raise StateError(
                f"parameter {name!r} carries a hook, which would never fire: gradients arrive on its stand-in.\n"
                "  Remove the hook, or work on .grad after backward()."
            )
        if mark_of(parameter) is not None:
            raise StateError(
                f"parameter {name!r} is sharded already.\n"
                "  Parallelize a model once; to change the plan, build it again."
            )


def _refuse_shared_memory(entry: OwnedParameter, by_address: dict[int, OwnedParameter]) -> None:
    """Refuse two parameters over the same memory, unless both are frozen: each would get values of its own."""
    address = entry.parameter.data_ptr() if entry.parameter.numel() else 0  # 0 on meta
    other = by_address.setdefault(address, entry) if address else entry
    if other is not entry and (entry.parameter.requires_grad or other.parameter.requires_grad):
        raise StateError(
            f"parameters {other.names[0]!r} and {entry.names[0]!r} are two objects over the same memory: an update of"
            " one would no longer change the other.\n"
            "  Tie weights by giving both modules the same nn.Parameter, or clone the values of one."
        )


def refuse_embeddings(parameters: Iterable[OwnedParameter]) -> None:
    """Refuse embeddings whose result depends on all ids of a batch, where several ranks look up different ids."""
    for module, path, _ in (use for entry in parameters for use in entry.uses):
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.scale_grad_by_freq:
            raise StateError(
                f"{path!r} has scale_grad_by_freq=True: its gradient is divided by how often an id is in the batch, and"
                " each rank counts the ids of its own samples only.\n  Build it with scale_grad_by_freq=False."
            )
        if module.max_norm is not None:
            raise StateError(
                f"{path!r} has max_norm={module.max_norm}: its forward writes to the rows that it looks up, and each"
                " rank looks up others.\n  Build it without max_norm, and scale the rows that it gives:"
                " rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)."
            )


def _refuse_kind(name: str, parameter: nn.Parameter) -> NoReturn:
    advice = "Convert it before sw.parallelize()"
    if hasattr(parameter.data, "fsdp_pre_all_gather"):
        advice = "Leave torchao's enable_fsdp_float8_all_gather off: layers cast gathered weights themselves"
    raise StateError(
        f"parameter {name!r} is a {type(parameter.data).__name__} ({parameter.layout}); only plain, dense tensors can"
        f" be sharded.\n  {advice}."
    )


def kind_of(entry: OwnedParameter, policies: Policies, quantization: Quantization) -> GroupKind:
    """The key that a parameter must share with the others of its group."""
    existing_slice = slice_of(entry.parameter)
    return GroupKind(
        dtypes=policies.group_dtypes(entry.parameter, entry.uses),
        is_trainable=entry.parameter.requires_grad,
        frozen_as=quantization.frozen if is_quantizable(entry.parameter, entry.uses, quantization.frozen) else "none",
        is_expert=existing_slice is not None and existing_slice.is_expert,
    )


def merge_units(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    owned: Mapping[str, Sequence[OwnedParameter]],
    *,
    policies: Policies,
    quantization: Quantization,
    comm: Comm,
    limit: int | None,
) -> list[tuple[str, ...]]:
    """Merge small neighbours into units that are gathered together; returns the names in each, the root first.

    Members of one ``ModuleList`` or ``Sequential`` that enclose no other unit may be merged. Alternatives may not,
    because a rank may run only some of them.
    """
    num_bytes = {name: sum(entry.parameter.nbytes for entry in entries) for name, entries in owned.items()}
    if limit is None:
        limit = default_limit(sum(num_bytes.values()), device_type=comm.device_type, num_ranks=comm.size)
    found = []
    for name in units:
        holds_units = any(other != name and is_below(other, name) for other in units)
        kind = frozenset(kind_of(entry, policies, quantization) for entry in owned[name])
        found.append(Mergeable(name, None if holds_units else chain_of(root, name), kind, num_bytes[name]))
    return [("",), *merge(found, limit)]


#: Weight of a trained parameter, relative to a frozen one: itself, its gradient and two optimizer states.
_TRAINED_WEIGHT = 4


def assign_ranks(owned: Iterable[Sequence[OwnedParameter]], placements: Placements, comms: Comms) -> dict[int, int]:
    """Assign every parameter to one rank that stores it in full, balanced over the whole model.

    Experts that fewer ranks share are balanced separately.

    Returns:
        The rank, by ``id`` of the parameter.
    """
    if not placements.shards_optimizer:
        return {}
    parameters = [entry.parameter for entries in owned for entry in entries]
    sharded: dict[int, list[nn.Parameter]] = {}
    for p in parameters:
        if p.requires_grad or placements.shards_parameters:
            sharded.setdefault(comms.of(slice_of(p)).gather.size, []).append(p)
    ranks: dict[int, int] = {}
    for size, group in sharded.items():
        weights = [p.nbytes * (_TRAINED_WEIGHT if p.requires_grad else 1) for p in group]
        ranks |= {id(p): rank for p, rank in zip(group, assign(weights, size), strict=True)}
    return ranks
