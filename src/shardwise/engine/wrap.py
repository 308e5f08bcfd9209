"""Applying a wrap policy: which modules of a model become units.

Units nest: a unit owns the parameters below it that no unit further down owns. The model itself is always the root unit
and owns what is left, embeddings and heads as a rule.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn

from shardwise.spec.errors import PlanError
from shardwise.spec.policies import WrapByClass, WrapByName, WrapBySize, WrapPolicy

#: Modules whose forward is never called: they only hold others.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_called(module: nn.Module) -> bool:
    """Whether the module can be called at all: containers, and classes without a ``forward``, only hold others."""
    return not isinstance(module, _CONTAINERS) and type(module).forward is not nn.Module.forward


#: Names of containers whose children are alternatives of which a forward may use some only. Ranks may choose
#: differently, so such a container is never split: what is gathered must not depend on a rank's data.
_ALTERNATIVES = re.compile(r"(^|_)(experts?|branch(es)?|paths?|routes?|adapters?|heads_by|choices?)($|_|s$)")


def find_units(model: nn.Module, policy: str | WrapPolicy) -> dict[str, nn.Module]:
    """The modules below ``model`` that become units, by qualified name in registration order, without the root.

    Args:
        model: Any module.
        policy: ``"auto"``, ``"none"``, or a policy of ``spec.policies``.

    Raises:
        PlanError: A policy that names something and finds nothing, with what it might have meant.
    """
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
        f"auto_wrap_policy={policy!r} is no policy.\n"
        "  Use 'auto', 'none', sw.wrap_by_class(...), sw.wrap_by_size(...) or sw.wrap_by_name(...)."
    )


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that may be units: called ones with parameters, each once, below the root."""
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


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """Tells whether a qualified name matches a shell pattern, in which ``*`` does not cross a dot."""
    parts = [re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]") for part in pattern.split(".")]
    expression = re.compile(r"\.".join(parts))
    return lambda name: expression.fullmatch(name) is not None


def _by_size(model: nn.Module, policy: WrapBySize) -> dict[str, nn.Module]:
    """Bottom up: a module is a unit once the parameters below it that are not in a unit yet reach the size."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def free_parameters(module: nn.Module, name: str) -> dict[int, int]:
        free = {id(p): p.numel() for p in module.parameters(recurse=False)}
        splits = not (isinstance(module, _CONTAINERS) and _ALTERNATIVES.search(name.rpartition(".")[2]))
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

    left = free_parameters(model, "")
    if not found and sum(left.values()) < policy.min_num_params:
        raise PlanError(
            f"{policy} finds no unit: {type(model).__name__} has {sum(left.values())} parameters in all.\n"
            "  Choose a smaller size, or auto_wrap_policy='none'."
        )
    return {name: module for name, module in _candidates(model).items() if name in found}


def chain_of(model: nn.Module, name: str) -> str | None:
    """The path of the chain that the module at ``name`` is a member of, where forwards run one member after another.

    ``None`` where it is in none, or in a container of alternatives.
    """
    path = name.rpartition(".")[0]
    holder = model.get_submodule(path)
    if not isinstance(holder, (nn.ModuleList, nn.Sequential)) or _ALTERNATIVES.search(path.rpartition(".")[2]):
        return None
    return path


def _automatic(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated block classes: as a transformers model names them, else the members of its outermost chains."""
    names = getattr(model, "_no_split_modules", None)
    if names:
        found = {name: m for name, m in _candidates(model).items() if type(m).__name__ in set(names)}
        if found:
            return found
    found = {}
    _collect_chains(model, "", found)
    return found


def _collect_chains(module: nn.Module, name: str, found: dict[str, nn.Module]) -> None:
    if _ALTERNATIVES.search(name.rpartition(".")[2]) and isinstance(module, (*_CONTAINERS, nn.Sequential)):
        return
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        blocks = _repeated_blocks(module)
        for child_name, block in blocks.items():
            path = f"{name}.{child_name}" if name else child_name
            if not any(block is other for other in found.values()):
                found[path] = block
        if blocks:
            return
    for child_name, child in module.named_children():
        if isinstance(child, nn.ModuleDict):
            continue  # alternatives by key
        _collect_chains(child, f"{name}.{child_name}" if name else child_name, found)


def _repeated_blocks(chain: nn.ModuleList | nn.Sequential) -> dict[str, nn.Module]:
    """Members of a class that occurs at least twice in the chain, is composed of others and has parameters."""
    children = {
        name: child
        for name, child in _members(chain)
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None
    }
    counts = Counter(type(child) for child in children.values())
    return {name: child for name, child in children.items() if counts[type(child)] >= 2}


def _members(holder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a chain that are called; a holder that is not stands for what it holds."""
    for name, child in holder.named_children():
        if is_called(child):
            yield name, child
        elif not (_ALTERNATIVES.search(name) or isinstance(child, nn.ModuleDict)):
            yield from ((f"{name}.{path}", member) for path, member in _members(child))
