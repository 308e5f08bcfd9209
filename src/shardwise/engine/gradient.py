"""The gradients of one group, from autograd to the shards.

==========  ==============================================================  ==============================
state       where this rank's gradients are                                 leaves by
==========  ==============================================================  ==============================
empty       nowhere                                                         ``collect``
local       summed in a flat full-size buffer, not reduced yet              ``reduce``
reducing    on their way; the buffer must not be touched                    ``finish``
partial     summed over ``dp_shard`` only (accumulation defer_replicate)    a later microbatch's ``reduce``
done        on the shards' ``.grad``, set or added to what was there
==========  ==============================================================  ==============================

On a mesh with ``dp_replicate`` a reduction is a chain: the sum inside the group, then the sum of what the rank holds of
it over the groups, then one division. The second lies where ``.grad`` will be, not in a buffer that others use: it may
travel while the next units' gradients are collected.

The full-size buffer is the group's own. It has memory from the first gradient to the end of its reduction. Where a row
replicates gradients (``ddp``, ``zero1``, and wherever one rank's slice is the whole) ``.grad`` lives in such a buffer,
reduced in place; while it does, a further backward collects in a second one.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    """Bytes that have memory now, and the most so far."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that have been allocated; freed ones, if the number is negative."""
        self.live += num_bytes
        self.most = max(self.most, self.live)


