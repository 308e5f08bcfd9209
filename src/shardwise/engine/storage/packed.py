"""Packed forms: parameters stored or gathered, and gradients summed, as int8 blocks or in 16 bit (``spec.quantize``).

A gather is received in buffers that all units share, and unpacked into the unit's memory. To reduce gradients, every
rank packs them and sends each part to the rank that adds it up, in fp32 and in rank order. That rank packs its own
gradients too, so that the result does not depend on which rank adds up a part, and is the same under every strategy.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwise.comm.base import Chain, Done, Handle
from shardwise.comm.dtype import dtype_name
from shardwise.engine.group import Form, Group
from shardwise.spec.memory.footprint import size_class
from shardwise.spec.quantize import BLOCK_NUMEL, packed_bounds, packed_bytes, summed_bounds

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


class Packed(Form):
    """Form in which parameters are gathered, or gradients summed, packed."""

    def start(self, group: Group, engine: Engine) -> None:
        """Announce the sizes of the packed buffers."""
        if not group.layout.params:
            return
        if group.facts.gathered_as is not None:
            self._gathered = packed_pool(engine, "gather")
            self._gathered.reserve(_gathered_cuts(group)[-1])
        if group.facts.reduced_as is not None:
            self._summed, places = packed_pool(engine, "reduce"), _reduced_bounds(group)
            self._summed.reserve(places[-1])
            self._summed.reserve(group.layout.size * (places[group.rank + 1] - places[group.rank]))

    def gather_from(self, group: Group, master: Tensor) -> Handle:
        """As :meth:`Form.gather_from`.

        Collective:
            All-gather of bytes; every rank sends its packed slice to every other rank. All ranks must call in the same
            order.
        """
        form = group.facts.gathered_as
        if form is None:
            return super().gather_from(group, master)
        return self._gather_packed(group, lambda own: pack(master, own, form))

    def _gather_packed(self, group: Group, fill: Callable[[Tensor], object]) -> Handle:
        """Issue the all-gather of packed slices; ``fill`` writes this rank's."""
        cuts = _gathered_cuts(group)
        buffer = self._gathered.acquire(cuts[-1], group.device)
        received = buffer[: cuts[-1]]
        fill(received[cuts[group.rank] : cuts[group.rank + 1]])
        comm, even_bounds = group.comms.gather, cuts if group.layout.uneven_bounds else None
        handle = comm.all_gather(received, unit=group.unit.name, bounds=even_bounds)

        def unpack_all() -> None:
            places = zip(itertools.pairwise(cuts), itertools.pairwise(group.layout.bounds), strict=True)
            for (start, stop), (first, last) in places:
                unpack(buffer[start:stop], group.gathered[first:last], group.facts.gathered_as or "none", group.dtype)
            self._gathered.release(buffer)

        return _HandleThen(handle, unpack_all)

    def reduce(self, group: Group, buffer: Tensor, result: Tensor, divisor: float) -> Handle:
        """As :meth:`Form.reduce`.

        Collective:
            All-to-all of bytes; every rank sends every other rank the packed part that this adds up. Where the
            optimizer is replicated, an all-gather of the summed parts in the reduce dtype follows when the handle
            advances. All ranks must call in the same order.
        """
        if group.facts.reduced_as is None:
            return super().reduce(group, buffer, result, divisor)
        packed, comm, unit, rank = self._summed, group.comms.reduce, group.unit.name, group.rank
        cuts, places = summed_bounds(group.gradient.layout), _reduced_bounds(group)
        sent = packed.acquire(places[-1], group.device)
        parts = [sent[start:stop] for start, stop in itertools.pairwise(places)]
        for part, (start, stop) in zip(parts, itertools.pairwise(cuts), strict=True):
            pack(buffer[start:stop], part, "int8")
        own = parts[rank]
        received = packed.acquire(comm.size * own.numel(), group.device)
        slots = received[: comm.size * own.numel()]
        is_even = len({part.numel() for part in parts}) == 1
        handle = comm.all_to_all(sent[: places[-1]], slots, unit=unit, bounds=None if is_even else places)
        terms = [own if peer == rank else slots.view(comm.size, -1)[peer] for peer in range(comm.size)]
        is_whole = not group.placements.shards_optimizer
        target = buffer[cuts[rank] : cuts[rank + 1]] if is_whole else result

        def sum_terms() -> None:
            sum_packed(terms, target, group.reduce_dtype, divisor)
            packed.release(sent)
            packed.release(received)

        summed = _HandleThen(handle, sum_terms)
        if not is_whole:
            return summed
        is_even = len({stop - start for start, stop in itertools.pairwise(cuts)}) == 1
        return Chain(summed, lambda: comm.all_gather(buffer, unit=unit, bounds=None if is_even else cuts))


