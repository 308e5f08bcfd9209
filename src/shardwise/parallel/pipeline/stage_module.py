"""Stage modules: the modules that a model's forward calls in sequence, and their assignment to pipeline stages.

The blocks of a model's chains are stage modules, and so are the largest modules that contain no block: embeddings,
norms, heads, dropouts. A module that contains blocks (the model itself, a decoder, a ``ModuleList``) is none: its own
forward runs on every stage. Modules without parameters are on every stage. On a rank without a stage module, a
:class:`Placeholder` replaces it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardwise.engine.extensions.wrap import is_called
from shardwise.engine.storage.attachment import ROOT_KEY
from shardwise.measure.shapes import KnownShapes
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.module_chain import balance

#: Modules that are registered before a chain and called after it, by the class that has both: OPT of transformers.
_BEHIND_CHAIN = {"OPTDecoder": ("layers", ("final_layer_norm", "project_out"))}


@dataclass(eq=False)
class StageModule:
    """One stage module.

    Attributes:
        paths: Paths at which it is registered; the first is its name.
        module: The module, or the placeholder of a module of another stage.
        meta_copy: Its copy on meta, which computes shapes.
        stage: Number of its stage; ``None``: it has no parameters, and is on every stage.
        numel: Number of elements of its parameters.
    """

    paths: list[str]
    module: nn.Module
    meta_copy: nn.Module = field(init=False, repr=False)
    stage: int | None = None
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        """Count its parameters before a placeholder replaces it."""
        self.numel = sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def name(self) -> str:
        """The first of its paths."""
        return self.paths[0]

    @property
    def has_parameters(self) -> bool:
        """Whether it has parameters, and so belongs to one stage."""
        return self.numel > 0

    def copied_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers of the meta copy, by name."""
        yield from self.meta_copy.named_parameters()
        yield from self.meta_copy.named_buffers()

    def saved_state(self) -> list[Tensor]:
        """The buffers that checkpoints contain."""
        return [*self.meta_copy.state_dict(keep_vars=True).values()]

    def compute_copy(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> Any:
        """Call the meta copy with zeros for weights on ``device``; on ``meta`` this computes only shapes."""
        zeros_by_name = {name: torch.zeros(t.shape, dtype=t.dtype, device=device) for name, t in self.copied_tensors()}
        with torch.no_grad(), KnownShapes():
            return functional_call(self.meta_copy, zeros_by_name, args, dict(kwargs))


def find_stage_modules(model: nn.Module, blocks: Collection[str], starts: Collection[str]) -> list[StageModule]:
    """Find the stage modules of ``model``, in the order of registration, which is the order of stages."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        if isinstance(module, nn.TransformerEncoder) and module.enable_nested_tensor and module.use_nested_tensor:
            raise PlanError(
                f"{path!r} may make nested tensors, which pipeline stages cannot send each other.\n"
                "  Build the nn.TransformerEncoder with enable_nested_tensor=False, or set pp=1."
            )
    found_blocks = {*blocks, *(name for name in starts if name and name in modules and is_called(modules[name]))}
    if not found_blocks and isinstance(model, nn.Sequential):
        found_blocks = set(model._modules)  # noqa: SLF001 - names, in every form of Sequential
    outermost = {name for name in found_blocks if not any(name.startswith(f"{other}.") for other in found_blocks)}
    if not outermost:
        raise PlanError(
            f"{type(model).__name__} has no chain of blocks that could be divided into pipeline stages.\n"
            "  Put its blocks into a ModuleList, make the model a Sequential, or name the modules with which stages"
            " begin: PipelinePolicy(first_of_stage=...); or set pp=1."
        )
    found: dict[int, StageModule] = {}
    for path, module in _stage_paths(model, outermost):
        found.setdefault(id(module), StageModule([], module)).paths.append(path)
    return _in_order_of_calls(model, list(found.values()))


def _stage_paths(model: nn.Module, blocks: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    inside = ""
    for path, module in model.named_modules(remove_duplicate=False):
        if inside and path.startswith(f"{inside}."):
            continue
        contains_blocks = path == "" or any(block.startswith(f"{path}.") for block in blocks)
        if path in blocks or (is_called(module) and not contains_blocks):
            inside = path
            yield path, module


def _in_order_of_calls(model: nn.Module, found: list[StageModule]) -> list[StageModule]:
    for path, module in model.named_modules():
        chain, names = _BEHIND_CHAIN.get(type(module).__name__, ("", ()))
        members = [each for name in names for each in found if each.name == f"{path}.{name}"]
        if members:
            found = [each for each in found if each not in members]
            last = max(index for index, each in enumerate(found) if each.name.startswith(f"{path}.{chain}."))
            found[last + 1 : last + 1] = members
    return found


# -- assignment to stages


def assign_stages(modules: Sequence[StageModule], num_stages: int, first_of_stage: Sequence[str]) -> None:
    """Set the stage of every module that has parameters; each stage has neighbouring modules."""
    costly = [module for module in modules if module.has_parameters]
    if first_of_stage:
        starts = [0, *_starts_of_names(first_of_stage, [module.name for module in costly], num_stages)]
    else:
        starts = balance([_cost(module.module) for module in costly], num_stages)
    for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(costly)], strict=True)):
        for module in costly[start:stop]:
            module.stage = stage


def _starts_of_names(names: Sequence[str], paths: Sequence[str], num_stages: int) -> list[int]:
    unknown = [name for name in names if name not in paths]
    if unknown:
        shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        raise PlanError(f"no pipeline stage can begin at {unknown[0]!r}.\n  Stages begin at one of: {shown}.")
    starts = [paths.index(name) for name in names]
    if len(names) != num_stages - 1 or sorted(set(starts)) != starts or starts[0] == 0:
        raise PlanError(
            f"{len(names)} names of modules ({', '.join(names)}) do not begin the {num_stages} - 1 stages after the"
            " first.\n  Name the first module of every stage but the first, in the order of the model."
        )
    return starts


def _cost(module: nn.Module) -> int:
    """Estimate the multiplications per token: the number of elements of matrices, without embedding tables."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in module.parameters() if id(p) not in tables and p.dim() >= 2)


def drop_other_stages(
    model: nn.Module, modules: Iterable[StageModule], stages: Collection[int]
) -> dict[str, tuple[int, ...]]:
    """Replace the modules of other stages, with their parameters, by placeholders.

    A parameter that one of ``stages`` shares with other stages keeps all its names.

    Returns:
        By name, for every parameter of this rank that several stages share, these stages, ascending.
    """
    users_of = _stages_of_parameters(model, modules)
    kept = {key for key, users in users_of.items() if not users.isdisjoint(stages)}
    shared = {
        name: tuple(sorted(users_of[id(parameter)]))
        for name, parameter in model.named_parameters()
        if id(parameter) in kept and len(users_of[id(parameter)]) > 1
    }
    for module in modules:
        if module.stage is None or module.stage in stages:
            continue
        placeholder = Placeholder(module.module, module.meta_copy, lambda parameter: id(parameter) in kept)
        for part in (placeholder, *module.meta_copy.modules()):
            part.__dict__[ROOT_KEY] = weakref.ref(model)
        for path in module.paths:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, placeholder)
        module.module = placeholder
    return shared


