"""The elements of a model: the modules that its forward calls one after the other.

The blocks of its chains are elements, and beside them the largest modules that hold no block: embeddings, norms, heads,
dropouts. What holds blocks (the model itself, a decoder, a ``ModuleList``) is no element: its own forward is run on
every stage. An element without parameters is held by every stage.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.spec.errors import PlanError, StateError


def _not_installed(*_args: Any, **_kwargs: Any) -> Any:
    raise StateError("an element of another stage was to be computed: this is a bug in shardwise.")


@dataclass(frozen=True)
class Lent:
    """A parameter or buffer of a sketch.

    Attributes:
        name: As the element knows it.
        registry: Of the module that has it: its parameters, or its buffers.
        key: In there.
        on_meta: Itself.
        zeros: What is seen from outside of the element: zeros that take no memory, where activations are.
    """

    name: str
    registry: dict[str, Any]
    key: str
    on_meta: Tensor
    zeros: Tensor


@dataclass(eq=False)
class Element:
    """One of them.

    Attributes:
        paths: Where it is registered; the first gives it its name.
        module: Itself, or what stands for it.
        sketch: Its copy, on which shapes can be found.
        is_block: It is a member of a chain.
        stages: Those that hold it, ascending; none: all of them do.
        forward: Computes it, without the module's hooks.
        sketched: The same of the sketch.
        lent: What the sketch holds on ``meta``, and shows as zeros to whoever looks at it from outside.
    """

    paths: list[str]
    module: nn.Module
    sketch: nn.Module | None = None
    is_block: bool = False
    stages: tuple[int, ...] = ()
    forward: Callable[..., Any] = _not_installed
    sketched: Callable[..., Any] = _not_installed
    lent: list[Lent] = field(default_factory=list, repr=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        """Count its parameters while they are there."""
        self.numel = sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def name(self) -> str:
        """Where it was registered first."""
        return self.paths[0]

    @property
    def has_parameters(self) -> bool:
        """It belongs to a stage, or to several that each hold a copy."""
        return self.numel > 0

    @contextlib.contextmanager
    def on_meta(self) -> Iterator[None]:
        """Let the sketch compute shapes with what it holds on ``meta``."""
        for lent in self.lent:
            lent.registry[lent.key] = lent.on_meta
        try:
            yield
        finally:
            for lent in self.lent:
                if lent.registry.get(lent.key) is lent.on_meta:
                    lent.registry[lent.key] = lent.zeros


def find_elements(model: nn.Module, blocks: Collection[str], starts: Collection[str] = ()) -> list[Element]:
    """The elements of ``model`` in the order of registration.

    Args:
        model: Whole. The modules of one that is a ``Sequential`` itself are a chain.
        blocks: Names of the members of its chains; of those inside one another the outermost count.
        starts: Names of modules with which stages are to begin: elements, whatever they are members of.

    Raises:
        PlanError: There are no blocks.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found_blocks = {*blocks, *(name for name in starts if name and name in modules and _is_called(modules[name]))}
    if not found_blocks and isinstance(model, nn.Sequential):
        found_blocks = set(model._modules)  # noqa: SLF001 - names, in every form of Sequential
    outermost = {name for name in found_blocks if not any(name.startswith(f"{other}.") for other in found_blocks)}
    if not outermost:
        raise PlanError(
            f"{type(model).__name__} has no chain of blocks that could be divided into pipeline stages.\n"
            "  Put its blocks into a ModuleList, make the model a Sequential, or name the modules with which stages"
            " begin: PipelinePolicy(first_of_stage=...); or set pp=1."
        )
    found: dict[int, Element] = {}
    for path, module in _called(model, outermost):
        known = found.get(id(module))
        if known is None:
            known = found[id(module)] = Element([], module, is_block=path in outermost)
        known.paths.append(path)
    return list(found.values())


def _called(model: nn.Module, blocks: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    inside = ""
    for path, module in model.named_modules(remove_duplicate=False):
        if inside and path.startswith(f"{inside}."):
            continue
        holds_blocks = path == "" or any(block.startswith(f"{path}.") for block in blocks)
        if path in blocks or (_is_called(module) and not holds_blocks):
            inside = path
            yield path, module


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def sketch(model: nn.Module, elements: Iterable[Element]) -> nn.Module:
    """A copy of ``model`` on which shapes can be found: what elements hold takes no memory, it is on ``meta``.

    Everything else is a copy too, as a forward may write to buffers, but for parameters outside of all elements, which
    are zeros.

    Raises:
        StateError: The model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for element in elements:
        for tensor in _tensors_of(element.module) if element.has_parameters else ():
            memo.setdefault(id(tensor), _on_meta(tensor))
    for tensor in _tensors_of(model):
        memo.setdefault(id(tensor), _as_zeros(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().clone())
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise StateError(
            f"{type(model).__name__} cannot be copied, which pipeline stages need to know the shapes of each other's"
            f" activations: {type(error).__name__}: {error}\n  Remove what cannot be copied, or set pp=1."
        ) from error
    for element in elements:
        element.sketch = copied.get_submodule(element.name)
    return copied


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers and tensors that are plain attributes."""
    held = [
        tensor
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values())
        if isinstance(tensor, Tensor)
    ]
    return list({id(tensor): tensor for tensor in held}.values())


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty


def _as_zeros(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    zeros = torch.zeros((), dtype=tensor.dtype, device=device or tensor.device).expand(tensor.shape)
    return nn.Parameter(zeros, requires_grad=False) if isinstance(tensor, nn.Parameter) else zeros


def lend_zeros(model: nn.Module, elements: Iterable[Element], device: torch.device) -> None:
    """Let a sketch, looked at from outside of its elements, hold zeros where activations are, to compute with.

    Args:
        model: The sketch.
        elements: Those of the model.
        device: Where activations are.
    """
    lent: dict[int, Tensor] = {}
    for element in elements:
        if element.has_parameters and element.sketch is not None:
            element.lent = [
                Lent(name, registry, key, tensor, lent.setdefault(id(tensor), _as_zeros(tensor, device)))
                for name, registry, key, tensor in _registered(element.sketch)
                if tensor.is_meta
            ]
    own = {id(found.registry) for element in elements for found in element.lent}
    for _, registry, key, tensor in _registered(model):
        if tensor.is_meta and device.type != "meta" and id(registry) not in own:
            is_parameter = isinstance(tensor, nn.Parameter)
            registry[key] = _as_zeros(tensor, device) if is_parameter else torch.zeros_like(tensor, device=device)
    for element in elements:
        for found in element.lent:
            found.registry[found.key] = found.zeros


def _registered(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    for path, module in model.named_modules():
        for registry in (module._parameters, module._buffers):  # noqa: SLF001 - what setattr would check, has been
            for key, tensor in registry.items():
                if tensor is not None:
                    yield f"{path}.{key}" if path else key, registry, key, tensor


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's forward as it is now, by a weak reference to the module."""
    own = module.__dict__.get("forward")
    if own is not None:
        return own
    reference, function = weakref.ref(module), type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    return forward
