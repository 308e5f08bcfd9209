"""Builds a model without memory: every operation of its construction is recorded on ``meta`` and replayed later.

A replay gives, to the last bit, the values of plain construction under the same seed. It can be done for a few tensors
at a time: only the operations that their values come from are run. On ``meta`` nothing is drawn, yet a replayed random
operation must draw the numbers of its place in the whole construction. So every random operation is run once at the end
of the recording, on scratch memory, to find the generator state before it. The states are kept (5 kB each), and the
generator ends where plain construction would have left it.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from shardwise import torch_private
from shardwise.spec.errors import StateError
from shardwise.spec.text import first_line

#: Initialisers of ``torch.nn.init`` that do nothing on meta. Each is recorded as one operation.
_SKIPPED_ON_META = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")
#: Random operations whose draws depend on values that the scratch run does not have.
_VALUE_DEPENDENT = ("_standard_gamma", "_sample_dirichlet", "binomial", "poisson", "multinomial")
_KEY = "_shardwise_recording"


@dataclass(frozen=True)
class _View:
    """A tensor as a view of a recorded storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        identity = torch_private.storage_identity(tensor)
        size = tensor.untyped_storage().nbytes()
        offset = int(tensor.storage_offset())
        return cls(identity, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, size)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)  # pyrefly: ignore

    def scratch(self) -> Tensor:
        return self.on(torch.empty(self.storage_bytes, dtype=torch.uint8).untyped_storage())


@dataclass
class _Operation:
    """One recorded operation; tensors among its arguments are views, or constants with their values."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: tuple[_View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    generator: torch.Generator | None  # of a random operation
    state: Tensor | None = None  # in which it finds the generator

    def run(self, resolve: Callable[[_View], Tensor]) -> list[Any]:
        """Run it for real on the CPU; returns the outputs, flat."""

        def real(value: Any) -> Any:
            if isinstance(value, _View):
                return resolve(value)
            return value.clone() if isinstance(value, Tensor) else value

        args, kwargs = (tree_map(real, held, is_leaf=_is_view) for held in (self.args, self.kwargs))
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = torch.device("cpu")
        with torch.no_grad():
            return list(tree_iter(self.function(*args, **kwargs)))


@dataclass
class Recording:
    """What :func:`deferred_init` has recorded."""

    operations: list[_Operation] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # so that no storage's identity is used again

    def materialize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of meta ``tensors`` of the recorded model, on the CPU, in memory of their own."""
        targets = [_View.of(tensor) for tensor in tensors]
        storages: dict[int, torch.UntypedStorage] = {}

        def resolve(view: _View) -> Tensor:
            if view.storage not in storages:
                raise StateError("a tensor of the model was not made while its construction was recorded.")
            return view.on(storages[view.storage])

        states: dict[torch.Generator, Tensor] = {}
        try:
            for operation in self._needed({view.storage for view in targets}):
                if operation.generator is not None:
                    assert operation.state is not None
                    states.setdefault(operation.generator, operation.generator.get_state())
                    operation.generator.set_state(operation.state)
                for view, output in zip(operation.outputs, operation.run(resolve), strict=True):
                    if view is not None and view.storage not in storages:
                        storages[view.storage] = _as_recorded(output, view).untyped_storage()
        finally:
            for generator, state in states.items():
                generator.set_state(state)
        return [resolve(view).clone(memory_format=torch.preserve_format) for view in targets]

    def _needed(self, storages: set[int]) -> list[_Operation]:
        """The operations that the final content of ``storages`` comes from, in order."""
        needed, found = set(storages), []
        for operation in reversed(self.operations):
            if not needed.isdisjoint(operation.writes):
                found.append(operation)
                needed |= operation.reads
        return found[::-1]

    def find_states(self) -> None:
        """Run every random operation once, on scratch memory; the generators advance as in plain construction."""
        for operation in self.operations:
            if operation.generator is None:
                continue
            if operation.state is not None:
                operation.generator.set_state(operation.state)  # somebody seeded it just before
            operation.state = operation.generator.get_state()
            operation.run(_View.scratch)

    @property
    def states(self) -> list[Tensor]:
        """The generator's state before each random operation, in order."""
        return [operation.state for operation in self.operations if operation.state is not None]

    def fingerprint(self) -> bytes:
        """16 bytes that are equal on two ranks exactly when they recorded the same construction, seeds aside."""
        state = hashlib.blake2b(digest_size=16)
        numbers: dict[int, int] = {}
        for operation in self.operations:
            state.update(_name(operation.function).encode())
            for value in tree_iter((operation.args, operation.kwargs, operation.outputs), is_leaf=_is_view):
                if isinstance(value, _View):
                    number = numbers.setdefault(value.storage, len(numbers))
                    value = (number, value.shape, value.stride, value.offset, value.dtype)  # noqa: PLW2901
                if isinstance(value, Tensor):
                    value = value.tolist()  # noqa: PLW2901 - a constant
                if not isinstance(value, torch.Generator):
                    state.update(repr(value).encode())
        return state.digest()


