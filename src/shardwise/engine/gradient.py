"""The gradients of one group, from autograd to the shards.

=================  ====================================================================  ===================
state              where this rank's gradients are                                       leaves by
=================  ====================================================================  ===================
EMPTY              nowhere, or on the shards' ``.grad``                                  ``collect``
LOCAL              summed in a flat full-size buffer, not reduced yet                    ``reduce``
REDUCING           being reduced; the buffer must not be touched                         ``finish``
PARTIAL            summed over ``dp_shard`` only (accumulation ``defer_replicate``)      ``collect``
LOCAL_AND_PARTIAL  as PARTIAL, and a later microbatch's in a buffer as LOCAL             ``reduce``
=================  ====================================================================  ===================

On a mesh with ``dp_replicate`` a reduction is a chain: the sum over ``dp_shard``, then the sum of this rank's slice
over ``dp_replicate``, then one division. The second sum is stored in the memory of ``.grad``, not in the full-size
buffer, so that it may be under way while the next units' gradients are collected.

The full-size buffer belongs to the group. It has memory from the first gradient to the end of its reduction. Where the
placements replicate gradients (``ddp``, ``zero1``, and wherever one rank's slice is the full group) ``.grad`` is a view
of such a buffer, which is reduced in place. A further backward then collects in a second buffer.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.comm.base import Chain, Comm, Done, Handle
from shardwise.comm.dtype import dtype_name
from shardwise.spec.errors import StateError
from shardwise.spec.layout import ReduceLayout, Rows
from shardwise.spec.precision import divisors

if TYPE_CHECKING:
    from shardwise.engine.group import Group


class Meter:
    """Bytes that are allocated now, and the maximum so far."""

    def __init__(self) -> None:
        self.current = self.peak = 0

    def add(self, num_bytes: int) -> None:
        """Count allocated bytes; a negative number counts freed bytes."""
        self.current += num_bytes
        self.peak = max(self.peak, self.current)


class GradientMemory(Meter):
    """Counts the full-size gradient buffers of a model that have memory, and caches small constants that groups share.

    Args:
        limit: Number of buffers of one kind in use at once. A group that needs one more waits for the oldest reduction.
            If none is under way (an enclosing unit, or local accumulation, uses them), it gets one beyond the limit.
        drain: Finishes the oldest reduction under way; returns False if there is none.
    """

    def __init__(self, limit: int, drain: Callable[[], bool]) -> None:
        super().__init__()
        self.limit = limit
        self._drain = weakref.WeakMethod(drain)  # a method of the engine, which owns this object
        self._num_in_use: Counter[Hashable] = Counter()
        self._constants: dict[Hashable, Tensor] = {}

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the small constant tensor of ``key``, made at the first call."""
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def acquire(self, kind: Hashable, num_bytes: int) -> None:
        """Count a buffer of a kind that is about to be allocated, after waiting while the limit is reached."""
        drain = self._drain()
        while self._num_in_use[kind] >= self.limit and drain is not None and drain():
            pass
        self._num_in_use[kind] += 1
        self.add(num_bytes)

    def release(self, kind: Hashable, num_bytes: int) -> None:
        """Count a buffer of a kind that has been freed."""
        self._num_in_use[kind] -= 1
        self.add(-num_bytes)


class _FreedStorage(NamedTuple):
    """Tensors of a :class:`GradientStorage` whose memory is freed; ``holders`` as ``torch_private.num_holders``."""

    tensor: Tensor
    plain: list[Tensor]
    views: list[Tensor]
    full: FlatBuffer | None
    flats: list[Tensor]
    holders: tuple[int, int]