class Frozen(Packed):
    """Frozen linear weights, stored as int8 blocks or in 16 bit.

    They are unpacked in the compute dtype while their unit computes. Where parameters are replicated, every rank stores
    all packed bytes and unpacks them without communication. Between steps such a parameter shows its codes: a view of
    int8 (bf16) elements of the master.
    """

    def make_master(self, group: Group) -> Tensor:
        """Pack the parameters of the unsharded model."""
        flat = group.fill(torch.zeros(group.master_numel, dtype=group.dtype, device=group.device))
        packed = empty_packed(flat.numel(), _stored_form(group), group.dtype, group.device)
        pack(flat, packed, _stored_form(group))
        return packed

    def elements(self, group: Group) -> Tensor:
        """The codes of the packed master."""
        return codes_of(group.master, group.master_numel, _stored_form(group))

    def values(self, group: Group) -> Tensor:
        """The unpacked parameters, in the dtype that they had, in new memory."""
        flat = torch.empty(group.master_numel, dtype=group.dtype, device=group.master.device)
        unpack(group.master, flat, _stored_form(group), group.dtype)
        return flat

    def set_values(self, group: Group, flat: Tensor) -> None:
        """Pack ``flat`` into the master."""
        pack(flat.to(group.master.device), group.master, _stored_form(group))

    def gather_from(self, group: Group, master: Tensor) -> Handle:
        """As :meth:`Packed.gather_from`, for a packed master; nothing is sent where parameters are replicated."""
        if not group.placements.shards_optimizer:
            unpack(master, group.gathered, _stored_form(group), group.dtype)
            return Done()
        if group.facts.gathered_as is None:
            group.own_slice.copy_(self.elements(group), non_blocking=True)
            return group.comms.gather.all_gather(
                group.gathered, unit=group.unit.name, bounds=group.layout.uneven_bounds
            )
        return self._gather_packed(group, lambda own: own.copy_(master, non_blocking=True))


def _stored_form(group: Group) -> str:
    form = group.facts.stored_as
    assert form is not None
    return form


Use = tuple[nn.Module, str, str]  # a module, its path, the attribute name


def is_quantizable(parameter: nn.Parameter, uses: Iterable[Use], form: str) -> bool:
    """Whether ``parameter`` is a frozen weight that only linear layers use, and ``form`` would make it smaller.

    Linear layers are ``nn.Linear`` with its subclasses, and ``Conv1D`` of transformers. A weight that is tied to
    anything else, such as an embedding, is not quantized.
    """
    is_smaller = parameter.is_floating_point() and (form != "bf16" or parameter.dtype.itemsize > 2)
    transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    return (
        is_smaller
        and not parameter.requires_grad
        and all(attribute == "weight" and isinstance(user, (nn.Linear, transposed)) for user, _, attribute in uses)
    )


def _gathered_cuts(group: Group) -> tuple[int, ...]:
    """The first byte of each rank's slice in a packed gather, and the end of the last slice."""
    return packed_bounds(group.layout.bounds, group.facts.gathered_as or "none", dtype_name(group.dtype))


def _reduced_bounds(group: Group) -> tuple[int, ...]:
    """The first byte of each rank's part of the packed gradients, and the end of the last part."""
    return packed_bounds(
        summed_bounds(group.gradient.layout), group.facts.reduced_as or "none", dtype_name(group.reduce_dtype)
    )


