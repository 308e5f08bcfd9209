"""The elements of a model: the modules that its forward calls one after the other.

The blocks of its chains are elements, and beside them the largest modules that contain no block: embeddings, norms,
heads, dropouts. A module that contains blocks (the model itself, a decoder, a ``ModuleList``) is no element: its own
forward runs on every stage. Every stage has the elements without parameters.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.spec.errors import PlanError, StateError


def _not_installed(*_args: Any, **_kwargs: Any) -> Any:
    raise StateError("an element of another stage was to be computed: this is a bug in shardwise.")


class Lent(NamedTuple):
    """A parameter or buffer of a sketch: its name, the registry and key under which its module has it, and its forms.

    ``on_meta`` is the tensor itself. ``zeros`` is what the model's forward sees from outside of the element: zeros that
    take no memory, on the device of activations.
    """

    name: str
    registry: dict[str, Any]
    key: str
    on_meta: Tensor
    zeros: Tensor


@dataclass(eq=False)
class Element:
    """One element.

    Attributes:
        paths: Where it is registered; the first is its name.
        module: The module, or the stand-in for a module of another stage.
        sketch: Its copy without memory, on which shapes are found.
        is_block: It is a member of a chain.
        stages: The stages that have it, ascending; empty: all of them.
        forward: Computes it without the module's hooks.
        sketched: The same of the sketch.
        lent: The parameters and buffers of the sketch.
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
        """The first path."""
        return self.paths[0]

    @property
    def has_parameters(self) -> bool:
        """Whether it belongs to certain stages."""
        return self.numel > 0

    @contextlib.contextmanager
    def holding(self, *, values: bool) -> Iterator[None]:
        """Let the sketch compute with its tensors on ``meta``, or with zeros that have memory."""
        memory = {id(lent.zeros): as_real(lent.zeros) for lent in self.lent} if values else {}
        shown = [memory[id(lent.zeros)] if values else lent.on_meta for lent in self.lent]
        for lent, tensor in zip(self.lent, shown, strict=True):
            lent.registry[lent.key] = tensor
        try:
            yield
        finally:
            for lent, tensor in zip(self.lent, shown, strict=True):
                if lent.registry.get(lent.key) is tensor:
                    lent.registry[lent.key] = lent.zeros


def find_elements(model: nn.Module, blocks: Collection[str], starts: Collection[str] = ()) -> list[Element]:
    """The elements of ``model`` in the order of registration."""
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
        known = found.setdefault(id(module), Element([], module, is_block=path in outermost))
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
    """A copy of ``model`` for finding shapes: what elements hold is on ``meta`` and takes no memory.

    Everything else is copied, as a forward may write to buffers. Parameters outside of all elements become zeros.
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
    return _like(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))


def _as_zeros(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    return _like(tensor, zeros(tensor.shape, tensor.dtype, device or tensor.device))


def _like(tensor: Tensor, made: Tensor) -> Tensor:
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def zeros(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


def as_real(tensor: Tensor) -> Tensor:
    """A detached copy with memory for all elements."""
    return _like(tensor, tensor.detach().clone(memory_format=torch.contiguous_format))


def lend_zeros(model: nn.Module, elements: Iterable[Element], device: torch.device) -> None:
    """Let a sketch show zeros on the device of activations to the model's forward, which reads devices and dtypes."""
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
        for registry in (module._parameters, module._buffers):  # noqa: SLF001 - setattr would check again
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
