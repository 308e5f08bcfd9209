"""The gradients of one group, from autograd to the shards.

==========  ==============================================================  ==============================
state       where this rank's gradients are                                 leaves by
==========  ==============================================================  ==============================
empty       nowhere                                                         the first gradient: ``collect``
local       summed in a flat full-size buffer, not reduced yet              ``reduce``
reducing    on their way; the buffer must not be touched                    ``finish``
partial     summed over ``dp_shard`` only (accumulation defer_replicate)    a later microbatch's ``finish``
empty       on the shards' ``.grad``, set or added to what was there
==========  ==============================================================  ==============================

On a mesh with ``dp_replicate`` a reduction is a chain: the sum inside the group, then the sum of what the rank holds of
it over the groups, then one division. The second lies where ``.grad`` will be, not in a buffer that others use: it may
travel while the next units' gradients are collected.

The full-size buffer is borrowed from the pool where the row pools gradients, and the group's own where it does not
(``ddp``, ``zero1``, and wherever one rank's slice is the whole: there ``.grad`` lives in it, reduced in place). While
``.grad`` occupies the group's own buffer, a further backward borrows one too.

Between backwards, ``.grad`` of a group with sums in ``local`` or ``partial`` is a stand-in (``waiting``), by whose
absence the next backward sees which sums ``zero_grad()`` has dropped.

Where the optimizer steps inside backward (``in_backward``) ``.grad`` lives in borrowed buffers, from ``finish`` to
``release_home``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.comm.base import Chain, Comm, Done, Handle
from shardwise.comm.dtype import dtype_name
from shardwise.engine.pool import GradientPool, contiguous_stride, memory_order
from shardwise.features.waiting_gradient import WaitingGradient
from shardwise.forms.host import host_zeros
from shardwise.forms.packed import reduce_packed
from shardwise.optim.partial import PartialGradient
from shardwise.spec.errors import StateError
from shardwise.spec.layout import ReduceLayout
from shardwise.spec.memory.footprint import size_class
from shardwise.spec.precision import divisors

if TYPE_CHECKING:
    from shardwise.engine.group import Group


class Gradient:
    """Collects and reduces the gradients of ``group``."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self.layout: ReduceLayout = group.reduce_layout
        self.pool_key: Hashable = (size_class(self.layout.numel), group.reduce_dtype, group.is_expert)
        self._is_cast = group.reduce_dtype is not group.dtype
        self._is_apart = self._is_cast or group.offload is not None  # .grad never lives in the buffer that is reduced
        # Where one rank has all of it, .grad can be what was collected, with nothing copied.
        self._is_pooled = group.row.pools_gradients and (group.layout.size > 1 or self._is_apart)
        self.divide_by(group.num_ranks)
        self._pieces = [[p for p in self.layout.pieces if p.index == i] for i in range(len(group.shards))]
        # Of these parameters this rank owns nothing: .grad stays None, and optimizers pass over them.
        self._is_elsewhere = [
            held.numel == 0 < spec.numel for held, spec in zip(group.held, group.layout.params, strict=True)
        ]
        self._views: dict[int, BufferViews] = {}
        self._home: Tensor | None = None  # where .grad of the shards lives: a slice, or the whole
        self._own: Tensor | None = None  # the group's own full-size buffer, which contains ``_home``
        self._home_views: list[Tensor] = []
        self._home_key: Hashable = None  # of a buffer for ``_home`` in the pool, where one is needed
        self._is_home_lent = False
        self.keeps_home = True  # ... from step to step
        self._lent: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._local: Tensor | None = None
        self._local_views: BufferViews | None = None
        self._borrowed: Tensor | None = None
        self._written = [False] * len(group.shards)  # parameter i's elements of ``_local`` are this rank's gradient
        self._shown: dict[int, Tensor] = {}  # views of ``_local`` that are .grad of full parameters
        self._used: list[bool] = []
        self._result: Tensor | None = None
        self._partial: Tensor | None = None  # summed over dp_shard by earlier microbatches, not over dp_replicate yet
        self._partial_store: Tensor | None = None  # where that lies if it cannot lie in ``_home``
        self._doubtful: list[int] = []  # parameters of which only the flags at ``_home`` say whether a rank used them
        self.has_added = False  # a reduced gradient was added to what an earlier backward had left in .grad
        self._stand_ins: dict[int, WaitingGradient] = {}  # what .grad of parameter i is while sums wait ...
        self._hidden: dict[int, Tensor | None] = {}  # ... and what it was before; empty while no stand-in is shown
        self._landing: Tensor | None = None  # on the host, for a sum that cannot go straight to ``_home``

    @property
    def group(self) -> Group:
        """The group, which holds this object."""
        group = self._group()
        assert group is not None
        return group

    @property
    def is_local(self) -> bool:
        """Gradients of this rank wait for a reduction, or for the rest of one."""
        return self._local is not None or self._partial is not None

    @property
    def _has_sums(self) -> bool:
        """Some ``.grad`` is there from an earlier backward, to be added to."""
        if self._doubtful:
            return True
        for shard in self.group.shards:  # noqa: SIM110 - on a hot path
            if shard.grad is not None:
                return True
        return False

    @property
    def held_buffers(self) -> tuple[Tensor | None, ...]:
        """What this object keeps for good: where ``.grad`` lives, and sums that wait. Borrowed ones are not."""
        return self._home, self._own, self._partial_store

    @property
    def home_buffers(self) -> tuple[Tensor | None, ...]:
        """Those of them that are on the host where ``.grad`` is: where it lives, and where sums land."""
        return self._home, self._landing

    def home(self) -> tuple[Tensor, list[Tensor]]:
        """Where ``.grad`` of the shards lives, laid out as the master is, and its views of the shards' shapes."""
        self._make_home()
        assert self._home is not None
        return self._home, self._home_views

    def divide_by(self, num_ranks: int) -> None:
        """Divide sums by ``num_ranks`` from now on."""
        self._divisors = divisors(num_ranks, dtype_name(self.group.reduce_dtype))  # before and after the sum

    # -- empty -> local

    def collect_one(self, index: int, pool: GradientPool) -> None:
        """Move the gradient of one parameter into the flat buffer and free it."""
        full = self.group.fulls[index]
        if full.grad is None or self._shown:  # the hook that calls this also fires for an undefined gradient
            return
        targets = self._begin(pool).by_param[index]
        sources = self._cut(index, full.grad)
        full.grad = None
        if self._written[index]:
            torch._foreach_add_(targets, sources)
        elif targets:
            torch._foreach_copy_(targets, sources)
        self._written[index] = True

    def collect(self, pool: GradientPool) -> None:
        """Move what gradients there are on the full parameters into the flat buffer, and free them."""
        views, written = self._begin(pool), self._written
        if views.single is not None and not any(written):
            grads = [grad for full in self.group.fulls if (grad := full.grad) is not None]
            is_dense = all([grad.layout is torch.strided for grad in grads])  # noqa: C419 - on a hot path
            if is_dense and len(grads) == len(views.single):  # as in nearly every backward
                for full in self.group.fulls:
                    full.grad = None
                self._written = [True] * len(written)
                torch._foreach_copy_(views.single, grads)
                return
        by_param = views.by_param
        copy_to: list[Tensor] = []
        copies: list[Tensor] = []
        add_to: list[Tensor] = []
        terms: list[Tensor] = []
        for index, full in enumerate(self.group.fulls):
            grad = full.grad
            if grad is None or grad is self._shown.get(index):
                continue
            if index in self._shown:  # autograd has put the whole sum elsewhere
                self._written[index] = False
            full.grad = None
            targets, sources = (add_to, terms) if written[index] else (copy_to, copies)
            written[index] = True
            places = by_param[index]
            if len(places) == 1 and grad.layout is torch.strided:
                targets.append(places[0])
                sources.append(grad)
            else:
                targets += places
                sources += self._cut(index, grad)
        if terms:
            torch._foreach_add_(add_to, terms)
        if copies:
            torch._foreach_copy_(copy_to, copies)

    def show(self) -> None:
        """Let autograd add later gradients to those in the flat buffer itself, where one lies there in one piece.

        It must not be moved until :meth:`reduce`.
        """
        group = self.group
        if self._local_views is None or group.compute_dtype is not group.reduce_dtype:
            return  # a gradient has the dtype of its parameter
        for index, views in enumerate(self._local_views.by_param):
            if self._written[index] and index not in self._shown and len(views) == 1:
                self._shown[index] = group.fulls[index].grad = views[0]

    def _hide(self) -> None:
        for index in self._shown:
            self.group.fulls[index].grad = None
        self._shown.clear()

    def local_views(self, index: int, pool: GradientPool) -> list[Tensor]:
        """This rank's gradient of one parameter, in the pieces in which the flat buffer holds it, to be changed there.

        Where there is none yet it is -0.0 from now on.
        """
        self.collect(pool)
        views = self._begin(pool).by_param[index]
        if not self._written[index]:
            torch._foreach_zero_(views)
            torch._foreach_neg_(views)
            self._written[index] = True
        return views

    def _begin(self, pool: GradientPool) -> BufferViews:
        """Have a buffer to collect in; returns its views."""
        if self._local_views is not None:
            return self._local_views
        group = self.group
        if self._is_pooled or self._is_home_lent or (not self._is_apart and self._has_sums):
            self._borrowed = pool.take(self.pool_key, group.reduce_dtype, group.device)
            self._local = self._borrowed
        else:
            self._make_home()
            self._local = self._own
        assert self._local is not None
        key = torch_private.storage_identity(self._local)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = BufferViews(self.layout, self._pieces, self._local, pool)
        self._local_views = views
        return views

    def _cut(self, index: int, grad: Tensor) -> list[Tensor]:
        """The gradient in the pieces in which the flat buffer holds it."""
        pieces = self._pieces[index]
        if grad.layout is not torch.strided:
            raise StateError(
                f"the gradient of {self.layout.group.params[index].name!r} is {grad.layout}; a flat buffer holds dense"
                " ones.\n  Build the embedding with sparse=False."
            )
        if len(pieces) == 1:
            return [grad]
        spec = self.layout.group.params[index]
        if grad.stride() != (spec.stride or contiguous_stride(spec.shape)):
            stride = spec.stride or contiguous_stride(spec.shape)
            grad = torch.empty_strided(spec.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        flat = memory_order(grad)
        return [flat[piece.start : piece.stop] for piece in pieces]

    # -- local -> reducing

    def reduce(self, pool: GradientPool, *, is_last: bool = True) -> Handle:
        """Complete the local gradients and issue their reduction.

        A missing gradient travels as -0.0, the exact identity of addition, with 0 as its flag.

        Args:
            pool: Where the buffer was borrowed.
            is_last: Later microbatches do not add to it: the sum goes on over ``dp_replicate`` where there is one.

        Collective:
            Reduce-scatter on ``dp_shard``, of experts ``edp`` (all-reduce where the optimizer is replicated);
            ``(n-1)/n`` (twice that) of the padded buffer is sent. Then, when the handle advances, all-reduce on
            ``dp_replicate`` of what the rank holds. Quantized: all-to-all of packed bytes (``forms.packed``). All ranks
            must call in the same order.
        """
        group = self.group
        comms = group.comms
        views = self._begin(pool)
        self._hide()
        views.set_flags(self._written)
        if not all(self._written):
            missing = [t for i, is_there in enumerate(self._written) if not is_there for t in views.by_param[i]]
            if missing:
                torch._foreach_zero_(missing)
                torch._foreach_neg_(missing)
        if views.gaps:
            torch._foreach_zero_(views.gaps)
        assert self._local is not None
        buffer = self._local[: self.layout.numel]
        self._local = self._local_views = None
        partial, self._partial = self._partial, None
        if partial is None:
            self._used = self._written
        else:
            self._used = [before or now for before, now in zip(self._used, self._written, strict=True)]
        self._written = [False] * len(self._written)
        before, after = self._divisors
        if before != 1:
            buffer.div_(before)
        if comms.replicate is not None:
            after = 1
        unit, result = group.unit.name, self._place_of_sum(buffer, partial)
        self._result = result
        if group.reduced_as is not None:
            inside = reduce_packed(group, comms.reduce, pool.packed, buffer, result, divisor=after)
        elif group.row.shards_optimizer:
            cuts = self.layout.uneven_cuts
            inside = comms.reduce.reduce_scatter(buffer, result, unit=unit, divisor=after, cuts=cuts)
        else:
            inside = comms.reduce.all_reduce(buffer, unit=unit, divisor=after)
        if comms.replicate is None:
            return self._send_home(inside, pool)
        return self._go_on(inside, comms.replicate, pool, partial, is_last=is_last)

    def _go_on(
        self, inside: Handle, replicate: Comm, pool: GradientPool, partial: Tensor | None, *, is_last: bool
    ) -> Handle:
        """What comes behind the sum inside the group: the sum over the groups, or over microbatches first."""
        if partial is not None or not is_last:
            return Chain(inside, lambda: self._add_up(replicate, pool, partial, is_last=is_last))
        is_home = self._result is self._home

        def arrived() -> None:
            if is_home:
                self._give_back(pool)  # the sum is not in the borrowed buffer

        return replicate.follow(inside, lambda: self._go_across(replicate, pool), arrived)

    def _place_of_sum(self, buffer: Tensor, partial: Tensor | None) -> Tensor:
        """Where the sum over ``dp_shard`` goes: straight to where ``.grad`` lives if that is free, else in place."""
        group = self.group
        if not group.row.shards_optimizer:
            return buffer
        is_free = not (self._is_home_lent or self._is_apart or self._has_sums)
        if self._is_pooled and is_free and partial is None:
            self._make_home()
            assert self._home is not None
            return self._home
        return buffer[self.layout.slice_of(group.rank)]

    def _add_up(self, replicate: Comm, pool: GradientPool, partial: Tensor | None, *, is_last: bool) -> Handle:
        """The sum inside the group is there: add it to that of earlier microbatches; go on over the groups at last."""
        result = self._result
        assert result is not None
        if partial is not None:
            result = partial.add_(result)
        elif result is not self._home:
            if self._partial_store is None:
                self._partial_store = torch.empty_like(result)
            result = self._partial_store.copy_(result)
        self._give_back(pool)  # the sum has left the borrowed buffer
        if not is_last:
            self._partial, self._result = result, None
            return Done()
        self._result = result
        return self._go_across(replicate, pool)

    def _go_across(self, replicate: Comm, pool: GradientPool) -> Handle:
        """Add up the sums of the groups."""
        assert self._result is not None
        across = replicate.all_reduce(self._result, unit=self.group.unit.name, divisor=self._divisors[1])
        return self._send_home(across, pool)

    def _send_home(self, reduction: Handle, pool: GradientPool) -> Handle:
        """Where ``.grad`` lives on the host, have the sum sent there as soon as it is there."""
        group, result = self.group, self._result
        if group.offload is None or group.transfers is None:
            return reduction
        assert result is not None
        self._make_home()
        self._result = self._home
        if self._is_cast or self._has_sums:
            if self._landing is None:
                self._landing = host_zeros(result.numel(), result.dtype, group.device, pins=group.offload.pin_memory)
            self._result = self._landing
        assert self._result is not None
        return group.transfers.send(result, self._result, reduction, pool.packed)

    def _make_home(self) -> None:
        if self._home is not None:
            return
        group, layout = self.group, self.layout
        if not self._is_pooled:
            self._own = torch.zeros(layout.numel, dtype=group.reduce_dtype, device=group.device)
        if self._own is None or self._is_apart:
            self._home = group.home_zeros(layout.slice_numel(group.rank))
        else:
            self._home = self._own[layout.slice_of(group.rank)]
        self._home_views = group.held_views(self._home)
        if group.holds_part:
            first = next((i for i, held in enumerate(group.held) if held.numel), None)
            if first is not None:
                self._home_views[first] = PartialGradient.of(self._home_views[first])

    def free(self) -> None:
        """Free what ``.grad`` lived in, once it is gone."""
        if self.keeps_home or self._home is None or self._is_home_lent or self.is_local or self._has_sums:
            return
        if self._own is not None:
            self._views.pop(torch_private.storage_identity(self._own), None)
        self._home = self._own = None
        self._home_views = []

    # -- reducing -> empty

    def finish(self, pool: GradientPool) -> None:
        """Put the reduced gradients on the shards: set where there was none, add where there was one.

        A parameter that no rank used is left alone. Whether another rank used one that this rank did not, the header
        tells, on the device. The host does not wait for it: it asks at the end of backward (:func:`settle`).
        """
        group, result = self.group, self._result
        if result is None:
            return  # it waits for the last microbatch
        if self._is_home_lent:
            self._borrow_home(result, pool)
        self._make_home()
        assert self._home is not None
        is_home = result.data_ptr() == self._home.data_ptr()
        if group.transfers is not None and (self._doubtful or not is_home):
            group.transfers.synchronise()  # the host is about to read it
        if self._doubtful:  # the second reduction of one backward
            settle([self])
        self._put(result, is_home=is_home)
        self._result = None
        if self._is_home_lent:
            settle([self])  # the optimizer steps now
        else:
            self._give_back(pool)

    def _put(self, result: Tensor, *, is_home: bool) -> None:
        """Put what was reduced on the shards, as far as the host knows that some rank has used them."""
        group, used = self.group, self._used
        assert self._home is not None
        views = self._home_views if is_home else group.held_views(result)
        flags = self._flags_in(result)
        # One rank alone has no doubts; in a dry run nobody else is there.
        has_doubts = not all(used) and group.num_ranks > 1 and flags.numel() > 0 and not result.is_meta
        for index, shard in enumerate(group.shards):
            if self._is_elsewhere[index] or not (used[index] or has_doubts):
                continue
            if shard.grad is not None:
                shard.grad.add_(views[index])  # -0.0, where no rank used it, changes nothing
                self.has_added = True
                continue
            if not is_home:
                self._home_views[index].copy_(views[index])
            if used[index]:
                shard.grad = self._home_views[index]
            else:
                self._doubtful.append(index)
        if self._doubtful and not is_home:
            self._flags_in(self._home).copy_(flags)

    def _flags_in(self, reduced: Tensor) -> Tensor:
        """The flags in this rank's slice of what was reduced, or in what is laid out as that slice is."""
        return reduced[self.layout.data_numel(self.layout.place(self.group.rank)) :][: len(self.group.shards)]

    @property
    def doubtful_flags(self) -> Tensor | None:
        """The flags that the host has yet to read, if there are any."""
        if not self._doubtful:
            return None
        assert self._home is not None
        return self._flags_in(self._home)

    def show_used(self, flags: Sequence[float]) -> None:
        """Set ``.grad`` of the doubtful parameters that other ranks have used.

        Args:
            flags: What :attr:`doubtful_flags` holds.
        """
        for index in self._doubtful:
            if flags[index] > 0:
                self.group.shards[index].grad = self._home_views[index]
        self._doubtful = []

    # -- .grad in borrowed buffers

    def lend_home(self, pool: GradientPool) -> None:
        """Let ``.grad`` live in borrowed buffers from now on: the one that the sum is in or, for a cast, another."""
        self._is_home_lent = True
        self._home = self._own = None
        self._home_views = []
        self._views.clear()
        if self._is_cast:
            numel = self.layout.slice_numel(self.group.rank)
            self._home_key = ("home", size_class(numel), self.group.dtype)
            pool.announce(self._home_key, numel)

    def _borrow_home(self, result: Tensor, pool: GradientPool) -> None:
        home = pool.take(self._home_key, self.group.dtype, self.group.device) if self._is_cast else result
        key = torch_private.storage_identity(home)
        if key not in self._lent:  # a rank's place in a buffer is always the same
            self._lent[key] = home, self.group.held_views(home)
        self._home, self._home_views = self._lent[key]

    def release_home(self, pool: GradientPool) -> None:
        """Take ``.grad`` off the shards and give back the buffers that it lived in."""
        for shard in self.group.shards:
            shard.grad = None
        if self._home is not None and self._is_cast:
            pool.give(self._home_key, self._home)
        self._home = None
        self._home_views = []
        self._give_back(pool)

    # -- .grad while sums wait

    @property
    def shows_waiting(self) -> bool:
        """``.grad`` of some parameter is a stand-in, or was one when it was last looked at."""
        return bool(self._hidden)

    def show_waiting(self) -> None:
        """While sums wait for their reduction, have ``.grad`` of every trained parameter be a stand-in."""
        if not self.is_local:
            return
        for index, shard in enumerate(self.group.shards):
            if not shard.requires_grad:
                continue
            stand_in = self._stand_ins.get(index)
            if stand_in is None:
                zero = functools.partial(_zero_waiting, weakref.ref(self), index)
                stand_in = self._stand_ins[index] = WaitingGradient.of(shard, zero)
            self._hidden[index] = shard.grad
            shard.grad = stand_in

    def zero_waiting(self, index: int) -> None:
        """``zero_()`` was called on the stand-in of a parameter: its ``.grad`` is zeros where it would be there."""
        shard, before = self.group.shards[index], self._hidden.get(index)
        is_used = self._written[index] or (self._partial is not None and self._used[index])
        if before is not None:
            shard.grad = before.zero_()
        elif is_used and not self._is_elsewhere[index]:
            zeros = torch.zeros_like(shard)
            shard.grad = PartialGradient.of(zeros) if self.group.holds_part else zeros
        else:
            shard.grad = None

    def hide_waiting(self) -> None:
        """Undo :meth:`show_waiting`, where the stand-ins are still there."""
        if self.group.whole is not None:
            return  # full_parameters() has taken every .grad away, and brings it back
        for index, before in self._hidden.items():
            shard = self.group.shards[index]
            if shard.grad is self._stand_ins[index]:
                shard.grad = before
        self._hidden.clear()

    def drop_zeroed(self, pool: GradientPool) -> None:
        """Drop the sums of parameters whose ``.grad`` was zeroed, removed or replaced while the sums waited."""
        group = self.group
        if not self._hidden or group.whole is not None:
            return
        zeroed = {index for index in self._hidden if group.shards[index].grad is not self._stand_ins[index]}
        if zeroed and group.flat_kinds is not None:
            zeroed |= self._zeroed_elsewhere(zeroed, group.flat_kinds)
        if len(zeroed) == len(self._hidden):
            self.drop(pool)
            return
        for index in zeroed:
            del self._hidden[index]
            self._written[index] = False
            if self._shown.pop(index, None) is not None:
                group.fulls[index].grad = None
            if self._partial is not None:
                self._used[index] = False
                group.held_view(index, self._partial).zero_().neg_()
                self._flags_in(self._partial)[index] = 0

    def _zeroed_elsewhere(self, zeroed: set[int], kinds: Sequence[int | None]) -> set[int]:
        """The parameters that an optimizer over flat ones has zeroed and of whose kind this rank owns nothing.

        Such an optimizer holds the first of them only.
        """
        found: set[int] = set()
        for kind in (0, 1):
            own = [index for index, other in enumerate(kinds) if other == kind]
            if own and own[0] in zeroed and not any(self.group.held[index].numel for index in own):
                found |= self._hidden.keys() & own
        for index in found:
            self.group.shards[index].grad = None
        return found

    def drop(self, pool: GradientPool) -> None:
        """Forget gradients that are not on the shards: a backward failed, or ``zero_grad()`` has dropped them."""
        self.hide_waiting()
        self._shown.clear()
        for full in self.group.fulls:
            full.grad = None
        self._written = [False] * len(self._written)
        self._local = self._local_views = self._result = self._partial = None
        self._doubtful = []
        if self._is_home_lent:
            self.release_home(pool)
        self._give_back(pool)

    def _give_back(self, pool: GradientPool) -> None:
        if self._borrowed is not None:
            pool.give(self.pool_key, self._borrowed)
            self._borrowed = None


def _zero_waiting(gradient_ref: weakref.ref[Gradient], index: int) -> None:
    gradient = gradient_ref()
    if gradient is not None:
        gradient.zero_waiting(index)


def settle(gradients: Iterable[Gradient]) -> None:
    """Read for which parameters other ranks have sent gradients, and set ``.grad`` there: with one wait a device."""
    asking: dict[torch.device, list[tuple[Gradient, Tensor]]] = {}
    for gradient in gradients:
        flags = gradient.doubtful_flags
        if flags is not None:
            asking.setdefault(flags.device, []).append((gradient, flags))
    for found in asking.values():
        values = iter(torch.cat([flags.float() for _, flags in found]).tolist())
        for gradient, flags in found:
            gradient.show_used(list(itertools.islice(values, len(flags))))


class BufferViews:
    """Views of one full-size buffer, made once."""

    def __init__(self, layout: ReduceLayout, pieces: list[list], buffer: Tensor, pool: GradientPool) -> None:
        self.by_param: list[list[Tensor]] = []
        for spec, held in zip(layout.group.params, pieces, strict=True):
            if len(held) == 1:
                stride = spec.stride or contiguous_stride(spec.shape)
                offset = buffer.storage_offset() + held[0].offset
                self.by_param.append([buffer.as_strided(spec.shape, stride, offset)])
            else:
                self.by_param.append([buffer[p.offset : p.offset + p.numel] for p in held])
        # Where every gradient goes to one place: those places.
        self.single = [views[0] for views in self.by_param] if all(len(v) == 1 for v in self.by_param) else None
        self.gaps = [buffer[start:stop] for start, stop in layout.gaps]
        self._headers = self._header_views(layout, buffer)
        count = len(layout.group.params)
        key = count, self._headers[0].shape[-1] if self._headers else 0, buffer.dtype
        self._all_used = pool.constant(key, lambda: self._flags([True] * count))

    @staticmethod
    def _header_views(layout: ReduceLayout, buffer: Tensor) -> list[Tensor]:
        """The headers; of equal slices as rows of one view, so that one copy writes them for any number of ranks."""
        if layout.uneven_cuts is not None:
            return [buffer[start : start + numel] for start, numel in layout.headers()]
        shape = layout.num_slices, layout.header_numel(0)
        first = buffer.storage_offset() + layout.data_numel(0)
        return [buffer.as_strided(shape, (layout.slice_numel(0), 1), first)]

    def set_flags(self, used: list[bool]) -> None:
        """Write the headers: 1 for each parameter that this rank's backward used."""
        flags = self._all_used if all(used) else self._flags(used)
        for header in self._headers:
            assert flags is not None
            header.copy_(flags)

    def _flags(self, used: list[bool]) -> Tensor | None:
        if not self._headers:
            return None  # every slice is empty
        header = self._headers[0]
        flags = [float(is_used) for is_used in used] + [0.0] * (header.shape[-1] - len(used))
        # From pinned memory the copy is enqueued; the host does not wait.
        made = torch.tensor(flags, dtype=header.dtype, pin_memory=header.is_cuda)
        return made.to(header.device, non_blocking=True)