def deferred_init(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on ``meta``, without memory, and record how its values are computed.

    ``sw.parallelize`` then computes the values unit by unit, so that a rank never holds more than one whole unit
    besides its shards. The values equal, to the last bit, those of plain construction on the CPU under the same seed,
    whatever the number of ranks, and torch's generator ends in the same state.

    Args:
        build_model: Builds the model; it may compute anything on the CPU.

    Returns:
        The model, on meta.

    Raises:
        StateError: The construction reads values (``.item()``, ``if`` on a tensor, shapes that depend on values), or
            draws numbers in a way that cannot be repeated in part. The operation and the line are named.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> deferred_init(lambda: nn.Linear(3, 4)).weight.is_meta
        True
    """
    recorder = _Recorder()
    with _composites(recorder), recorder:
        model = build_model()
    recorder.recording.find_states()
    model.__dict__[_KEY] = recorder.recording
    return model


def take_recording(model: nn.Module) -> Recording | None:
    """The recording of a model that :func:`deferred_init` has built, which then forgets it."""
    return model.__dict__.pop(_KEY, None)


class _Recorder(TorchDispatchMode):
    """Runs every operation on meta, and writes it down. Operations on constants alone are simply run."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._known: set[int] = set()
        self._seen_states: dict[torch.Generator, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if tensors and not is_random and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)  # a constant made of constants
        name = _name(func)
        if any(part in name for part in _VALUE_DEPENDENT):
            raise _refusal(name, "what it draws depends on values")
        if "_local_scalar_dense" in name or torch.Tag.dynamic_output_shape in func.tags:
            raise _refusal(name, "it needs values")
        generator = (kwargs.get("generator") or torch.default_generator) if is_random else None
        arguments = self._on_meta(args), self._on_meta(kwargs)
        try:
            result = func(*arguments[0], **arguments[1])
        except (RuntimeError, NotImplementedError) as error:
            raise _refusal(name, first_line(error)) from error
        mutated = _mutated(func, args, kwargs)
        if any(not tensor.is_meta for tensor in mutated):
            raise _refusal(name, "it changes a tensor whose values were given")
        self.write(func, args, kwargs, result, mutated, generator)
        return result

    def write(  # noqa: PLR0917 - what an operation consists of
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        mutated: Collection[Tensor],
        generator: torch.Generator | None,
    ) -> None:
        """Note an operation."""
        recorded = tuple(tree_map(_recorded, held) for held in (args, kwargs))
        outputs = tuple(_View.of(out) if isinstance(out, Tensor) else None for out in tree_iter(result))
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, Tensor) and torch_private.storage_identity(tensor) not in self._known:
                self._known.add(torch_private.storage_identity(tensor))
                self.recording.held.append(tensor.detach())
        reads = frozenset(v.storage for v in tree_iter(recorded, is_leaf=_is_view) if isinstance(v, _View))
        made = {view.storage for view in outputs if view is not None} - reads
        writes = frozenset(made | {torch_private.storage_identity(tensor) for tensor in mutated})
        if not writes:
            return  # a view: later operations name the storage
        operation = _Operation(function, recorded[0], recorded[1], outputs, reads, writes, generator)
        if generator is not None:
            operation.state = self._seeded(generator)
        self.recording.operations.append(operation)

    def _seeded(self, generator: torch.Generator) -> Tensor | None:
        """The generator's state where somebody set it since the last random operation (nothing is drawn on meta)."""
        state, last = generator.get_state(), self._seen_states.get(generator)
        self._seen_states[generator] = state
        return None if last is not None and torch.equal(state, last) else state

    @staticmethod
    def _on_meta(held: Any) -> Any:
        def move(value: Any) -> Any:
            if isinstance(value, Tensor) and not value.is_meta and value.dim():
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return torch.device("meta") if isinstance(value, torch.device) else value

        moved = tree_map(move, held)
        if isinstance(moved, dict):
            moved = {key: None if key == "generator" else value for key, value in moved.items()}
            if moved.get("device", moved) is None:
                moved["device"] = torch.device("meta")
            if moved.get("pin_memory"):
                moved["pin_memory"] = False
        return moved


@contextlib.contextmanager
def _composites(recorder: _Recorder) -> Iterator[None]:
    """Have the initialisers that do nothing on meta recorded, wherever they have been imported to."""
    with contextlib.ExitStack() as stack:
        for name in _SKIPPED_ON_META:
            original = getattr(nn.init, name)
            replacement = _recorded_initialiser(recorder, original)
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is original:
                    stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def _recorded_initialiser(recorder: _Recorder, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        recorder.write(original, (tensor, *args), kwargs, tensor, [tensor], generator)
        return tensor

    return initialise


def _recorded(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _View.of(value) if value.is_meta else value.detach().clone()


def _is_view(value: Any) -> bool:
    return isinstance(value, _View)


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to, from its schema."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - operators show it under this name only
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in tree_iter(value) if isinstance(tensor, Tensor)]
    return found


def _as_recorded(output: Tensor, view: _View) -> Tensor:
    """``output`` in the strides that meta said it would have: later operations name its elements by them."""
    is_same = output.stride() == view.stride and output.storage_offset() == view.offset
    if is_same and output.untyped_storage().nbytes() >= view.storage_bytes:
        return output
    copy = view.scratch()
    return copy.copy_(output)


def _name(function: Callable[..., Any]) -> str:
    return str(function) if hasattr(function, "_schema") else function.__name__.strip("_")


def _refusal(name: str, reason: str) -> StateError:
    frames = traceback.extract_stack()
    root = torch.__path__[0]
    user = [frame for frame in frames if not frame.filename.startswith(root) and frame.filename != __file__]
    place = f"{user[-1].filename}:{user[-1].lineno} ({user[-1].line})" if user else "the constructor"
    return StateError(
        f"the construction of the model cannot be recorded: {name} at {place}: {reason}.\n"
        "  Build the model on a real device, or compute that value without tensors."
    )
