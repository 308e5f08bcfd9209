"""Records on ``meta`` how tensors are initialized, and computes the values later, a few tensors at a time.

Two things are recorded: the construction of a model (:func:`deferred_init`), and the initialization that modules of a
model on ``meta`` run (``materialize``). A replay runs only the operations on which the wanted values depend. The values
equal bitwise those of a plain run with the same seed.

Random operations on ``meta`` draw nothing, but a replayed one must draw the same numbers as in a plain run. So every
random operation also runs when it is recorded, on scratch memory, and the generator's state before it is kept (5 kB
each). For an operation that needs values (``.item()``, ``if`` on a tensor, a shape that depends on values) these are
computed at once.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from shardwise import torch_private
from shardwise.nested import forgets_meta
from shardwise.spec.errors import StateError
from shardwise.torch_private import storage_identity

#: Random operations whose draws depend on values, which a scratch run does not have.
_VALUE_DEPENDENT = ("_standard_gamma", "_sample_dirichlet", "bernoulli", "binomial", "poisson", "multinomial")
#: Operations that overwrite all elements; random operations and those with ``out=`` do so too.
_OVERWRITING = ("fill_", "zero_", "copy_")
_KEY = "_shardwise_recording"


@dataclass
class _Operation:
    """One recorded operation. Tensors on meta are views of recorded memory; other tensors are constants."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: list[Any]
    reads: set[int]  # identities of storages
    writes: set[int]
    generator: torch.Generator | None  # generator of a random operation
    state: Tensor | None = None  # the generator's state before it
    default: torch.dtype = field(default_factory=torch.get_default_dtype)  # torch's default dtype when it was recorded

    def run(self, resolve: Callable[[Tensor], Tensor]) -> list[Any]:
        """Run it on the CPU with values; returns the outputs as a flat list."""

        def real(value: Any) -> Any:
            if isinstance(value, Tensor):
                return resolve(value) if value.is_meta else value.clone()
            return _on_cpu(value)

        now = torch.get_default_dtype()
        torch.set_default_dtype(self.default)
        try:
            with torch.no_grad():
                return list(tree_iter(self.function(*tree_map(real, self.args), **tree_map(real, self.kwargs))))
        finally:
            torch.set_default_dtype(now)