class GradientMemory(Meter):
    """The full-size gradient buffers of a model that have memory now, and small constants that groups share.

    Args:
        limit: Buffers of one kind in use at once. A group that needs one more waits for the oldest reduction; if none
            is under way (an enclosing unit, or local accumulation, holds them) it gets one all the same.
        drain: Finishes the oldest reduction under way; returns False if there is none.
    """

    def __init__(self, limit: int, drain: Callable[[], bool]) -> None:
        super().__init__()
        self.limit = limit
        self._drain = weakref.WeakMethod(drain)  # it is a method of whoever holds this object
        self._num_in_use: Counter[Hashable] = Counter()
        self._constants: dict[Hashable, Tensor] = {}

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A small tensor that never changes, made at the first call and shared by all who name the same key."""
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def take(self, kind: Hashable, num_bytes: int) -> None:
        """A buffer of a kind is about to get memory."""
        drain = self._drain()
        while self._num_in_use[kind] >= self.limit and drain is not None and drain():
            pass
        self._num_in_use[kind] += 1
        self.add(num_bytes)

    def give(self, kind: Hashable, num_bytes: int) -> None:
        """The memory of a buffer of a kind has been freed."""
        self._num_in_use[kind] -= 1
        self.add(-num_bytes)


class _Kept(NamedTuple):
    """A :class:`GradientStorage` whose memory is freed; ``holders`` as of ``torch_private.num_holders``."""

    tensor: Tensor
    plain: list[Tensor]
    views: list[Tensor]
    full: FlatBuffer | None
    flats: list[Tensor]
    holders: tuple[int, int]


class GradientStorage:
    """The memory of ``.grad`` of a group's shards, which it has from the first gradient to ``zero_grad()``.

    Attributes:
        tensor: The memory, laid out as the master is: a slice of :attr:`full`, or memory of its own.
        views: One view of :attr:`tensor` for each parameter: its ``.grad``.
        plain: The same views as plain tensors.
        as_part: Makes a gradient (of a shard), of which other ranks hold other parts, one that refuses norms.
        is_apart: ``.grad`` never lives in the buffer that is reduced.
        full: The group's own full-size gradient buffer, where ``.grad`` lives in one.
        flats: Views over several parameters, which are ``.grad`` of flat ones.
        is_lent: ``.grad`` is there for one update alone (the optimizer steps inside backward).
    """

    def __init__(self, group: Group, as_part: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        self.group = group
        self.as_part = as_part
        self.is_apart = group.facts.is_reduced_apart
        self.tensor: Tensor | None = None
        self.views: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.full: FlatBuffer | None = None
        self.flats: list[Tensor] = []
        self.is_lent = False
        self._lent: tuple[Tensor, list[Tensor]] | None = None
        self._kept: _Kept | None = None

    def make(self, *, is_filled: bool = True) -> Tensor:
        """The memory, allocated at the first call; zeros, unless a whole sum is about to be written to it."""
        if self.tensor is not None:
            return self.tensor
        kept, self._kept = self._kept, None
        if kept is None:
            return self._make(is_filled=is_filled)
        self.tensor, self.plain, self.views, self.full, self.flats, self._holders = kept
        allocate(self._memory)
        if is_filled and self._memory is self.tensor:
            self.tensor.zero_()
        return self.tensor

    @property
    def _memory(self) -> Tensor:
        """The memory of which :attr:`tensor` is all or a part."""
        assert self.tensor is not None
        return self.tensor if self.full is None or self.is_apart else self.full.memory

    def _make(self, *, is_filled: bool) -> Tensor:
        group, gradient = self.group, self.group.gradient
        if not gradient.is_pooled:
            self.full = gradient.make_buffer()
        if self.full is None or self.is_apart:
            numel = gradient.layout.slice_numel(group.rank)
            if is_filled:
                self.tensor = group.form.zeros(group, numel)
            else:
                self.tensor = torch.empty(numel, dtype=group.dtype, device=group.device)
        else:
            self.tensor = self.full.memory[gradient.layout.slice_of(group.rank)]
        self.plain = self.views = group.held_views(self.tensor)
        if group.facts.holds_part:
            self.views = [self.as_part(view, shard) for view, shard in zip(self.plain, group.shards, strict=True)]
        self._holders = self._count_holders()
        return self.tensor

    def _count_holders(self) -> tuple[int, int]:
        return torch_private.num_holders([self._memory, *self.plain, *self.views, *self.flats])

    def hold(self, make: Callable[[], tuple[Tensor, Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return what ``make`` makes, held by the caller as long as this object: the memory, a new view, known ones."""
        if self.is_lent:
            return make()
        before = self._count_holders()
        made = make()
        self.flats.append(made[1])
        after = self._count_holders()
        self._holders = self._holders[0] + after[0] - before[0], self._holders[1] + after[1] - before[1]
        return made

    def free(self) -> None:
        """Free the memory. Where the user holds a gradient, it is left to them, and made anew for the next one."""
        if self.tensor is not None and not self.is_lent and self._count_holders() == self._holders:
            free(self._memory)
            self._kept = _Kept(self.tensor, self.plain, self.views, self.full, self.flats, self._holders)
        self.tensor = self.full = None
        self.views, self.plain, self.flats = [], [], []

    def lend(self) -> None:
        """Keep ``.grad``, from now on, where the sum is or, if it is cast, in memory that is freed after it."""
        self.is_lent = True
        self.free()

    @property
    def _is_cast(self) -> bool:
        return self.group.reduce_dtype is not self.group.dtype

    def borrow(self, result: Tensor) -> None:
        """Keep ``.grad`` for one update in ``result``, the sum; if it is cast, in memory next to it."""
        if self._lent is None:  # a rank's place in the buffer of a group is always the same
            memory = torch.empty(len(result), dtype=self.group.dtype, device=result.device) if self._is_cast else result
            self._lent = memory, self.group.held_views(memory)
        elif self._is_cast:
            allocate(self._lent[0])
        self.tensor, self.plain = self._lent
        self.views = self.plain  # the optimizer alone sees them

    def give_back(self) -> None:
        """End :meth:`borrow`: ``.grad`` is taken off the shards."""
        for shard in self.group.shards:
            shard.grad = None
        if self.tensor is not None and self._is_cast:
            free(self.tensor)
        self.free()


