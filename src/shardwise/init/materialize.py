"""Gives values to a model that was built on ``meta``, one unit at a time.

============================  ======================================================================================
source                        where values come from
============================  ======================================================================================
:class:`FromRecording`        the recorded construction, replayed (``sw.deferred_init``)
:class:`FromInit`             a function called with each module that owns meta tensors, or its ``reset_parameters``
:class:`FromLater`            a state dict on rank 0, files of which every rank reads its own ranges, or what the caller
                              loads: once the units are there, so that a rank holds its shards only
============================  ======================================================================================

Every rank draws the same random numbers on the CPU, so the values do not depend on the number of ranks. A tensor that
would stay without values, buffers that are not saved included, is refused by name.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.base import Comm
from shardwise.comm.control import agree, check_same
from shardwise.comm.digest import digest_of
from shardwise.comm.dtype import dtype_name
from shardwise.engine.build import OwnedParameter
from shardwise.init.deferred import Recording, take_recording
from shardwise.spec.errors import StateError
from shardwise.spec.extent import Extent

#: Initialises the parameters and buffers that a module owns directly.
Init = Callable[[nn.Module], None]


@runtime_checkable
class Weights(Protocol):
    """Tensors on disk, of which any range can be read.

    Attributes:
        digest: Equal on two ranks that see the same files.
    """

    @property
    def digest(self) -> bytes: ...  # noqa: D102

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def read(self, pairs: Iterable[tuple[Extent, Tensor]]) -> None:
        """Fill flat targets with their ranges."""
        ...


#: What ``sw.parallelize`` takes as ``init``.
Given = Init | Mapping[str, Tensor] | Weights


class Source(ABC):
    """Where the values of meta tensors come from. Values are made on the CPU."""

    @abstractmethod
    def agree(self, comm: Comm, mode: str) -> None:
        """See to it that every rank will make the same values.

        Collective:
            An all-gather of a few bytes; where seeds differ and ``mode`` is not ``"error"``, a broadcast of rank 0's
            generator states. All ranks must call.
        """

    @abstractmethod
    def parameters(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """Values of meta parameters of one unit; a meta tensor for one whose value comes later."""

    def alone(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """Values of meta parameters that the engine does not hold."""
        return self.parameters(entries)

    @abstractmethod
    def buffer(self, module: nn.Module, name: str, path: str) -> Tensor:
        """Value of the meta buffer ``name`` of ``module``, which is at ``path``."""


def find_source(model: nn.Module, init: Given | None, *, is_sent: bool) -> Source | None:
    """The source for the meta tensors of ``model``; ``None`` if there are none, or if they are to be refused."""
    recording = take_recording(model)
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if init is not None and not is_meta:
        raise StateError(
            f"init was given, but no tensor of {type(model).__name__} is on the meta device: it would do nothing.\n"
            "  Build the model under torch.device('meta') or with sw.deferred_init, or leave init out."
        )
    is_untold = init is None and recording is None
    is_partly_real = any(parameter.is_meta for parameter in model.parameters()) and not all(
        parameter.is_meta for parameter in model.parameters()
    )
    if not is_meta or (is_untold and (is_sent or is_partly_real)):
        return None  # weights that somebody forgot to load must not be drawn anew: what is on meta will be refused
    unsaved = _unsaved_buffers(model)
    if isinstance(init, Mapping | Weights):
        other = FromRecording(recording) if recording is not None else FromInit(model, None, only=unsaved)
        return FromLater(other if unsaved else None, unsaved, init)
    if recording is not None and init is None:
        return FromRecording(recording)
    if init is None and (reason := _no_reset(model)) is not None:
        other = FromInit(model, None, only=unsaved) if unsaved else None
        return FromLater(other, unsaved, Missing(reason, frozenset(_saved_names(model))))
    return FromInit(model, init)


def fill_parameters(
    make: Callable[[Sequence[OwnedParameter]], Iterable[Tensor]],
    entries: Iterable[OwnedParameter],
    device: torch.device,
) -> None:
    """Give meta parameters the values that ``make`` returns for them (a method of a source). The objects stay.

    A value on meta stands for one that comes later: the parameter gets its shape on ``device``, and no memory.
    """
    empty = [entry for entry in entries if entry.parameter.is_meta]
    for entry, value in zip(empty, make(empty) if empty else (), strict=True):
        _become(entry.parameter, _without_memory(value, device) if value.is_meta else value.to(device))


def _without_memory(like: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _become(held: nn.Parameter, value: Tensor) -> None:
    real = nn.Parameter(value, requires_grad=held.requires_grad)
    real.__dict__.update(held.__dict__)
    torch.utils.swap_tensors(held, real)


def fill_buffers(model: nn.Module, source: Source, device: torch.device) -> None:
    """Give every meta buffer its value."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the meta tensor, so that its id stays its own
    for path, module in model.named_modules():
        for name, buffer in torch_private.buffers_of(module).items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = buffer, source.buffer(module, name, path).to(device)
            torch_private.buffers_of(module)[name] = made[id(buffer)][1]


