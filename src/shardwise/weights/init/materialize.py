"""Initializes a model that was built on ``meta``, one unit at a time.

============================  ======================================================================================
source                        origin of the values
============================  ======================================================================================
:class:`Source`               a replayed recording: of the construction (``sw.deferred_init``), or of a function that
                              is called with each module that owns meta tensors, or of its ``reset_parameters``
:class:`LoadedLater`          a state dict on rank 0, files from which every rank reads its ranges, or a later load by
                              the caller: after the units are sharded, so that a rank stores only its shards
============================  ======================================================================================

Every rank draws the same random numbers on the CPU, so the values do not depend on the number of ranks. Tensors that
would stay uninitialized, including buffers that are not saved, are refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from shardwise import torch_private
from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_int, check_same
from shardwise.comm.digest import digest_of
from shardwise.comm.dtype import dtype_name
from shardwise.engine.build import OwnedParameter
from shardwise.spec.errors import StateError
from shardwise.spec.extent import Extent
from shardwise.weights.init.deferred import Recording, recorded, take_recording

#: Initializes the parameters and buffers that a module owns directly.
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
        """Fill flat tensors with the values of their extents."""
        ...


#: The types that ``sw.parallelize`` accepts as ``init``.
InitArgument = Init | Mapping[str, Tensor] | Weights


class Source:
    """The source of meta tensors' values: a recording. Values are computed on the CPU."""

    def __init__(self, recording: Recording | None) -> None:
        self._recording = recording

    def agree(self, comm: Comm, mode: str) -> None:
        """Make sure that every rank will compute the same values.

        Collective:
            An all-gather of a few bytes; if seeds differ and ``mode`` is not ``"error"``, a broadcast of rank 0's
            generator states. All ranks must call.
        """
        if self._recording is None:
            return
        check_same(
            comm,
            int.from_bytes(self._recording.fingerprint()[:7]),
            "the ranks recorded different constructions of the model",
            "Build the same model, in the same way and under the same seed, on every rank.",
        )
        _agree_on_states(self._recording.states, comm, mode)

    def parameters(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """Return the values of meta parameters of one unit; a meta tensor for a parameter that is loaded later."""
        assert self._recording is not None
        return self._recording.materialize([entry.parameter.data for entry in entries])

    def ignored(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """Return the values of meta parameters that the engine ignores."""
        return self.parameters(entries)

    def buffer(self, buffer: Tensor, name: str) -> Tensor:  # noqa: ARG002
        """Return the value of a meta buffer; ``name`` is its name in the model."""
        assert self._recording is not None
        return self._recording.materialize([buffer])[0]

    def attribute(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the value of a meta tensor in a plain attribute; the tensor itself if its construction is unknown."""
        if self._recording is None or not self._recording.is_construction:
            return tensor
        return self._recording.materialize([tensor.detach()])[0].to(device)


def find_source(model: nn.Module, init: InitArgument | None, *, is_sent: bool) -> Source | None:
    """Choose the source for the meta tensors of ``model``; ``None`` if there are none, or if they must be refused.

    ``is_sent``: rank 0 sends its weights (``sync="rank0"``).
    """
    recording = take_recording(model)
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if init is not None and not is_meta:
        raise StateError(
            f"init was given, but no tensor of {type(model).__name__} is on the meta device: it would do nothing.\n"
            "  Build the model under torch.device('meta') or with sw.deferred_init, or leave init out."
        )
    has_no_source = init is None and recording is None
    is_partly_real = any(parameter.is_meta for parameter in model.parameters()) and not all(
        parameter.is_meta for parameter in model.parameters()
    )
    if not is_meta or (has_no_source and (is_sent or is_partly_real)):
        return None  # weights that the user forgot to load must not be initialized at random: they will be refused
    unsaved = _unsaved_buffers(model)
    reason = None if init is not None or recording is not None else _no_reset(model)
    if isinstance(init, Mapping | Weights):
        later = init
    elif reason is not None:
        later = NoSource(reason, frozenset(_saved_names(model)))
    else:
        return Source(recording if recording is not None and init is None else record_init(model, init))
    if unsaved and recording is None:
        recording = record_init(model, None, only=unsaved)
    is_used = unsaved or any(_plain_attributes(module) for module in model.modules())
    return LoadedLater(recording if is_used else None, unsaved, later)


def fill_parameters(
    make: Callable[[Sequence[OwnedParameter]], Iterable[Tensor]],
    entries: Iterable[OwnedParameter],
    device: torch.device,
) -> None:
    """Give meta parameters the values that ``make`` (a method of a source) returns for them. The objects stay.

    If a value is on meta, it is loaded later: the parameter gets its shape on ``device``, without memory.
    """
    empty = [entry for entry in entries if entry.parameter.is_meta]
    for entry, value in zip(empty, make(empty) if empty else (), strict=True):
        become(entry.parameter, _without_memory(value, device) if value.is_meta else value.to(device))


def _without_memory(like: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def free_for_swaps(model: nn.Module) -> None:
    """Make :func:`become` possible for the parameters of RNNs, which refer to them weakly."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            torch_private.take_rnn_weights(module)


def become(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a value. The object stays, because an optimizer may refer to it."""
    real = nn.Parameter(value, requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def fill_buffers(model: nn.Module, make: Callable[[Tensor, str], Tensor]) -> None:
    """Replace each meta buffer by the result of ``make`` for the buffer and its name."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the meta tensor, so that its id is not reused
    for path, module in model.named_modules():
        for name, buffer in torch_private.buffers_of(module).items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = buffer, make(buffer, _join(path, name))
            torch_private.buffers_of(module)[name] = made[id(buffer)][1]


def fill_attributes(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each meta tensor that is a plain attribute, or nested in one, by the result of ``make``."""
    made: dict[int, Tensor] = {}

    def fill(value: Any) -> Any:
        if not _is_plain_meta(value):
            return value
        if id(value) not in made:
            made[id(value)] = make(value)
        return made[id(value)]

    found = [(vars(module), _plain_attributes(module)) for module in model.modules()]  # keeps ids in use
    for attributes, plain in found:
        attributes.update({name: tree_map(fill, value) for name, value in plain.items()})


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module with meta tensors that are neither parameters nor buffers."""
    own = {id(table) for table in _tables(module)}
    return {
        name: value
        for name, value in vars(module).items()
        if id(value) not in own and any(map(_is_plain_meta, tree_iter(value)))
    }


def _is_plain_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta and not isinstance(value, nn.Parameter)


def record_init(model: nn.Module, init: Init | None, *, only: Collection[int] | None = None) -> Recording:
    """Record how modules initialize their meta tensors, in the order of ``model.modules()``.

    Args:
        model: A model with tensors on meta.
        init: Called with each module that owns such tensors; ``None``: its ``reset_parameters()``.
        only: Ids of the tensors that must get values; ``None`` for all. Modules that own none of them are skipped.

    Raises:
        StateError: A tensor would stay uninitialized.
    """
    recording, unfilled = Recording(), dict[int, tuple[Tensor, StateError]]()
    for path, module in model.named_modules():
        tensors = _meta_tensors(module)
        wanted = {name: tensor for name, tensor in tensors.items() if only is None or id(tensor) in only}
        if not wanted:
            continue
        recording.blank |= set(map(torch_private.storage_identity, tensors.values()))
        errors = {name: _unfilled(path, module, name, init) for name in wanted}
        if init is None and not callable(getattr(module, "reset_parameters", None)):
            raise next(iter(errors.values()))
        with recorded(recording):
            (init or _reset)(module)
            for table in _tables(module):
                for name, tensor in tensors.items():
                    if table.get(name, tensor) is not tensor:  # the module has replaced it
                        tensor.detach().copy_(table[name].detach())
                        table[name] = tensor
        unfilled |= {
            id(tensor): (tensor, errors[name]) for name, tensor in wanted.items() if id(tensor) not in unfilled
        }
    for tensor, error in unfilled.values():
        if not recording.fills(tensor):
            raise error
    return recording


def _unfilled(path: str, module: nn.Module, name: str, init: Init | None) -> StateError:
    kind = type(module).__name__
    how = f"init({kind}) did not fill it" if init is not None else f"{kind}.reset_parameters() does not fill it"
    if init is None and not hasattr(module, "reset_parameters"):
        how = f"{kind} has no reset_parameters()"
    return StateError(
        f"{_join(path, name)!r} is on the meta device and would stay without values: {how}.\n"
        "  Build the model with sw.deferred_init(build_model), or pass sw.parallelize(..., init=...): a function"
        " that initialises what a module owns, or a state dict."
    )


@dataclass(frozen=True)
class NoSource:
    """The tensors that stay uninitialized until the caller loads them."""

    reason: str  # why they are not initialized
    names: frozenset[frozenset[str]]  # all names of each tensor


class LoadedLater(Source):
    """Source that leaves parameters empty; they are loaded after sharding."""

    def __init__(
        self, recording: Recording | None, unsaved: Collection[int], later: Mapping[str, Tensor] | Weights | NoSource
    ) -> None:
        super().__init__(recording)
        self.later = later
        self._unsaved = unsaved
        self._files = later if isinstance(later, Weights) and not isinstance(later, Mapping) else None

    def check(self, names: Iterable[str]) -> None:
        """Refuse uninitialized parameters (``names``) that are not in the files."""
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
        """As :meth:`Source.agree`; also compares the files. Random numbers are only drawn for unsaved buffers."""
        if self._files is not None:
            check_same(
                comm,
                int.from_bytes(self._files.digest[:7]),
                "the ranks see different files of weights",
                "Give every rank a copy of the same folder.",
            )
        super().agree(comm, mode)

    def parameters(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """Return the meta tensors themselves: shapes without memory."""
        return [entry.parameter.data for entry in entries]

    def ignored(self, entries: Sequence[OwnedParameter]) -> list[Tensor]:
        """Return the full values from the files; without files, uninitialized memory."""
        if self._files is None:
            return [torch.empty_like(entry.parameter, device="cpu") for entry in entries]
        return [_read(self._files, entry.names[0], entry.parameter) for entry in entries]

    def buffer(self, buffer: Tensor, name: str) -> Tensor:
        """As :meth:`Source.buffer` for an unsaved buffer; a saved one is read from files, or zeros without files."""
        if id(buffer) in self._unsaved:
            return super().buffer(buffer, name)
        return torch.zeros_like(buffer, device="cpu") if self._files is None else _read(self._files, name, buffer)


def _read(files: Weights, name: str, like: Tensor) -> Tensor:
    value = torch.empty(like.shape, dtype=like.dtype)
    files.read([(Extent(name, tuple(like.shape), dtype_name(like.dtype), 0, like.numel()), value.view(-1))])
    return value


def _no_reset(model: nn.Module) -> str | None:
    """Describe the first module that cannot initialize its saved meta tensors; ``None``: all modules can."""
    unsaved = _unsaved_buffers(model)
    for path, module in model.named_modules():
        owned = {name: tensor for name, tensor in _meta_tensors(module).items() if id(tensor) not in unsaved}
        if owned and not callable(getattr(module, "reset_parameters", None)):
            name = next(iter(owned))
            return f"{type(module).__name__} has no reset_parameters() ({_join(path, name)!r})"
    return None


def _saved_names(model: nn.Module) -> list[frozenset[str]]:
    """Return all names of every meta tensor that a state dict includes."""
    unsaved = _unsaved_buffers(model)
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _meta_tensors(module).items():
            if id(tensor) not in unsaved:
                found.setdefault(id(tensor), []).append(_join(path, name))
    return [frozenset(names) for names in found.values()]


def _unsaved_buffers(model: nn.Module) -> set[int]:
    """Return the ids of the meta buffers that a state dict does not include."""
    saved: set[int] = set()
    found: set[int] = set()
    for module in model.modules():
        for name, buffer in torch_private.buffers_of(module).items():
            if buffer is not None and buffer.is_meta:
                (saved if torch_private.is_persistent(module, name) else found).add(id(buffer))
    return found - saved


def _agree_on_states(states: Sequence[Tensor], comm: Comm, mode: str) -> None:
    """Make generator states equal rank 0's, in place."""
    numbers = all_gather_int(comm, int(digest_of(states)[0]) if states else 0)
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
    return {n: t for table in _tables(module) for n, t in table.items() if t is not None and t.is_meta}


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dictionaries of a module's own parameters and buffers."""
    return torch_private.parameters_of(module), torch_private.buffers_of(module)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