def own_parameters(model: nn.Module, modules: Iterable[StageModule], stages: Collection[int]) -> set[int]:
    """Return the ``id`` of every parameter of a full model that belongs to one of ``stages``."""
    return {key for key, users in _stages_of_parameters(model, modules).items() if not users.isdisjoint(stages)}


def _stages_of_parameters(model: nn.Module, modules: Iterable[StageModule]) -> dict[int, set[int]]:
    """The stages of each parameter, by its ``id``. A parameter outside of all stage modules is on every stage."""
    found: dict[int, set[int]] = {}
    for module in modules:
        if module.stage is not None:
            for parameter in module.module.parameters():
                found.setdefault(id(parameter), set()).add(module.stage)
    every = {stage for users in found.values() for stage in users}
    return {id(parameter): found.get(id(parameter), every) for parameter in model.parameters()}


class Placeholder(nn.Module):
    """Replaces a module of another stage. Its parameters are those that this rank shares with that stage.

    Other attributes (a flag, a size), which the model's forward may read, are those of the module's meta copy.
    """

    def __init__(self, module: nn.Module, meta_copy: nn.Module, keeps: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.training = module.training
        _keep_shared(module, self, keeps)
        self.__dict__["meta_copy"] = meta_copy  # not a submodule, because its parameters are not the model's

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the meta copy."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "meta_copy" not in self.__dict__:
                raise
            return getattr(self.__dict__["meta_copy"], name)

    def __getitem__(self, key: Any) -> Any:
        """Return a member of the meta copy, if the module is a container."""
        return self.__dict__["meta_copy"][key]

    def extra_repr(self) -> str:
        """The class of the replaced module."""
        return f"{type(self.__dict__['meta_copy']).__name__} of another pipeline stage"


def _keep_shared(module: nn.Module, placeholder: nn.Module, keeps: Callable[[Tensor], bool]) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if keeps(parameter):
            placeholder.register_parameter(name, parameter)
    for name, child in module.named_children():
        if any(keeps(parameter) for parameter in child.parameters()):
            below = nn.Module()
            _keep_shared(child, below, keeps)
            placeholder.register_module(name, below)


# -- the meta copy of a model


def make_meta_copy(model: nn.Module, modules: Sequence[StageModule]) -> nn.Module:
    """Make a copy of ``model`` for finding shapes: parameters, and all tensors in stage modules, are on ``meta``.

    Other tensors are copied, because a forward may write to buffers.
    """
    inside = {id(tensor) for module in modules if module.has_parameters for tensor in _tensors_of(module.module)}
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        if isinstance(tensor, nn.Parameter) or id(tensor) in inside:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = _like(tensor, made)
        else:
            memo[id(tensor)] = tensor.detach().clone()
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise StateError(
            f"{type(model).__name__} cannot be copied, which pipeline stages need to know the shapes of each other's"
            f" activations: {type(error).__name__}: {error}\n  Remove what cannot be copied, or set pp=1."
        ) from error
    for module in modules:
        module.meta_copy = copied.get_submodule(module.name)
    return copied


def use_zeros(meta_copy: nn.Module, modules: Iterable[StageModule], device: torch.device) -> None:
    """Replace meta tensors of a meta copy by zeros on the activations' device, which forwards may read.

    The zeros have the memory of one element. Only buffers outside of all stage modules, to which a forward may write,
    are allocated.
    """
    inside = {id(tensor) for module in modules if module.has_parameters for _, tensor in module.copied_tensors()}
    made: dict[int, Tensor] = {}
    for module in meta_copy.modules():
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]  # noqa: SLF001 - setattr checks again
        for registry in registries:
            for key, tensor in registry.items():
                if tensor is not None and tensor.is_meta:
                    is_constant = id(tensor) in inside or isinstance(tensor, nn.Parameter)
                    shown = zeros(tensor, device) if is_constant else torch.zeros_like(tensor, device=device)
                    registry[key] = made.setdefault(id(tensor), _like(tensor, shown))


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """The parameters, buffers and tensors in plain attributes of a model, each once."""
    tensors = [
        tensor
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values())
        if isinstance(tensor, Tensor)
    ]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _like(tensor: Tensor, made: Tensor) -> Tensor:
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def zeros(like: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Make zeros that have the memory of one element; ``dtype`` is by default that of ``like``."""
    return torch.zeros((), dtype=dtype or like.dtype, device=device).expand(like.shape)