@dataclass
class Recording:
    """Recorded operations."""

    is_construction: bool = False  # whether the construction of the model was recorded, so that all tensors are known
    operations: list[_Operation] = field(default_factory=list)  # in order
    blank: set[int] = field(default_factory=set)  # identities of storages that had no values before the first operation
    #: Tensors that an operation has overwritten completely, by storage.
    overwritten: dict[int, list[Tensor]] = field(default_factory=dict)

    def materialize(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute the values of recorded meta ``tensors``, on the CPU, each in separate memory."""
        storages: dict[int, torch.UntypedStorage] = {}

        def resolve(tensor: Tensor) -> Tensor:
            memory = storage_identity(tensor)
            if memory not in storages:
                if memory not in self.blank:
                    raise StateError(
                        "a tensor of the model has no values that were recorded.\n"
                        "  Give it values in the function that builds the model (torch.zeros, nn.init), or build the"
                        " model without sw.deferred_init."
                    )
                storages[memory] = _scratch(tensor).untyped_storage()
            return _view_of(storages[memory], tensor)

        states: dict[torch.Generator, Tensor] = {}
        try:
            for operation in self._needed(set(map(storage_identity, tensors))):
                if operation.generator is not None:
                    assert operation.state is not None
                    states.setdefault(operation.generator, operation.generator.get_state())
                    operation.generator.set_state(operation.state)
                for recorded, output in zip(operation.outputs, operation.run(resolve), strict=True):
                    if isinstance(recorded, Tensor) and storage_identity(recorded) not in storages:
                        storages[storage_identity(recorded)] = _as_recorded(output, recorded).untyped_storage()
        finally:
            for generator, state in states.items():
                generator.set_state(state)
        return [resolve(tensor).clone(memory_format=torch.preserve_format) for tensor in tensors]

    def _needed(self, storages: set[int]) -> list[_Operation]:
        """Return the operations on which the final content of ``storages`` depends, in order."""
        needed, found = set(storages), []
        for operation in reversed(self.operations):
            if not needed.isdisjoint(operation.writes):
                found.append(operation)
                needed |= operation.reads
        return found[::-1]

    def fills(self, tensor: Tensor) -> bool:
        """Whether the recorded operations set every element of a meta ``tensor``."""
        is_filled = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.bool)
        for written in self.overwritten.get(storage_identity(tensor), ()):
            if written.itemsize == tensor.itemsize:
                is_filled.as_strided(written.shape, written.stride(), written.storage_offset()).fill_(1)
        return bool(is_filled.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).all())

    @property
    def states(self) -> list[Tensor]:
        """The generator's state before each random operation, in order."""
        return [operation.state for operation in self.operations if operation.state is not None]

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are equal on two ranks if and only if they recorded equal operations, seeds aside."""
        state = hashlib.blake2b(digest_size=16)
        numbers: dict[int, int] = {}
        for operation in self.operations:
            state.update(str(operation.function).encode())
            for value in tree_iter((operation.args, operation.kwargs, operation.outputs)):
                if isinstance(value, Tensor) and value.is_meta:
                    number = numbers.setdefault(storage_identity(value), len(numbers))
                    value = (number, value.shape, value.stride(), value.storage_offset(), value.dtype)  # noqa: PLW2901
                elif isinstance(value, Tensor):
                    value = value.tolist()  # noqa: PLW2901
                if not isinstance(value, torch.Generator):
                    state.update(repr(value).encode())
        return state.digest()


@forgets_meta()
def deferred_init(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on ``meta``, without memory, and record how its values are computed.

    ``sw.parallelize`` then computes the values unit by unit, so that a rank never stores more than one full unit in
    addition to its shards. The values equal bitwise those of plain construction on the CPU with the same seed, for any
    number of ranks, and torch's generator ends in the same state.

    Args:
        build_model: Builds the model; it may compute anything on the CPU. Values that it reads (``.item()``, ``if`` on
            a tensor) are computed at once.

    Returns:
        The model, on meta.

    Raises:
        StateError: A tensor was passed to NumPy.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> deferred_init(lambda: nn.Linear(3, 4)).weight.is_meta
        True
    """
    recording = Recording(is_construction=True)
    with recorded(recording):
        model = build_model()
    model.__dict__[_KEY] = recording
    return model


def take_recording(model: nn.Module) -> Recording | None:
    """Remove and return the recording of a model that :func:`deferred_init` has built; ``None`` for other models."""
    return model.__dict__.pop(_KEY, None)


@contextlib.contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Create new tensors on meta inside the context, and add operations on tensors on meta to ``recording``."""
    with torch_private.noticed_meta_contexts() as inside:
        given = _Given(inside)
        with _NotOnMeta(given), _Recorder(recording, given):
            yield


class _Given(dict[int, Tensor]):
    """Tensors, by storage, that the code makes in a ``with torch.device("meta")`` of its own, as ``from_pretrained``.

    They have no values in a plain run either, and draw nothing.
    """

    def __init__(self, inside: Sequence[None]) -> None:
        super().__init__()
        self._inside = inside

    def has(self, tensor: Tensor) -> bool:
        """Whether it is one of these."""
        return tensor.is_meta and storage_identity(tensor) in self

    def is_made(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments makes one."""
        return bool(self._inside) and str(kwargs.get("device")) == "meta"


class _NotOnMeta(TorchFunctionMode):
    """Makes tensors on meta behave as others in calls that dispatch no operation.

    Initializers such as ``orthogonal_`` and ``trunc_normal_`` do nothing if ``is_meta`` is true, a tensor on meta
    accepts no ``.data`` with values, and some functions read values without a dispatched operation.
    """

    def __init__(self, given: _Given) -> None:
        super().__init__()
        self._given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # pyrefly: ignore
            return func(*args) and storage_identity(args[0]) in self._given
        if self._given.is_made(kwargs or {}):
            return func(*args, **(kwargs or {}))
        if func == Tensor.data.__set__ and args[0].is_meta and not args[1].is_meta:  # pyrefly: ignore
            args = args[0], torch.empty(args[1].shape, dtype=args[1].dtype).copy_(args[1])
        if func in {Tensor.numpy, Tensor.__array__} and args[0].is_meta:
            raise StateError(
                "a tensor that has no values yet was handed to NumPy, which could write to it unseen.\n"
                "  Read it with tensor.tolist(), and write with tensor.copy_(torch.from_numpy(array))."
            )
        if func in {Tensor.__getitem__, Tensor.__setitem__} and args[0].is_meta:
            args = args[0], _with_values(args[1]), *args[2:]
        if func in {Tensor.tolist, Tensor.__format__, torch.tensor}:
            args = tree_map(_computed, args)
        if func in {torch.tensor, torch.as_tensor} and kwargs and str(kwargs.get("device")) == "meta":
            # On meta the values would be lost. transformers makes an empty tensor to find the default device.
            kwargs = kwargs if _is_empty(args[0]) else {**kwargs, "device": None}
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Runs every operation on meta and records it, except operations on constants and given tensors, which it runs."""

    def __init__(self, recording: Recording, given: _Given) -> None:
        super().__init__()
        self._recording, self._given = recording, given
        self._made: set[int] = set()  # storages that operations have made or written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        # An empty tensor gets a storage next, where torch copies a storage (deepcopy of a constant) or loads a file.
        is_blank = func is torch.ops.aten.empty.memory_format and list(args[0]) == [0]
        is_plain = bool(tensors) or is_blank or self._given.is_made(kwargs)
        if is_plain and all(not tensor.is_meta or self._given.has(tensor) for tensor in tensors):
            result = func(*args, **kwargs)
            made = (each for each in tree_iter(result) if isinstance(each, Tensor) and each.is_meta)
            self._given.update((storage_identity(each), each.detach()) for each in made)
            return result
        mutated = _mutated(func, args, kwargs)
        if not all(tensor.is_meta for tensor in mutated) or any(part in str(func) for part in _VALUE_DEPENDENT):
            return self._compute(func, args, kwargs, mutated)
        try:
            result = func(*_on_meta(args), **_on_meta(kwargs))
        except (RuntimeError, NotImplementedError):  # it needs values, or fails with values too
            return self._compute(func, args, kwargs, mutated)
        self._write(func, args, kwargs, result, mutated)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any, mutated: Sequence[Tensor]) -> Any:
        """Run an operation on values, which are computed now. Its writes to tensors on meta are recorded as copies."""
        values: dict[int, Tensor] = {}

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_meta:
                return _on_cpu(value)
            if id(value) not in values:
                values[id(value)] = self._recording.materialize([value])[0]
            return values[id(value)]

        result = func(*tree_map(real, args), **tree_map(real, kwargs))
        written = {id(values[id(tensor)]): tensor for tensor in mutated if tensor.is_meta}
        for tensor in written.values():
            self._write(torch.ops.aten.copy_.default, (tensor, values[id(tensor)]), {}, tensor, [tensor])
        return tree_map(lambda value: written.get(id(value), value), result)

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, mutated: Sequence[Tensor]) -> None:
        """Record an operation. A random one advances its generator, as in a plain run."""
        args, kwargs, outputs = (tree_map(_noted, each) for each in (args, kwargs, list(tree_iter(result))))
        reads = {storage_identity(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) and t.is_meta}
        made = [out for out in outputs if isinstance(out, Tensor) and storage_identity(out) not in reads]
        writes = set(map(storage_identity, (*made, *mutated)))
        if not writes:
            return  # a view: later operations refer to the storage
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        _, name, overload = str(func).split(".")
        overwrites = is_random or name in _OVERWRITING or overload.endswith("out")
        if overwrites:  # torch.Tensor(2, 3) allocates without a dispatched operation
            self._recording.blank |= set(map(storage_identity, mutated)) - self._made
        self._made |= writes
        filled = (*(made if "empty" not in name else ()), *(mutated if overwrites else ()))
        for tensor in filled:
            self._recording.overwritten.setdefault(storage_identity(tensor), []).append(tensor.detach())
        generator = (kwargs.get("generator") or torch.default_generator) if is_random else None
        operation = _Operation(func, args, kwargs, outputs, reads, writes, generator)
        if generator is not None:
            operation.state = generator.get_state()
            operation.run(_scratch)
        self._recording.operations.append(operation)


def _computed(value: Any) -> Any:
    """Return a recorded tensor with values, by an operation whose result's shape depends on values."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    return value.detach().masked_select(torch.ones_like(value, dtype=torch.bool)).view(value.shape)


def _with_values(index: Any) -> Any:
    """Return an index whose lists are tensors with values; torch would make them on meta."""
    if isinstance(index, tuple):
        return tuple(map(_with_values, index))
    is_list = isinstance(index, list) and all(isinstance(each, int) for each in index)
    return torch.tensor(index, dtype=None if index else torch.long) if is_list else index


def _is_empty(data: Any) -> bool:
    return isinstance(data, list | tuple) and not data


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _on_meta(arguments: Any) -> Any:
    def move(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_meta and value.dim():
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    moved = tree_map(move, arguments)
    if isinstance(moved, dict):
        moved = {key: None if key == "generator" else value for key, value in moved.items()}
        if moved.get("device", moved) is None:
            moved["device"] = torch.device("meta")
        if moved.get("pin_memory"):
            moved["pin_memory"] = False
    return moved


def _noted(value: Any) -> Any:
    """Return a snapshot of an argument or result; tensors on meta keep their storage alive, and so its identity."""
    if not isinstance(value, Tensor):
        return value
    return value.detach() if value.is_meta else value.detach().clone()


def _scratch(like: Tensor) -> Tensor:
    return _view_of(torch.empty(like.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage(), like)


def _view_of(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.size(), like.stride())


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to, by its schema."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - there is no public name
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in tree_iter(value) if isinstance(tensor, Tensor)]
    return found


def _as_recorded(output: Tensor, recorded: Tensor) -> Tensor:
    """Return ``output`` with the strides of the run on meta, which later operations use."""
    is_same = output.stride() == recorded.stride() and output.storage_offset() == recorded.storage_offset()
    if is_same and output.untyped_storage().nbytes() >= recorded.untyped_storage().nbytes():
        return output
    return _scratch(recorded).copy_(output)