class FromRecording(Source):
    """Replays the construction."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def agree(self, comm: Comm, mode: str) -> None:
        """As :meth:`Source.agree`."""
        number = int.from_bytes(self._recording.fingerprint()[:7])
        check_same(
            comm,
            number,
            "the ranks recorded different constructions of the model",
            "Build the same model, in the same way, on every rank.",
        )
        _agree_on_states(self._recording.states, comm, mode)

    def parameters(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """As :meth:`Source.parameters`."""
        return self._recording.materialize([entry.parameter.data for entry in entries])

    def buffer(self, module: nn.Module, name: str, path: str) -> Tensor:
        """As :meth:`Source.buffer`."""
        del path
        buffer = torch_private.buffers_of(module)[name]
        assert buffer is not None
        return self._recording.materialize([buffer])[0]


class FromInit(Source):
    """Calls a function with each module that owns meta tensors, in the order of ``model.modules()``.

    The values of a module are needed when its unit's turn comes, which is another order: in which state each module
    finds the generator is found out first, by initialising them one after the other and keeping nothing.

    A module always initialises all that it owned on meta, in its shape of then, whatever has become of that: how far it
    draws depends on it, and what has its values must not get others.
    """

    def __init__(self, model: nn.Module, init: Init | None, *, only: Collection[int] | None = None) -> None:
        self._init = init or _reset
        self._paths = {
            module: path
            for path, module in model.named_modules()
            if any(only is None or id(tensor) in only for tensor in _meta_tensors(module).values())
        }
        self._only = only
        self._owned = {module: _meta_tensors(module) for module in self._paths}
        self._forms = {id(t): torch.empty_like(t) for owned in self._owned.values() for t in owned.values()}
        self._states: dict[nn.Module, Tensor] = {}
        self._fills: dict[nn.Module, set[int]] = {}  # ids of the tensors to which a module gives values

    def agree(self, comm: Comm, mode: str) -> None:
        """As :meth:`Source.agree`."""
        start = torch.get_rng_state()
        own = start.clone()
        _agree_on_states([start], comm, mode)
        torch.set_rng_state(start)
        for module in self._paths:
            self._states[module] = torch.get_rng_state()
            self._fills[module] = self._filled_by(module)
        self._check_filled()
        if not torch.equal(start, own):
            torch.set_rng_state(own)  # it drew what rank 0 would draw

    def parameters(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """As :meth:`Source.parameters`."""
        wanted = {id(entry.parameter): entry.parameter for entry in entries}
        values: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            for module in self._paths:
                given = wanted.keys() & self._fills[module]
                if given:
                    torch.set_rng_state(self._states[module])
                    values |= {key: value for key, value in self._initialised(module).items() if key in given}
        return [values[id(entry.parameter)] for entry in entries]

    def buffer(self, module: nn.Module, name: str, path: str) -> Tensor:
        """As :meth:`Source.buffer`."""
        del path
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._states[module])
            return self._initialised(module)[id(torch_private.buffers_of(module)[name])]

    def _check_filled(self) -> None:
        """Every tensor gets its values from a module that owns it; a tied one may get them from one of several."""
        filled = set().union(*self._fills.values())
        for module in self._paths:
            for name, tensor in self._owned[module].items():
                if id(tensor) not in filled and (self._only is None or id(tensor) in self._only):
                    raise self._unfilled(module, name)

    def _filled_by(self, module: nn.Module) -> set[int]:
        """Initialise ``module`` and keep nothing; returns the ids of the tensors that have all their values from it.

        What was there before must not show: NaN tells for floating point, and where that is no answer the module is
        initialised once more on another filling, which must give the same.
        """
        first = self._initialised(module)
        if all(value.is_floating_point() and not value.isnan().any() for value in first.values()):
            return set(first)
        after = torch.get_rng_state()
        torch.set_rng_state(self._states[module])
        second = self._initialised(module, is_second=True)
        torch.set_rng_state(after)
        return {key for key, one in first.items() if _is_same(one, second[key])}

    def _initialised(self, module: nn.Module, *, is_second: bool = False) -> dict[int, Tensor]:
        """Values of the meta tensors that ``module`` owned, by ``id``; the module itself is left as it was."""
        held = self._owned[module]
        if self._init is _reset and not callable(getattr(module, "reset_parameters", None)):
            raise self._unfilled(module, next(iter(held)))
        parameters: dict[str, Any] = torch_private.parameters_of(module)
        buffers: dict[str, Any] = torch_private.buffers_of(module)
        tables = {name: parameters if name in parameters else buffers for name in held}
        before = {name: table[name] for name, table in tables.items()}
        try:
            for name, tensor in held.items():
                blank = _blank(self._forms[id(tensor)], is_second=is_second)
                is_parameter = tables[name] is parameters
                tables[name][name] = nn.Parameter(blank, requires_grad=tensor.requires_grad) if is_parameter else blank
            self._init(module)
            return {id(tensor): tables[name][name].detach() for name, tensor in held.items()}
        finally:
            for name, tensor in before.items():
                tables[name][name] = tensor

    def _unfilled(self, module: nn.Module, name: str) -> StateError:
        path = self._paths[module]
        how = (
            f"{type(module).__name__}.reset_parameters() does not fill it"
            if self._init is _reset
            else f"init({type(module).__name__}) did not fill it"
        )
        if self._init is _reset and not hasattr(module, "reset_parameters"):
            how = f"{type(module).__name__} has no reset_parameters()"
        return StateError(
            f"{(f'{path}.{name}' if path else name)!r} is on the meta device and would stay without values: {how}.\n"
            "  Build the model with sw.deferred_init(build_model), or pass sw.parallelize(..., init=...): a function"
            " that initialises what a module owns, or a state dict."
        )


@dataclass(frozen=True)
class Missing:
    """The tensors that stay without values until the caller loads them.

    Attributes:
        reason: Why they are not initialised.
        names: All names of each of them.
    """

    reason: str
    names: frozenset[frozenset[str]]


class FromLater(Source):
    """Leaves parameters empty, to be loaded once a rank holds no more than its shards."""

    def __init__(
        self, other: Source | None, unsaved: Collection[int], given: Mapping[str, Tensor] | Weights | Missing
    ) -> None:
        self.given = given
        self._other, self._unsaved = other, unsaved
        self._files = given if isinstance(given, Weights) and not isinstance(given, Mapping) else None

    def check(self, names: Iterable[str]) -> None:
        """Refuse parameters without values, ``names``, that the files do not hold.

        Raises:
            StateError: One is missing.
        """
        if self._files is None:
            return
        missing = [name for name in names if name not in self._files]
        if missing:
            raise StateError(
                f"init holds no values for {missing[0]!r}"
                + (f" and {len(missing) - 1} more parameters" if len(missing) > 1 else "")
                + ", which are on the meta device.\n  Give files of this very model, or build those parts on the CPU."
            )

    def agree(self, comm: Comm, mode: str) -> None:
        """As :meth:`Source.agree`; random numbers matter for buffers that are not saved only."""
        if self._files is not None:
            check_same(
                comm,
                int.from_bytes(self._files.digest[:7]),
                "the ranks see different files of weights",
                "Give every rank a copy of the same folder.",
            )
        if self._other is not None:
            self._other.agree(comm, mode)

    def parameters(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """Shapes: neither memory nor values."""
        return [entry.parameter.data for entry in entries]

    def alone(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """The whole values, where there are files; else memory without values."""
        if self._files is None:
            return [torch.empty_like(entry.parameter, device="cpu") for entry in entries]
        return [_read(self._files, entry.names[0], entry.parameter) for entry in entries]

    def buffer(self, module: nn.Module, name: str, path: str) -> Tensor:
        """As :meth:`Source.buffer`; for a buffer that is saved and not in files, memory without values."""
        buffer = torch_private.buffers_of(module)[name]
        assert buffer is not None
        if self._other is not None and id(buffer) in self._unsaved:
            return self._other.buffer(module, name, path)
        if self._files is not None:
            return _read(self._files, f"{path}.{name}" if path else name, buffer)
        return torch.zeros_like(buffer, device="cpu")


def _read(files: Weights, name: str, like: Tensor) -> Tensor:
    value = torch.empty(like.shape, dtype=like.dtype)
    files.read([(Extent(name, tuple(like.shape), dtype_name(like.dtype), 0, like.numel()), value.view(-1))])
    return value


def _no_reset(model: nn.Module) -> str | None:
    """Which module with meta tensors that are saved cannot initialise them; ``None``: all of them can."""
    unsaved = _unsaved_buffers(model)
    for path, module in model.named_modules():
        owned = {name: tensor for name, tensor in _meta_tensors(module).items() if id(tensor) not in unsaved}
        if owned and not callable(getattr(module, "reset_parameters", None)):
            name = next(iter(owned))
            return f"{type(module).__name__} has no reset_parameters() ({(f'{path}.{name}' if path else name)!r})"
    return None


def _saved_names(model: nn.Module) -> list[frozenset[str]]:
    """All names of every meta tensor that a state dict holds."""
    unsaved = _unsaved_buffers(model)
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _meta_tensors(module).items():
            if id(tensor) not in unsaved:
                found.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    return [frozenset(names) for names in found.values()]


def _unsaved_buffers(model: nn.Module) -> set[int]:
    """Ids of the meta buffers that a state dict does not hold."""
    saved: set[int] = set()
    found: set[int] = set()
    for module in model.modules():
        for name, buffer in torch_private.buffers_of(module).items():
            if buffer is not None and buffer.is_meta:
                (saved if torch_private.is_persistent(module, name) else found).add(id(buffer))
    return found - saved


def _is_same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _agree_on_states(states: Sequence[Tensor], comm: Comm, mode: str) -> None:
    """Have generator states equal rank 0's, in place."""
    numbers = agree(comm, int(digest_of(states)[0]) if states else 0)
    if len(set(numbers)) == 1:
        return
    if mode == "error":
        raise StateError(
            "the ranks would draw different weights: their generators differ.\n"
            "  Call torch.manual_seed with one number on every rank before building the model."
        )
    for state in states:
        moved = state.to(comm.device)
        comm.broadcast(moved, root=0, unit="generator").wait()
        state.copy_(moved)
    if comm.rank == 0:
        warnings.warn(
            "the ranks would have drawn different weights; rank 0's are taken by all. Seed every rank alike to avoid"
            " this.",
            stacklevel=4,
        )


def _reset(module: nn.Module) -> None:
    reset: Any = module.reset_parameters
    reset()


def _meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    tables = (torch_private.parameters_of(module), torch_private.buffers_of(module))
    return {name: held for table in tables for name, held in table.items() if held is not None and held.is_meta}


def _blank(tensor: Tensor, *, is_second: bool) -> Tensor:
    """Memory to be written: NaN, or where there is none the smallest value; a second time the largest."""
    blank = torch.empty_like(tensor, device="cpu").detach()
    if tensor.is_floating_point() or tensor.is_complex():
        return blank.fill_(0.0 if is_second else float("nan"))
    if tensor.dtype is torch.bool:
        return blank.fill_(is_second)
    bounds = torch.iinfo(tensor.dtype)
    return blank.fill_(bounds.max if is_second else bounds.min)