class Gradient:
    """Collects and reduces the gradients of ``group``.

    Attributes:
        layout: Flat layout of the full-size buffer.
        storage: Where ``.grad`` lives.
        is_pooled: The full-size buffer is there during a backward alone. Else ``.grad`` lies in it.
        result: Where the sum under way arrives.
        has_added: A reduced gradient was added to what an earlier backward had left in ``.grad``.
    """

    def __init__(self, group: Group, as_part: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        facts = group.facts
        self.group = group
        self.layout = facts.reduce_layout
        self.storage = GradientStorage(group, as_part)
        self._kind: Hashable = (group.dtypes, facts.is_expert)
        self._num_bytes = self.layout.numel * group.reduce_dtype.itemsize
        self.is_pooled = facts.pools_gradients
        self.divide_by(facts.num_ranks)
        # Of these parameters this rank owns nothing: .grad stays None, and optimizers pass over them.
        self._is_elsewhere = [
            held.numel == 0 < spec.numel for held, spec in zip(group.held, group.layout.params, strict=True)
        ]
        first_flag = self.layout.data_numel(self.layout.place(group.rank))
        self._flags = slice(first_flag, first_flag + len(group.shards))  # in what this rank gets of a sum
        self._local: FlatBuffer | None = None
        self._scratch: FlatBuffer | None = None  # which has memory during a backward alone
        self._written = [False] * len(group.shards)  # parameter i's elements of ``_local`` are this rank's gradient
        self._shown: dict[int, Tensor] = {}  # views of ``_local`` that are .grad of full parameters
        self._used: list[bool] = []
        self.result: Tensor | None = None
        self._partial: Tensor | None = None  # summed over dp_shard by earlier microbatches, not over dp_replicate yet
        self.partial_store: Tensor | None = None  # where that lies if it cannot lie where ``.grad`` does
        self._maybe_unused: list[int] = []  # only the flags in ``storage`` say whether a rank used them
        self._is_borrowing = False
        self.has_added = False

    @property
    def is_local(self) -> bool:
        """Gradients of this rank wait for a reduction, or for the rest of one."""
        return self._local is not None or self._partial is not None

    @property
    def has_sums(self) -> bool:
        """Some ``.grad`` is there from an earlier backward, to be added to."""
        if self._maybe_unused:
            return True
        with torch_private.without_torch_function():
            for shard in self.group.shards:
                if torch_private.grad.__get__(shard) is not None:  # not by way of Shard.grad, on a hot path
                    return True
        return False

    @property
    def held_buffers(self) -> tuple[Tensor | None, ...]:
        """The memory of ``.grad``, and sums that wait."""
        return self.storage.tensor, None if self.storage.full is None else self.storage.full.memory, self.partial_store

    @property
    def scratch(self) -> Tensor | None:
        """The full-size buffer that has memory during a backward alone."""
        return None if self._scratch is None else self._scratch.memory

    @property
    def lies_in_parameters(self) -> bool:
        """Some gradient is memory of the unit's parameters: a function has returned a view of one as gradient."""
        groups = self.group.unit.groups
        gathered = [group.gathered.untyped_storage().data_ptr() for group in groups if group.is_allocated]
        for full in self.group.unsharded:  # a plain loop: once for each parameter in each step
            grad = full.grad
            if grad is not None and grad.layout is torch.strided and grad.untyped_storage().data_ptr() in gathered:
                return not grad.is_meta
        return False

    def divide_by(self, num_ranks: int) -> None:
        """Divide sums by ``num_ranks`` from now on."""
        self._divisors = divisors(num_ranks, dtype_name(self.group.reduce_dtype))  # before and after the sum

    # -- empty -> local

    def collect(self, memory: GradientMemory) -> None:
        """Move what gradients there are on the full parameters into the flat buffer, and free them."""
        views, written = self._begin(memory), self._written
        if not any(written) and self._collect_all(views):
            return
        copy_to: list[Tensor] = []
        copies: list[Tensor] = []
        add_to: list[Tensor] = []
        terms: list[Tensor] = []
        for index, full in enumerate(self.group.unsharded):
            grad = full.grad
            if grad is None or grad is self._shown.get(index):
                continue
            if self._shown.pop(index, None) is not None:  # autograd has put the whole sum elsewhere
                written[index] = False
            full.grad = None
            targets, sources = (add_to, terms) if written[index] else (copy_to, copies)
            written[index] = True
            targets += views.by_param[index]
            sources += self._cut(index, grad)
        _each(torch._foreach_add_, add_to, terms)
        _each(torch._foreach_copy_, copy_to, copies)

    def _collect_all(self, views: FlatBuffer) -> bool:
        """As :meth:`collect` where every parameter has its first gradient, as in nearly every backward; else False."""
        unsharded = self.group.unsharded
        grads = [grad for full in unsharded if (grad := full.grad) is not None and grad.layout is torch.strided]
        if len(grads) < len(unsharded):
            return False
        for full in unsharded:
            full.grad = None
        self._written = [True] * len(unsharded)
        for index in views.divided:  # the last one first
            grads[index : index + 1] = self._cut(index, grads[index])
        _each(torch._foreach_copy_, views.every, grads)
        return True

    def show(self) -> None:
        """Make autograd add later gradients to those in the flat buffer itself, where one lies there in one piece.

        It must not be moved until :meth:`reduce`.
        """
        group = self.group
        if self._local is None or group.compute_dtype is not group.reduce_dtype:
            return  # a gradient has the dtype of its parameter
        for index, views in enumerate(self._local.by_param):
            if self._written[index] and index not in self._shown and index not in self._local.divided:
                self._shown[index] = group.unsharded[index].grad = views[0]

    def _hide(self) -> None:
        for index in self._shown:
            self.group.unsharded[index].grad = None
        self._shown.clear()

    def local_views(self, index: int, memory: GradientMemory) -> list[Tensor]:
        """This rank's gradient of one parameter, to be changed there, in the :meth:`parts` of the flat buffer.

        Where there is none yet it is -0.0 from now on.
        """
        self.collect(memory)
        views = self._begin(memory).by_param[index]
        if not self._written[index]:
            _fill_with_nothing(views)
            self._written[index] = True
        return views

    def add(self, index: int, grad: Tensor, memory: GradientMemory) -> None:
        """Add to this rank's gradient of one parameter, which came otherwise than through the full parameter."""
        _each(torch._foreach_add_, self.local_views(index, memory), self._cut(index, grad))

    def has_collected(self, index: int) -> bool:
        """Whether sums of earlier microbatches have a gradient of parameter ``index``, and ``.grad`` would show it."""
        is_used = self._written[index] or (self._partial is not None and self._used[index])
        return is_used and not self._is_elsewhere[index]

    def forget(self, index: int) -> None:
        """Drop what earlier microbatches have collected for parameter ``index``."""
        self._written[index] = False
        if self._shown.pop(index, None) is not None:
            self.group.unsharded[index].grad = None
        if self._partial is not None:
            self._used[index] = False
            self.group.held_view(index, self._partial).zero_().neg_()
            self._flags_in(self._partial)[index] = 0

    def make_buffer(self) -> FlatBuffer:
        """A full-size buffer, with memory."""
        return FlatBuffer(self.layout, self.group.reduce_dtype, self.group.device)

    def _begin(self, memory: GradientMemory) -> FlatBuffer:
        """Return a buffer to collect in, allocated at the first call."""
        if self._local is not None:
            return self._local
        home = self.storage
        if self.is_pooled or home.is_lent or (not home.is_apart and self.has_sums):
            memory.take(self._kind, self._num_bytes)
            if self._scratch is None:
                self._scratch = self.make_buffer()
            allocate(self._scratch.memory)
            self._is_borrowing = True
            self._local = self._scratch
        else:
            home.make()
            self._local = home.full
        assert self._local is not None
        return self._local

    def _cut(self, index: int, grad: Tensor) -> list[Tensor]:
        """The gradient in the parts in which the flat buffer holds it."""
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
        """Views of all elements of a parameter, as they lie in memory, in the parts in which the buffer holds them."""
        return _views(dense, self.layout, index, self.layout.dense_rows[index])

    # -- local -> reducing

    def reduce(self, memory: GradientMemory, *, is_last: bool = True) -> Handle:
        """Complete the local gradients and issue their reduction.

        A missing gradient travels as -0.0, the exact identity of addition, with 0 as its flag.

        Args:
            memory: Counts the buffers in use.
            is_last: Later microbatches do not add to it: the sum goes on over ``dp_replicate`` where there is one.

        Collective:
            As ``Form.reduce``. Then, when the handle advances, all-reduce on ``dp_replicate`` of what the rank holds.
        """
        group = self.group
        views = self._begin(memory)
        self._hide()
        views.set_flags(self._written, memory)
        if not all(self._written):
            _fill_with_nothing(
                [t for i, is_there in enumerate(self._written) if not is_there for t in views.by_param[i]]
            )
        if views.gaps:
            torch._foreach_zero_(views.gaps)
        buffer = views.memory
        self._local = None
        partial, self._partial = self._partial, None
        if partial is None:
            self._used = self._written
        else:
            self._used = [before or now for before, now in zip(self._used, self._written, strict=True)]
        self._written = [False] * len(self._written)
        before, after = self._divisors
        if before != 1:
            buffer.div_(before)
        replicate = group.comms.replicate
        self.result = self._place_of_sum(buffer, partial)
        inside = group.form.reduce(group, buffer, self.result, after if replicate is None else 1)
        if replicate is None:
            return group.form.arrive(group, inside)
        if partial is not None or not is_last:
            return Chain(inside, lambda: self._add_up(replicate, memory, partial, is_last=is_last))
        is_home = self.result is self.storage.tensor

        def arrived() -> None:
            if is_home:
                self._give_back(memory)  # the sum is not in the borrowed buffer

        return replicate.follow(inside, lambda: self._go_across(replicate), arrived)

    def _place_of_sum(self, buffer: Tensor, partial: Tensor | None) -> Tensor:
        """The place of the sum over ``dp_shard``: straight where ``.grad`` lives if that is free, else in place."""
        if not self.group.facts.row.shards_optimizer:
            return buffer
        is_free = not (self.storage.is_lent or self.storage.is_apart or self.has_sums)
        if self.is_pooled and is_free and partial is None:
            return self.storage.make(is_filled=False)
        return buffer[self.layout.slice_of(self.group.rank)]

    def _add_up(self, replicate: Comm, memory: GradientMemory, partial: Tensor | None, *, is_last: bool) -> Handle:
        """The sum inside the group is there: add it to that of earlier microbatches; go on over the groups at last."""
        result = self.result
        assert result is not None
        if partial is not None:
            result = partial.add_(result)
        elif result is not self.storage.tensor:
            if self.partial_store is None:
                self.partial_store = torch.empty_like(result)
            result = self.partial_store.copy_(result)
        self._give_back(memory)  # the sum has left the borrowed buffer
        if not is_last:
            self._partial, self.result = result, None
            return Done()
        self.result = result
        return self._go_across(replicate)

    def _go_across(self, replicate: Comm) -> Handle:
        """Add up the sums of the groups."""
        assert self.result is not None
        across = replicate.all_reduce(self.result, unit=self.group.unit.name, divisor=self._divisors[1])
        return self.group.form.arrive(self.group, across)

    def free(self) -> None:
        """Free what ``.grad`` lived in, once it is gone."""
        home = self.storage
        is_kept = self.group.facts.is_offloaded  # pinned memory is dear to allocate
        if is_kept or home.tensor is None or home.is_lent or self.is_local or self.has_sums:
            return
        home.free()

    # -- reducing -> empty

    def finish(self, memory: GradientMemory) -> None:
        """Put the reduced gradients on the shards: set where there was none, add where there was one.

        A parameter that no rank used is left alone. Whether another rank used one that this rank did not, the header
        tells, on the device. The host does not wait for it: it asks at the end of backward (:func:`read_unused_flags`).
        """
        result, home = self.result, self.storage
        if result is None:
            return  # it waits for the last microbatch
        if home.is_lent:
            home.borrow(result)
        is_home = result.data_ptr() == home.make().data_ptr()
        if self._maybe_unused or not is_home:
            self.group.form.wait_for_host()  # the host is about to read it, where it is there
        if self._maybe_unused:  # the second reduction of one backward
            read_unused_flags([self])
        self._put(result, is_home=is_home)
        self.result = None
        if home.is_lent:
            read_unused_flags([self])  # the optimizer steps now
        else:
            self._give_back(memory)

    @torch_private.on_plain_tensors
    def _put(self, result: Tensor, *, is_home: bool) -> None:
        """Put what was reduced on the shards, as far as the host knows that some rank has used them."""
        group, used, home = self.group, self._used, self.storage
        assert home.tensor is not None
        views = home.plain if is_home else group.held_views(result)
        flags = self._flags_in(result)
        # One rank alone has no doubts; in a dry run nobody else is there.
        has_doubts = not all(used) and group.facts.num_ranks > 1 and flags.numel() > 0 and not result.is_meta
        for index, shard in enumerate(group.shards):
            if self._is_elsewhere[index] or not (used[index] or has_doubts):
                continue
            grad = shard.grad
            if grad is not None:
                grad = home.plain[index] if grad is home.views[index] else grad
                grad.add_(views[index])  # -0.0, where no rank used it, changes nothing
                self.has_added = True
                continue
            if not is_home:
                home.plain[index].copy_(views[index])
            if used[index]:
                shard.grad = home.views[index]
            else:
                self._maybe_unused.append(index)
        if self._maybe_unused and not is_home:
            self._flags_in(home.tensor).copy_(flags)

    def _flags_in(self, reduced: Tensor) -> Tensor:
        """The flags in this rank's slice of what was reduced, or in what is laid out as that slice is."""
        return reduced[self._flags]

    @property
    def unread_flags(self) -> Tensor | None:
        """The flags that the host has yet to read, if there are any."""
        return self._flags_in(self.storage.make()) if self._maybe_unused else None

    @torch_private.on_plain_tensors
    def show_used(self, flags: Sequence[float]) -> None:
        """Set ``.grad`` of the parameters that other ranks alone have used; ``flags`` as :attr:`unread_flags`."""
        for index in self._maybe_unused:
            if flags[index] > 0:
                self.group.shards[index].grad = self.storage.views[index]
        self._maybe_unused = []

    # -- .grad in borrowed buffers

    def release_storage(self, memory: GradientMemory) -> None:
        """Take ``.grad`` off the shards and free what it lived in (after :meth:`GradientStorage.lend`)."""
        self.storage.give_back()
        self._give_back(memory)

    def drop(self, memory: GradientMemory) -> None:
        """Forget gradients that are not on the shards: a backward failed, or ``zero_grad()`` has dropped them."""
        self._shown.clear()
        for full in self.group.unsharded:
            full.grad = None
        self._written = [False] * len(self._written)
        self._local = self.result = self._partial = None
        self._maybe_unused = []
        if self.storage.is_lent:
            self.storage.give_back()
        self._give_back(memory)

    def _give_back(self, memory: GradientMemory) -> None:
        if self._is_borrowing and self._scratch is not None:
            self._is_borrowing = False
            free(self._scratch.memory)
            memory.give(self._kind, self._num_bytes)


def _fill_with_nothing(tensors: list[Tensor]) -> None:
    """Fill with -0.0, which changes nothing when it is added."""
    if tensors:
        torch._foreach_zero_(tensors)
        torch._foreach_neg_(tensors)


def _each(change: Callable[..., object], targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy or add each source. On CUDA one launch does all of them, unless the strides of a single pair differ."""
    even: list[tuple[Tensor, Tensor]] = []
    odd: list[tuple[Tensor, Tensor]] = []
    for pair in zip(targets, sources, strict=True):
        (even if pair[0].stride() == pair[1].stride() else odd).append(pair)
    for pairs in (even, *([pair] for pair in odd)):
        if pairs:
            change([target for target, _ in pairs], [source for _, source in pairs])


def read_unused_flags(gradients: Iterable[Gradient]) -> None:
    """Read for which parameters other ranks have sent gradients, and set ``.grad`` there: with one wait a device."""
    asking: dict[torch.device, list[tuple[Gradient, Tensor]]] = {}
    for gradient in gradients:
        flags = gradient.unread_flags
        if flags is not None:
            asking.setdefault(flags.device, []).append((gradient, flags))
    for found in asking.values():
        values = iter(torch.cat([flags.float() for _, flags in found]).tolist())
        for gradient, flags in found:
            gradient.show_used(list(itertools.islice(values, len(flags))))


def _views(buffer: Tensor, layout: ReduceLayout, index: int, rows: Sequence[Rows]) -> list[Tensor]:
    """Views of a parameter that has these rows in a buffer: one, or one of each row where it is divided."""
    if layout.is_divided(index):
        return _of_rows(buffer, rows)
    spec = layout.group.params[index]
    return [buffer.as_strided(spec.shape, spec.strides, buffer.storage_offset() + rows[0].offset)]


def _of_rows(buffer: Tensor, rows: Sequence[Rows]) -> list[Tensor]:
    first = buffer.storage_offset()
    return [buffer.as_strided((r.count, r.numel), (r.step, 1), first + r.offset) for r in rows]


def allocate(flat: Tensor) -> None:
    """Allocate the memory of ``flat``, which :func:`free` has freed, with any content."""
    flat.untyped_storage().resize_(flat.numel() * flat.itemsize)


def free(flat: Tensor) -> None:
    """Give the memory of ``flat`` back to torch's allocator. The tensor and its views stay, without content."""
    flat.untyped_storage().resize_(0)


class FlatBuffer:
    """A full-size buffer and its views, made once: where each gradient goes, the gaps, and the flags.

    Attributes:
        memory: The buffer. Its memory may be freed and allocated again.
        by_param: The views of each parameter: one in its shape, or one for each of its rows in ``layout``.
        every: All of them, in order.
        divided: Numbers of the parameters that have rows or nothing, the last one first.
        gaps: What no gradient is written to.
    """

    def __init__(self, layout: ReduceLayout, dtype: torch.dtype, device: torch.device) -> None:
        params = layout.group.params
        self.memory = torch.empty(layout.numel, dtype=dtype, device=device)
        self.divided = [index for index in reversed(range(len(params))) if layout.is_divided(index)]
        self.by_param = [_views(self.memory, layout, index, rows) for index, rows in enumerate(layout.rows)]
        self.every = [view for held in self.by_param for view in held]
        self.gaps = [self.memory[start:stop] for start, stop in layout.gaps]
        self._headers = _of_rows(self.memory, layout.header_rows)

    def set_flags(self, used: list[bool], memory: GradientMemory) -> None:
        """Write the headers: 1 for each parameter that this rank's backward used."""
        if not self._headers:
            return  # every slice is empty
        key = len(used), self._headers[0].shape[-1], self.memory.dtype
        flags = memory.constant(key, lambda: self._flags(used)) if all(used) else self._flags(used)
        for header in self._headers:
            header.copy_(flags)

    def _flags(self, used: list[bool]) -> Tensor:
        header = self._headers[0]
        flags = [float(is_used) for is_used in used] + [0.0] * (header.shape[-1] - len(used))
        # From pinned memory the copy is enqueued; the host does not wait.
        made = torch.tensor(flags, dtype=header.dtype, pin_memory=header.is_cuda)
        return made.to(header.device, non_blocking=True)