class _HandleThen(Handle):
    """A collective under way, with a function that is called once when it has been waited for."""

    def __init__(self, handle: Handle, then: Callable[[], None]) -> None:
        self._handle = handle
        self._then: Callable[[], None] | None = then

    def wait(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            self._handle.wait()
            then()


# -- buffers


def packed_pool(engine: Engine, purpose: str) -> PackedPool:
    """The packed buffers of a model for one purpose, ``gather`` or ``reduce``."""
    return engine.extras.get_or_make(_Pools)[purpose]


class _Pools(collections.defaultdict[str, "PackedPool"]):
    """The pools of a model, by purpose."""

    def __init__(self) -> None:
        super().__init__(PackedPool)


class PackedPool:
    """Buffers for packed bytes, each in use from the issue of a collective until the bytes have been unpacked.

    Usually one per size class is enough: a unit's gather, or sum, is waited for before the next is issued.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._free: dict[int, deque[Tensor]] = {}
        self._num_bytes = 0
        self._deferred: list[Tensor] | None = None

    @contextlib.contextmanager
    def defer_release(self) -> Iterator[list[Tensor]]:
        """Collect buffers that are given back inside, because a stream still reads them; the caller gives them back."""
        self._deferred = deferred = []
        try:
            yield deferred
        finally:
            self._deferred = None

    def reserve(self, num_bytes: int) -> None:
        """Announce, before the first step, that buffers of this size will be needed."""
        key = size_class(num_bytes)
        self._sizes[key] = max(self._sizes.get(key, 0), num_bytes)

    def acquire(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return an unused buffer of at least ``num_bytes``, allocated if there is none."""
        key = size_class(num_bytes)
        free = self._free.setdefault(key, deque())
        if free:
            return free.popleft()
        self._num_bytes += self._sizes[key]
        return torch.zeros(self._sizes[key], dtype=torch.uint8, device=device)

    def release(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        if self._deferred is not None:
            self._deferred.append(buffer)
            return
        self._free[size_class(buffer.numel())].appendleft(buffer)

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers."""
        return self._num_bytes


# -- arithmetic: every operation is element-wise, so the result is the same on every rank and for every division at
# block boundaries. 127 * (1 / 127) is exactly 1 in fp32 and fp64, so the largest value of a block is preserved exactly.


#: Elements per chunk of work: temporaries stay in a CPU's cache, and small compared with a unit on a GPU.
_CHUNK_NUMEL = {"cpu": 1 << 15, "cuda": 1 << 22}


def empty_packed(numel: int, form: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate the packed bytes of ``numel`` elements of ``dtype``."""
    return torch.zeros(packed_bytes(numel, form, dtype_name(dtype)), dtype=torch.uint8, device=device)


def pack(source: Tensor, packed: Tensor, form: str) -> None:
    """Quantize ``source`` (flat, full blocks) into ``packed``; a block with an inf or nan is unpacked as nans."""
    if form == "bf16":
        packed.view(torch.bfloat16)[: source.numel()].copy_(source)
        return
    if not source.numel():
        return  # an empty slice may begin at an offset that is not aligned for scales
    codes, scales = _split(packed, source.numel(), source.dtype)
    work = torch.float64 if source.dtype is torch.float64 else torch.float32
    for part in _parts(source):
        values = source[part].view(-1, BLOCK_NUMEL).to(work)
        largest = values.abs().amax(dim=1, keepdim=True)
        scales[part.start // BLOCK_NUMEL : part.stop // BLOCK_NUMEL].copy_(largest.squeeze(1))
        scaled = values.div_(largest) if values.data_ptr() != source[part].data_ptr() else values / largest
        # The quotient is nan in a block of zeros, or with an inf: its codes become 0.
        codes[part].view(-1, BLOCK_NUMEL).copy_(scaled.mul_(127).round_().nan_to_num_(0.0))


def unpack(packed: Tensor, target: Tensor, form: str, dtype: torch.dtype) -> None:
    """Unpack elements of ``dtype`` into ``target``: rounded to ``dtype``, then cast."""
    if form == "bf16":
        target.copy_(packed.view(torch.bfloat16)[: target.numel()])
        return
    if not target.numel():
        return
    codes, scales = _split(packed, target.numel(), dtype)
    for part in _parts(target):
        target[part].view(-1, BLOCK_NUMEL).copy_(_read(codes, scales, part).to(dtype))


def _read(codes: Tensor, scales: Tensor, part: slice) -> Tensor:
    """Return a range of blocks, one per row, in the dtype of the arithmetic."""
    work = torch.float64 if scales.dtype is torch.float64 else torch.float32
    largest = scales[part.start // BLOCK_NUMEL : part.stop // BLOCK_NUMEL].to(work)
    return codes[part].view(-1, BLOCK_NUMEL).to(work).mul_(1 / 127).mul_(largest.unsqueeze(1))


def sum_packed(terms: Sequence[Tensor], out: Tensor, dtype: torch.dtype, divisor: float) -> None:
    """Add up int8 blocks of ``dtype`` in order, in fp32 (fp64 for fp64), divide, and round into ``out``."""
    if not out.numel():
        return  # an empty slice may begin at an offset that is not aligned for scales
    split = [_split(term, out.numel(), dtype) for term in terms]
    for part in _parts(out):
        total = _read(*split[0], part)
        for codes, scales in split[1:]:
            total += _read(codes, scales, part)
        if divisor != 1:
            total /= divisor
        out[part].view(-1, BLOCK_NUMEL).copy_(total)


def codes_of(packed: Tensor, numel: int, form: str) -> Tensor:
    """Return a view of ``packed`` with one element for each of the ``numel`` values: the codes, or the cast values."""
    return packed.view(torch.bfloat16)[:numel] if form == "bf16" else packed[:numel].view(torch.int8)


def _split(packed: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of the codes, and of the largest absolute value of every block."""
    num_bytes = numel // BLOCK_NUMEL * dtype.itemsize
    return packed[:numel].view(torch.int8), packed[numel : numel + num_bytes].view(dtype)


def _parts(flat: Tensor) -> Iterator[slice]:
    """Yield the chunks of ``flat``; none on meta."""
    if flat.is_meta:
        return
    step = _CHUNK_NUMEL.get(flat.device.type, 1 << 22)
    for start in range(0, flat.numel(), step):
        yield slice(start, min(start + step, flat.numel()))