class GradientStorage:
    """The memory of ``.grad`` of a group's shards, allocated from the first gradient to ``zero_grad()``.

    Attributes:
        tensor: The memory, in the master's layout: a slice of :attr:`full`, or a separate allocation. ``None``: freed.
        views: One view of :attr:`tensor` for each parameter: its ``.grad``.
        plain: The same views as plain tensors.
        as_part: Wraps a gradient (of a shard) whose other parts are on other ranks, so that it refuses norms.
        is_separate: Whether ``.grad`` is never part of the buffer that is reduced.
        full: The full-size gradient buffer, unless it is pooled. ``.grad`` is a part of it, unless ``is_separate``.
        flats: Views over several parameters: ``.grad`` of flat parameters.
        is_temporary: Whether ``.grad`` exists for one update only (the optimizer steps inside backward).
    """

    def __init__(self, group: Group, as_part: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        self.group = group
        self.as_part = as_part
        self.is_separate = group.facts.has_separate_grad
        self.tensor: Tensor | None = None
        self.views: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.full: FlatBuffer | None = None
        self.flats: list[Tensor] = []
        self.is_temporary = False
        self._temporary: tuple[Tensor, list[Tensor]] | None = None
        self._freed: _FreedStorage | None = None

    def make(self, *, is_filled: bool = True) -> Tensor:
        """Return the memory, allocated at the first call: zeros, or uninitialized unless ``is_filled``."""
        if self.tensor is not None:
            return self.tensor
        freed, self._freed = self._freed, None
        if freed is None:
            return self._make(is_filled=is_filled)
        self.tensor, self.plain, self.views, self.full, self.flats, self._holders = freed
        for flat in self._memories:
            allocate(flat)
        if is_filled and self._memory is self.tensor:
            self.tensor.zero_()
        return self.tensor

    @property
    def _memory(self) -> Tensor:
        """The allocation of which :attr:`tensor` is all or a part."""
        assert self.tensor is not None
        return self.tensor if self.full is None or self.is_separate else self.full.memory

    @property
    def _memories(self) -> list[Tensor]:
        """That allocation, and with ``is_separate`` the full-size buffer as well."""
        return [self._memory, self.full.memory] if self.full is not None and self.is_separate else [self._memory]

    def _make(self, *, is_filled: bool) -> Tensor:
        group, gradient = self.group, self.group.gradient
        if not gradient.is_pooled:
            self.full = gradient.make_buffer()
        if self.full is None or self.is_separate:
            numel = gradient.layout.slice_numel(group.rank)
            if is_filled or self.is_separate:
                self.tensor = group.form.zeros(group, numel)
            else:
                self.tensor = torch.empty(numel, dtype=group.dtype, device=group.device)
        else:
            self.tensor = self.full.memory[gradient.layout.slice_of(group.rank)]
        self.plain = self.views = group.views_in(self.tensor)
        if group.facts.has_part_grads:
            self.views = [self.as_part(view, shard) for view, shard in zip(self.plain, group.shards, strict=True)]
        self._holders = self._count_holders()
        base = self.tensor.data_ptr()
        self._offsets = [view.data_ptr() - base if view.numel() else None for view in self.plain]
        return self.tensor

    @torch_private.on_plain_tensors
    def replace_moved_views(self) -> None:
        """Make new views in place of those that the user has pointed at other memory, as ``p.grad.data = x`` does."""
        if self.tensor is None or self.is_temporary:
            return
        base, group = self.tensor.data_ptr(), self.group
        for index, offset in enumerate(self._offsets):
            plain, view = self.plain[index], self.views[index]
            if offset is not None and not plain.data_ptr() == view.data_ptr() == base + offset:
                self.plain[index] = plain = group.view_in(index, self.tensor)
                if self.views is not self.plain:
                    self.views[index] = self.as_part(plain, group.shards[index])

    def _count_holders(self) -> tuple[int, int]:
        return torch_private.num_holders([self._memory, *self.plain, *self.views, *self.flats])

    def add_view(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Call ``make`` and return its result (the memory, a new view of it), which the caller keeps.

        The references that the caller keeps do not count as the user's in :meth:`free`.
        """
        if self.is_temporary:
            return make()
        before = self._count_holders()
        made = make()
        self.flats.append(made[1])
        after = self._count_holders()
        self._holders = self._holders[0] + after[0] - before[0], self._holders[1] + after[1] - before[1]
        return made

    def free(self) -> None:
        """Free the memory. If the user holds a gradient, it stays theirs, and the next step allocates new memory."""
        if self.tensor is not None and not self.is_temporary and self._count_holders() == self._holders:
            for flat in self._memories:
                free(flat)
            self._freed = _FreedStorage(self.tensor, self.plain, self.views, self.full, self.flats, self._holders)
        self.tensor = self.full = None
        self.views, self.plain, self.flats = [], [], []

    def make_temporary(self) -> None:
        """From now on store ``.grad`` for one update only: in the reduced sum, or for a cast in separate memory."""
        self.is_temporary = True
        self.free()

    @property
    def _is_cast(self) -> bool:
        return self.group.reduce_dtype is not self.group.dtype

    def allocate_for_update(self, result: Tensor) -> None:
        """Store ``.grad`` for one update in ``result``, the sum; if the dtype differs, in separate memory."""
        if self._temporary is None:  # the rank's slice of the group's buffer never moves, so the views are made once
            memory = torch.empty(len(result), dtype=self.group.dtype, device=result.device) if self._is_cast else result
            self._temporary = memory, self.group.views_in(memory)
        elif self._is_cast:
            allocate(self._temporary[0])
        self.tensor, self.plain = self._temporary
        self.views = self.plain  # only the optimizer sees them

    def release_after_update(self) -> None:
        """Undo :meth:`allocate_for_update`: set ``.grad`` of the shards to ``None`` and free the memory."""
        for shard in self.group.shards:
            shard.grad = None
        if self.tensor is not None and self._is_cast:
            free(self.tensor)
        self.free()


class GradientState(StrEnum):
    """The states of a group's gradients on this rank."""

    EMPTY = "empty"
    LOCAL = "local"
    REDUCING = "reducing"
    PARTIAL = "partial"
    LOCAL_AND_PARTIAL = "local and partial"


#: The only allowed moves, but for :meth:`Gradient.drop`, which leaves every state.
LEGAL_MOVES: frozenset[tuple[GradientState, GradientState]] = frozenset(
    {
        (GradientState.EMPTY, GradientState.LOCAL),
        (GradientState.LOCAL, GradientState.REDUCING),
        (GradientState.REDUCING, GradientState.EMPTY),
        (GradientState.REDUCING, GradientState.PARTIAL),
        (GradientState.PARTIAL, GradientState.LOCAL_AND_PARTIAL),
        (GradientState.LOCAL_AND_PARTIAL, GradientState.REDUCING),
    }
)


class Gradient:
    """Collects and reduces the gradients of ``group``.

    Attributes:
        layout: Flat layout of the full-size buffer.
        storage: Memory of ``.grad``.
        state: Where the gradients are.
        is_pooled: Whether the full-size buffer has memory only during a backward. Otherwise :attr:`storage` owns it.
        result: Receives the sum that is under way.
        has_added: Whether a reduced gradient was ever added to a ``.grad`` of an earlier backward.
    """

    def __init__(self, group: Group, as_part: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        facts = group.facts
        self.group = group
        self.layout = facts.reduce_layout
        self.storage = GradientStorage(group, as_part)
        self.state = GradientState.EMPTY
        # The kind of the pooled buffer and its bytes, which GradientMemory counts.
        self._kind_and_bytes = (group.dtypes, facts.is_expert), self.layout.numel * group.reduce_dtype.itemsize
        self.is_pooled = facts.pools_gradients
        self.set_divisor(facts.num_ranks)
        first_flag = self.layout.data_numel(self.layout.slice_index(group.rank))
        self._flags = slice(first_flag, first_flag + len(group.shards))  # in this rank's slice of a sum
        self._local: FlatBuffer | None = None  # the buffer in which local gradients are
        self._scratch: FlatBuffer | None = None  # has memory only during a backward
        self._used: list[bool] = []  # by parameter: whether this rank has a term in the sum
        self.result: Tensor | None = None
        self._partial: Tensor | None = None  # summed over dp_shard by earlier microbatches, not over dp_replicate yet
        self.partial_store: Tensor | None = None  # memory of ``_partial`` if that is not in the memory of ``.grad``
        self._maybe_unused: list[int] = []  # parameters whose use is known only from the flags in ``storage``
        self.has_added = False

    def _move_to(self, state: GradientState) -> None:
        if (self.state, state) not in LEGAL_MOVES:
            name = self.group.unit.name
            raise StateError(f"gradients of unit {name!r} cannot go from {self.state} to {state}: a bug in shardwise.")
        self.state = state

    @property
    def is_local(self) -> bool:
        """Whether gradients of this rank wait for a reduction, or for the sum over ``dp_replicate``."""
        return self.state not in (GradientState.EMPTY, GradientState.REDUCING)

    @property
    def has_sums(self) -> bool:
        """Whether some ``.grad`` of an earlier backward exists, to which the next reduction is added."""
        if self._maybe_unused:
            return True
        with torch_private.without_torch_function():
            for shard in self.group.shards:
                if torch_private.grad.__get__(shard) is not None:  # hot path: bypasses the slower Shard.grad
                    return True
        return False

    @property
    def buffers(self) -> tuple[Tensor | None, ...]:
        """The memory of ``.grad``, its full-size buffer, and partial sums of microbatches; each may be ``None``."""
        return self.storage.tensor, None if self.storage.full is None else self.storage.full.memory, self.partial_store

    @property
    def scratch(self) -> Tensor | None:
        """The full-size buffer that has memory only during a backward."""
        return None if self._scratch is None else self._scratch.memory

    @property
    def shares_parameter_memory(self) -> bool:
        """Whether a gradient shares memory with a gathered buffer of the unit: autograd returned a parameter's view."""
        groups = self.group.unit.groups
        gathered = [group.gathered.untyped_storage().data_ptr() for group in groups if group.is_allocated]
        for full in self.group.unsharded:  # a plain loop: once for each parameter in each step
            grad = full.grad
            if grad is not None and grad.layout is torch.strided and grad.untyped_storage().data_ptr() in gathered:
                return not grad.is_meta
        return False

    def set_divisor(self, num_ranks: int) -> None:
        """Divide sums by ``num_ranks`` from now on."""
        self._divisors = divisors(num_ranks, dtype_name(self.group.reduce_dtype))  # before and after the sum

    # -- empty -> local

    def collect(self, memory: GradientMemory) -> None:
        """Move the gradients of the full parameters into the flat buffer, and free them."""
        views = self._allocate_local(memory)
        written = views.written
        if not any(written) and self._collect_all(views):
            return
        copy_to: list[Tensor] = []
        copies: list[Tensor] = []
        add_to: list[Tensor] = []
        terms: list[Tensor] = []
        for index, full in enumerate(self.group.unsharded):
            grad = full.grad
            if grad is None or grad is views.in_place.get(index):
                continue
            if views.in_place.pop(index, None) is not None:  # autograd stored the sum in another tensor
                written[index] = False
            full.grad = None
            targets, sources = (add_to, terms) if written[index] else (copy_to, copies)
            written[index] = True
            targets += views.by_param[index]
            sources += self._split_gradient(index, grad)
        _foreach(torch._foreach_add_, add_to, terms)
        _foreach(torch._foreach_copy_, copy_to, copies)

    def _collect_all(self, views: FlatBuffer) -> bool:
        """Collect faster if every parameter has its first gradient, as in nearly every backward; else return False."""
        unsharded = self.group.unsharded
        grads = [grad for full in unsharded if (grad := full.grad) is not None and grad.layout is torch.strided]
        if len(grads) < len(unsharded):
            return False
        for full in unsharded:
            full.grad = None
        views.written = [True] * len(unsharded)
        for index in views.divided:  # the last one first
            grads[index : index + 1] = self._split_gradient(index, grads[index])
        _foreach(torch._foreach_copy_, views.all_views, grads)
        return True

    def accumulate_in_place(self) -> None:
        """Make autograd add later gradients in place in the flat buffer, where a gradient is contiguous there.

        The buffer must not be moved until :meth:`reduce`.
        """
        group, local = self.group, self._local
        if local is None or group.compute_dtype is not group.reduce_dtype:
            return  # a gradient has the dtype of its parameter
        for index, views in enumerate(local.by_param):
            if local.written[index] and index not in local.in_place and index not in local.divided:
                local.in_place[index] = group.unsharded[index].grad = views[0]

    def local_views(self, index: int, memory: GradientMemory) -> list[Tensor]:
        """Return this rank's gradient of a parameter as views (:meth:`parts`) to be changed; -0.0 if there is none."""
        self.collect(memory)
        local = self._allocate_local(memory)
        if not local.written[index]:
            _fill_negative_zero(local.by_param[index])
            local.written[index] = True
        return local.by_param[index]

    def has_local(self, index: int) -> bool:
        """Whether this rank's collected gradients include one of a parameter."""
        return self._local is not None and self._local.written[index]

    def forget_local(self, index: int) -> None:
        """Undo :meth:`local_views` for a parameter that no rank's backward has used."""
        assert self._local is not None
        self._local.written[index] = False

    def add(self, index: int, grad: Tensor, memory: GradientMemory) -> None:
        """Add ``grad``, which autograd did not bring to the full parameter, to this rank's gradient of a parameter."""
        _foreach(torch._foreach_add_, self.local_views(index, memory), self._split_gradient(index, grad))

    def has_collected(self, index: int) -> bool:
        """Whether sums of earlier microbatches include parameter ``index``, of which this rank owns elements."""
        is_partial = self._partial is not None and self._used[index]
        return (self.has_local(index) or is_partial) and not self._is_elsewhere(index)

    def _is_elsewhere(self, index: int) -> bool:
        """Whether this rank owns no element of a parameter that has some."""
        return self.group.pieces[index].numel == 0 < self.layout.group.params[index].numel

    def drop_parameter(self, index: int) -> None:
        """Drop the sum of earlier microbatches for parameter ``index``."""
        if self._local is not None:
            self._local.written[index] = False
            if self._local.in_place.pop(index, None) is not None:
                self.group.unsharded[index].grad = None
        if self._partial is not None:
            self._used[index] = False
            self.group.view_in(index, self._partial).zero_().neg_()
            self._flags_in(self._partial)[index] = 0

    def make_buffer(self) -> FlatBuffer:
        """Allocate a full-size buffer."""
        return FlatBuffer(self.layout, self.group.reduce_dtype, self.group.device)

    def _allocate_local(self, memory: GradientMemory) -> FlatBuffer:
        """Return a buffer to collect in, allocated at the first call."""
        if self._local is not None:
            return self._local
        storage = self.storage
        has_partial = self.state is GradientState.PARTIAL
        self._move_to(GradientState.LOCAL_AND_PARTIAL if has_partial else GradientState.LOCAL)
        if self.is_pooled or storage.is_temporary or (not storage.is_separate and self.has_sums):
            memory.acquire(*self._kind_and_bytes)
            if self._scratch is None:
                self._scratch = self.make_buffer()
            allocate(self._scratch.memory)
            self._scratch.is_counted = True
            self._local = self._scratch
        else:
            storage.make()
            self._local = storage.full
        assert self._local is not None
        return self._local

    def _split_gradient(self, index: int, grad: Tensor) -> list[Tensor]:
        """Return the gradient in the parts in which the flat buffer stores it."""
        spec = self.layout.group.params[index]
        if grad.layout is not torch.strided:
            raise StateError(
                f"the gradient of {spec.name!r} is {grad.layout}; a flat buffer holds dense ones.\n"
                "  Build the embedding with sparse=False."
            )
        if not self.layout.is_divided(index):
            return [grad]
        if grad.stride() != spec.strides:
            grad = torch.empty_strided(spec.shape, spec.strides, dtype=grad.dtype, device=grad.device).copy_(grad)
        return self.parts(index, grad.detach())

    def parts(self, index: int, dense: Tensor) -> list[Tensor]:
        """Return views of a dense parameter, in memory order, in the parts in which the flat buffer stores it."""
        return _views(dense, self.layout, index, self.layout.dense_rows[index])

    # -- local -> reducing

    def reduce(self, memory: GradientMemory, *, is_last: bool = True) -> Handle:
        """Complete the local gradients and issue their reduction.

        A missing gradient is sent as -0.0, the exact identity of addition, with 0 as its flag.

        Args:
            memory: Counts the buffers in use.
            is_last: Whether no later microbatch adds to the sum, so that it is also reduced over ``dp_replicate``.

        Collective:
            As ``Form.reduce``. Then, when the handle advances, all-reduce on ``dp_replicate`` of this rank's slice.
        """
        group = self.group
        views = self._allocate_local(memory)
        for index in views.in_place:
            group.unsharded[index].grad = None
        views.in_place.clear()
        written, views.written = views.written, [False] * len(views.written)
        views.set_flags(written, memory)
        if not all(written):
            _fill_negative_zero([t for i, is_there in enumerate(written) if not is_there for t in views.by_param[i]])
        if views.gaps:
            torch._foreach_zero_(views.gaps)
        buffer = views.memory
        self._move_to(GradientState.REDUCING)
        self._local = None
        partial, self._partial = self._partial, None
        if partial is None:
            self._used = written
        else:
            self._used = [before or now for before, now in zip(self._used, written, strict=True)]
        before, after = self._divisors
        if before != 1:
            buffer.div_(before)
        replicate = group.comms.replicate
        self.result = self._memory_of_sum(buffer, partial)
        shard_sum = group.form.reduce(group, buffer, self.result, after if replicate is None else 1)
        if replicate is None:
            return group.form.store_sum(group, shard_sum)
        if partial is not None or not is_last:
            return Chain(shard_sum, lambda: self._add_partial(replicate, memory, partial, is_last=is_last))
        is_in_place = self.result is self.storage.tensor

        def release() -> None:
            if is_in_place:
                self._release_scratch(memory)  # the sum is in the memory of .grad, not in the full-size buffer

        return replicate.chain(shard_sum, lambda: self._reduce_over_replicas(replicate), release)

    def _memory_of_sum(self, buffer: Tensor, partial: Tensor | None) -> Tensor:
        """Return memory for the sum over ``dp_shard``: that of ``.grad`` if free, else this rank's slice in place."""
        if not self.group.facts.placements.shards_optimizer:
            return buffer
        is_free = not (self.storage.is_temporary or self.storage.is_separate or self.has_sums)
        if self.is_pooled and is_free and partial is None:
            return self.storage.make(is_filled=False)
        return buffer[self.layout.slice_of(self.group.rank)]

    def _add_partial(self, replicate: Comm, memory: GradientMemory, partial: Tensor | None, *, is_last: bool) -> Handle:
        """Add the sum over ``dp_shard`` to that of earlier microbatches; if it is the last, reduce over replicas."""
        result = self.result
        assert result is not None
        if partial is not None:
            result = partial.add_(result)
        elif result is not self.storage.tensor:
            if self.partial_store is None:
                self.partial_store = torch.empty_like(result)
            result = self.partial_store.copy_(result)
        self._release_scratch(memory)  # the sum has been copied out of the full-size buffer
        if not is_last:
            self._move_to(GradientState.PARTIAL)
            self._partial, self.result = result, None
            return Done()
        self.result = result
        return self._reduce_over_replicas(replicate)

    def _reduce_over_replicas(self, replicate: Comm) -> Handle:
        """Reduce this rank's slice over ``dp_replicate``."""
        assert self.result is not None
        replica_sum = replicate.all_reduce(self.result, unit=self.group.unit.name, divisor=self._divisors[1])
        return self.group.form.store_sum(self.group, replica_sum)

    def free(self) -> None:
        """Free the memory of ``.grad`` if every ``.grad`` is ``None``, except pinned memory of offloaded groups."""
        storage = self.storage
        is_kept = self.group.facts.is_offloaded  # pinned memory is slow to allocate
        if is_kept or storage.tensor is None or self.is_local or self.has_sums:
            return
        storage.free()

    # -- reducing -> empty

    def finish(self, memory: GradientMemory) -> None:
        """Put the reduced gradients on the shards: set where there was none, add where there was one.

        A parameter that no rank used is left alone. The flags in the reduced buffer say whether another rank used a
        parameter that this rank did not. The host reads them at the end of backward (:func:`read_unused_flags`), so
        that it does not wait here.
        """
        result, storage = self.result, self.storage
        if result is None:
            return  # a partial sum, which waits for the last microbatch
        self._move_to(GradientState.EMPTY)
        if storage.is_temporary:
            storage.allocate_for_update(result)
        is_filled = storage.tensor is None and (not all(self._used) or self.has_sums)
        is_in_place = result.data_ptr() == storage.make(is_filled=is_filled).data_ptr()
        if self._maybe_unused or not is_in_place:
            self.group.form.wait_for_host()  # an offloaded group: the host is about to read the sum
        if self._maybe_unused:  # the second reduction of one backward
            read_unused_flags([self])
        self._set_grads(result, is_in_place=is_in_place)
        self.result = None
        if storage.is_temporary:
            read_unused_flags([self])  # the optimizer steps now
        else:
            self._release_scratch(memory)

    @torch_private.on_plain_tensors
    def _set_grads(self, result: Tensor, *, is_in_place: bool) -> None:
        """Set or add to ``.grad`` of the shards; parameters that this rank did not use wait for their flags."""
        group, used, storage = self.group, self._used, self.storage
        assert storage.tensor is not None
        storage.replace_moved_views()
        if not is_in_place and all(used) and self._set_grads_at_once(result, storage.tensor):
            return
        views = storage.plain if is_in_place else group.views_in(result)
        flags = self._flags_in(result)
        # A single rank needs no flags. A dry run (meta tensors) has no other ranks.
        has_unknown = not all(used) and group.facts.num_ranks > 1 and flags.numel() > 0 and not result.is_meta
        for index in self._with_grad:
            if not (used[index] or has_unknown):
                continue
            shard = group.shards[index]
            grad = shard.grad
            if grad is not None:
                grad = storage.plain[index] if grad is storage.views[index] else grad
                grad.add_(views[index])  # if no rank used it, this adds -0.0, which changes nothing
                self.has_added = True
                continue
            if not is_in_place:
                storage.plain[index].copy_(views[index])
            if used[index]:
                shard.grad = storage.views[index]
            else:
                self._maybe_unused.append(index)
        if self._maybe_unused and not is_in_place:
            self._flags_in(storage.tensor).copy_(flags)

    @property
    def _with_grad(self) -> list[int]:
        """Numbers of the parameters whose ``.grad`` is set on this rank.

        A parameter of which this rank owns no element has an empty one, unless flat parameters take the place of all
        others: nobody would set it to ``None`` again.
        """
        is_flat = self.group.facts.flat_kinds is not None
        return [index for index in range(len(self.group.shards)) if not (is_flat and self._is_elsewhere(index))]

    def _set_grads_at_once(self, result: Tensor, into: Tensor) -> bool:
        """As :meth:`_set_grads`, in one operation. Returns False unless every shard has this ``.grad``, or none."""
        owned, shards, views = self._with_grad, self.group.shards, self.storage.views
        grads = [shards[index].grad for index in owned]
        if all(grad is None for grad in grads):
            into.copy_(result)
            for index in owned:
                shards[index].grad = views[index]
            return True
        if all(grad is views[index] for grad, index in zip(grads, owned, strict=True)):
            into.add_(result)
            self.has_added = True
            return True
        return False

    def _flags_in(self, reduced: Tensor) -> Tensor:
        """Return the flags in this rank's slice of a reduced buffer, or in a tensor of the same layout."""
        return reduced[self._flags]

    @property
    def unread_flags(self) -> Tensor | None:
        """The flags that the host has yet to read; ``None`` if there are none."""
        return self._flags_in(self.storage.make()) if self._maybe_unused else None

    @torch_private.on_plain_tensors
    def set_used_grads(self, flags: Sequence[float]) -> None:
        """Set ``.grad`` of the parameters that only other ranks have used; ``flags`` as :attr:`unread_flags`."""
        for index in self._maybe_unused:
            if flags[index] > 0:
                self.group.shards[index].grad = self.storage.views[index]
        self._maybe_unused = []

    # -- dropping gradients

    def release_storage(self, memory: GradientMemory) -> None:
        """Set ``.grad`` of the shards to ``None`` and free its memory (where the storage is temporary)."""
        self.storage.release_after_update()
        self._release_scratch(memory)

    def drop(self, memory: GradientMemory) -> None:
        """Drop gradients that are not on the shards yet: a backward failed, or ``zero_grad()`` was called."""
        for full in self.group.unsharded:
            full.grad = None
        if self._local is not None:
            self._local.in_place.clear()
            self._local.written = [False] * len(self._local.written)
        self.state = GradientState.EMPTY
        self._local = self.result = self._partial = None
        self._maybe_unused = []
        if self.storage.is_temporary:
            self.storage.release_after_update()
        self._release_scratch(memory)

    def _release_scratch(self, memory: GradientMemory) -> None:
        if self._scratch is not None and self._scratch.is_counted:
            self._scratch.is_counted = False
            free(self._scratch.memory)
            memory.release(*self._kind_and_bytes)


def _fill_negative_zero(tensors: list[Tensor]) -> None:
    """Fill with -0.0, the exact identity of addition."""
    if tensors:
        torch._foreach_zero_(tensors)
        torch._foreach_neg_(tensors)


def _foreach(change: Callable[..., object], targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy or add each source to its target: pairs of equal strides in one launch on CUDA, every other pair alone."""
    even: list[tuple[Tensor, Tensor]] = []
    odd: list[tuple[Tensor, Tensor]] = []
    for pair in zip(targets, sources, strict=True):
        (even if pair[0].stride() == pair[1].stride() else odd).append(pair)
    for pairs in (even, *([pair] for pair in odd)):
        if pairs:
            change([target for target, _ in pairs], [source for _, source in pairs])


def read_unused_flags(gradients: Iterable[Gradient]) -> None:
    """Read which parameters other ranks alone have used, and set their ``.grad``; the host waits once per device."""
    unread: dict[torch.device, list[tuple[Gradient, Tensor]]] = {}
    for gradient in gradients:
        flags = gradient.unread_flags
        if flags is not None:
            unread.setdefault(flags.device, []).append((gradient, flags))
    for found in unread.values():
        values = iter(torch.cat([flags.float() for _, flags in found]).tolist())
        for gradient, flags in found:
            gradient.set_used_grads(list(itertools.islice(values, len(flags))))


def _views(buffer: Tensor, layout: ReduceLayout, index: int, rows: Sequence[Rows]) -> list[Tensor]:
    """Return views of a parameter in a buffer: one, or one for each of ``rows`` if the parameter is divided."""
    if layout.is_divided(index):
        return _row_views(buffer, rows)
    spec = layout.group.params[index]
    return [buffer.as_strided(spec.shape, spec.strides, buffer.storage_offset() + rows[0].offset)]


def _row_views(buffer: Tensor, rows: Sequence[Rows]) -> list[Tensor]:
    first = buffer.storage_offset()
    return [buffer.as_strided((r.count, r.numel), (r.step, 1), first + r.offset) for r in rows]


def allocate(flat: Tensor) -> None:
    """Allocate the memory of ``flat``, which :func:`free` has freed; it is uninitialized."""
    flat.untyped_storage().resize_(flat.numel() * flat.itemsize)


def free(flat: Tensor) -> None:
    """Free the memory of ``flat``. The tensor and its views remain as objects."""
    flat.untyped_storage().resize_(0)


class FlatBuffer:
    """A full-size buffer and its views, made once: one for each gradient, the gaps, and the flags.

    Attributes:
        written: By parameter, whether the buffer has this rank's gradient.
        in_place: Views that are ``.grad`` of full parameters, by parameter: autograd adds to them.
        is_counted: Whether it is a pooled buffer that has memory now.
        memory: The buffer. Its memory may be freed and allocated again.
        by_param: The views of each parameter: one in its shape, or one for each of its rows in ``layout``.
        all_views: All of these views, in order.
        divided: Numbers of the parameters that are divided into rows or empty, the last one first.
        gaps: Views of the elements to which no gradient is written.
    """

    def __init__(self, layout: ReduceLayout, dtype: torch.dtype, device: torch.device) -> None:
        params = layout.group.params
        self.written = [False] * len(params)
        self.in_place: dict[int, Tensor] = {}
        self.is_counted = False
        self.memory = torch.empty(layout.numel, dtype=dtype, device=device)
        self.divided = [index for index in reversed(range(len(params))) if layout.is_divided(index)]
        self.by_param = [_views(self.memory, layout, index, rows) for index, rows in enumerate(layout.rows)]
        self.all_views = [view for piece in self.by_param for view in piece]
        self.gaps = [self.memory[start:stop] for start, stop in layout.gaps]
        self._headers = _row_views(self.memory, layout.header_rows)

    def set_flags(self, used: list[bool], memory: GradientMemory) -> None:
        """Write the headers: 1 for each parameter that this rank's backward used."""
        if not self._headers:
            return  # all slices are empty
        key = len(used), self._headers[0].shape[-1], self.memory.dtype
        flags = memory.constant(key, lambda: self._flags(used)) if all(used) else self._flags(used)
        for header in self._headers:
            header.copy_(flags)

    def _flags(self, used: list[bool]) -> Tensor:
        header = self._headers[0]
        flags = [float(is_used) for is_used in used] + [0.0] * (header.shape[-1] - len(used))
        # From pinned memory the copy is asynchronous, so that the host does not wait.
        made = torch.tensor(flags, dtype=header.dtype, pin_memory=header.is_cuda)
        return made.to(header.device, non_blocking=True)
