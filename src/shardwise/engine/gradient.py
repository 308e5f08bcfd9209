"""The gradients of one group, from autograd to the shards.

==========  ==============================================================  ==============================
state       where this rank's gradients are                                 leaves by
==========  ==============================================================  ==============================
empty       nowhere                                                         ``collect_one``, ``collect``
local       summed in a flat full-size buffer, not reduced yet              ``reduce``
reducing    on their way; the buffer must not be touched                    ``finish``
partial     summed over ``dp_shard`` only (accumulation defer_replicate)    a later microbatch's ``reduce``
done        on the shards' ``.grad``, set or added to what was there
==========  ==============================================================  ==============================

On a mesh with ``dp_replicate`` a reduction is a chain: the sum inside the group, then the sum of what the rank holds of
it over the groups, then one division. The second lies where ``.grad`` will be, not in a buffer that others use: it may
travel while the next units' gradients are collected.

The full-size buffer is borrowed from the pool where the row pools gradients, and the group's own where it does not
(``ddp``, ``zero1``, and wherever one rank's slice is the whole: there ``.grad`` lives in it, reduced in place). While
``.grad`` occupies the group's own buffer, a further backward borrows one too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.comm.base import Chain, Comm, Done, Handle
from shardwise.comm.dtype import dtype_name
from shardwise.engine.pool import GradientPool
from shardwise.spec.errors import StateError
from shardwise.spec.layout import ReduceLayout, Rows
from shardwise.spec.memory.footprint import size_class
from shardwise.spec.precision import divisors

if TYPE_CHECKING:
    from shardwise.engine.group import Group


class Home:
    """Where ``.grad`` of a group's shards lives: memory of the group, or borrowed from the pool for one update.

    Attributes:
        tensor: The memory, laid out as the master is: a slice of :attr:`full`, or memory of its own.
        views: One view of :attr:`tensor` for each parameter: its ``.grad``.
        plain: The same views as plain tensors.
        as_part: Makes a gradient (of a shard), of which other ranks hold other parts, one that refuses norms.
        is_apart: ``.grad`` never lives in the buffer that is reduced.
        full: The group's own full-size gradient buffer, where it has one.
        is_kept: The memory stays allocated from step to step.
        is_lent: ``.grad`` lives in borrowed buffers (the optimizer steps inside backward).
    """

    def __init__(self, group: Group, as_part: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        self.group = group
        self.as_part = as_part
        self.is_apart = group.facts.is_reduced_apart
        self.tensor: Tensor | None = None
        self.views: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.full: Tensor | None = None
        self.is_kept = True
        self.is_lent = False
        self._key: Hashable = None  # of a buffer in the pool, where the sum has another dtype than ``.grad``
        self._lent: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def make(self, *, is_filled: bool = True) -> Tensor:
        """The memory, allocated at the first call; not filled where a whole sum is about to be written to it."""
        if self.tensor is not None:
            return self.tensor
        group, gradient = self.group, self.group.gradient
        if not gradient.is_pooled:
            self.full = torch.zeros(gradient.layout.numel, dtype=group.reduce_dtype, device=group.device)
        if self.full is None or self.is_apart:
            numel = gradient.layout.slice_numel(group.rank)
            if is_filled:
                self.tensor = group.form.zeros(group, numel)
            else:
                self.tensor = torch.empty(numel, dtype=group.dtype, device=group.device)
        else:
            self.tensor = self.full[gradient.layout.slice_of(group.rank)]
        self.plain = self.views = group.held_views(self.tensor)
        if group.facts.holds_part:
            self.views = [self.as_part(view, shard) for view, shard in zip(self.plain, group.shards, strict=True)]
        return self.tensor

    def free(self) -> None:
        """Give the memory up."""
        self.tensor = self.full = None
        self.views = []
        self.plain = []

    def lend(self, pool: GradientPool) -> None:
        """Have ``.grad`` live in borrowed buffers from now on: the one that the sum is in or, for a cast, another."""
        self.is_lent = True
        self.free()
        if self.group.reduce_dtype is not self.group.dtype:
            numel = self.group.reduce_layout.slice_numel(self.group.rank)
            self._key = ("home", size_class(numel), self.group.dtype)
            pool.announce(self._key, numel)

    def borrow(self, result: Tensor, pool: GradientPool) -> None:
        """Take the buffer in which ``.grad`` lives for one update."""
        home = result if self._key is None else pool.take(self._key, self.group.dtype, self.group.device)
        key = torch_private.storage_identity(home)
        if key not in self._lent:  # a rank's place in a buffer is always the same
            self._lent[key] = home, self.group.held_views(home)
        self.tensor, self.plain = self._lent[key]
        self.views = self.plain  # the optimizer alone sees them

    def give_back(self, pool: GradientPool) -> None:
        """End :meth:`borrow`: ``.grad`` is taken off the shards."""
        for shard in self.group.shards:
            shard.grad = None
        if self.tensor is not None and self._key is not None:
            pool.give(self._key, self.tensor)
        self.free()


class Gradient:
    """Collects and reduces the gradients of ``group``.

    Attributes:
        layout: Flat layout of the full-size buffer.
        home: Where ``.grad`` lives.
        pool_key: Class of buffers in the pool.
        is_pooled: The full-size buffer is borrowed. Else one rank holds all of it, and ``.grad`` lies in the buffer.
        result: Where the sum under way arrives.
        has_added: A reduced gradient was added to what an earlier backward had left in ``.grad``.
    """

    def __init__(self, group: Group, as_part: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        facts = group.facts
        self.group = group
        self.layout = facts.reduce_layout
        self.home = Home(group, as_part)
        self.pool_key: Hashable = (size_class(self.layout.numel), group.reduce_dtype, facts.is_expert)
        self.is_pooled = facts.pools_gradients
        self.divide_by(facts.num_ranks)
        # Of these parameters this rank owns nothing: .grad stays None, and optimizers pass over them.
        self._is_elsewhere = [
            held.numel == 0 < spec.numel for held, spec in zip(group.held, group.layout.params, strict=True)
        ]
        self._views: dict[int, BufferViews] = {}  # of every buffer that has been used, by its id
        first_flag = self.layout.data_numel(self.layout.place(group.rank))
        self._flags = slice(first_flag, first_flag + len(group.shards))  # in what this rank gets of a sum
        self._local: BufferViews | None = None
        self._borrowed: Tensor | None = None
        self._written = [False] * len(group.shards)  # parameter i's elements of ``_local`` are this rank's gradient
        self._shown: dict[int, Tensor] = {}  # views of ``_local`` that are .grad of full parameters
        self._used: list[bool] = []
        self.result: Tensor | None = None
        self._partial: Tensor | None = None  # summed over dp_shard by earlier microbatches, not over dp_replicate yet
        self.partial_store: Tensor | None = None  # where that lies if it cannot lie where ``.grad`` does
        self._doubtful: list[int] = []  # parameters of which only the flags in ``home`` say whether a rank used them
        self.has_added = False

    @property
    def is_local(self) -> bool:
        """Gradients of this rank wait for a reduction, or for the rest of one."""
        return self._local is not None or self._partial is not None

    @property
    def has_sums(self) -> bool:
        """Some ``.grad`` is there from an earlier backward, to be added to."""
        if self._doubtful:
            return True
        with torch_private.without_torch_function():
            for shard in self.group.shards:
                if shard.grad is not None:
                    return True
        return False

    @property
    def held_buffers(self) -> tuple[Tensor | None, ...]:
        """What this object keeps for good: where ``.grad`` lives, and sums that wait. Borrowed ones are not."""
        return self.home.tensor, self.home.full, self.partial_store

    @property
    def lies_in_slot(self) -> bool:
        """Some gradient is memory of a slot of the unit: a function has returned a view of a parameter as gradient."""
        slots = {torch_private.storage_identity(g.gathered) for g in self.group.unit.groups if g.slot is not None}
        grads = (full.grad for full in self.group.fulls)
        return any(
            grad is not None and grad.layout is torch.strided and torch_private.storage_identity(grad) in slots
            for grad in grads
        )

    def divide_by(self, num_ranks: int) -> None:
        """Divide sums by ``num_ranks`` from now on."""
        self._divisors = divisors(num_ranks, dtype_name(self.group.reduce_dtype))  # before and after the sum

    # -- empty -> local

    def collect_one(self, index: int, pool: GradientPool) -> None:
        """Move the gradient of one parameter into the flat buffer and free it."""
        full = self.group.fulls[index]
        if full.grad is None or self._shown:  # the hook that calls this also fires for an undefined gradient
            return
        views = self._begin(pool)
        targets, sources = views.by_param[index], self._cut(index, full.grad)
        full.grad = None
        _each(torch._foreach_add_ if self._written[index] else torch._foreach_copy_, targets, sources)
        self._written[index] = True

    def collect(self, pool: GradientPool) -> None:
        """Move what gradients there are on the full parameters into the flat buffer, and free them."""
        views, written = self._begin(pool), self._written
        if not any(written) and self._collect_all(views):
            return
        copy_to: list[Tensor] = []
        copies: list[Tensor] = []
        add_to: list[Tensor] = []
        terms: list[Tensor] = []
        for index, full in enumerate(self.group.fulls):
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

    def _collect_all(self, views: BufferViews) -> bool:
        """As :meth:`collect` where every parameter has its first gradient, as in nearly every backward; else False."""
        fulls = self.group.fulls
        grads = [grad for full in fulls if (grad := full.grad) is not None and grad.layout is torch.strided]
        if len(grads) < len(fulls):
            return False
        for full in fulls:
            full.grad = None
        self._written = [True] * len(fulls)
        for index in views.divided:  # the last one first
            grads[index : index + 1] = self._cut(index, grads[index])
        _each(torch._foreach_copy_, views.every, grads)
        return True

    def show(self) -> None:
        """Let autograd add later gradients to those in the flat buffer itself, where one lies there in one piece.

        It must not be moved until :meth:`reduce`.
        """
        group = self.group
        if self._local is None or group.compute_dtype is not group.reduce_dtype:
            return  # a gradient has the dtype of its parameter
        for index, views in enumerate(self._local.by_param):
            if self._written[index] and index not in self._shown and index not in self._local.divided:
                self._shown[index] = group.fulls[index].grad = views[0]

    def _hide(self) -> None:
        for index in self._shown:
            self.group.fulls[index].grad = None
        self._shown.clear()

    def local_views(self, index: int, pool: GradientPool) -> list[Tensor]:
        """This rank's gradient of one parameter, to be changed there, in the :meth:`parts` of the flat buffer.

        Where there is none yet it is -0.0 from now on.
        """
        self.collect(pool)
        views = self._begin(pool).by_param[index]
        if not self._written[index]:
            _fill_with_nothing(views)
            self._written[index] = True
        return views

    def add(self, index: int, grad: Tensor, pool: GradientPool) -> None:
        """Add to this rank's gradient of one parameter, which came otherwise than through the full parameter."""
        _each(torch._foreach_add_, self.local_views(index, pool), self._cut(index, grad))

    def has_collected(self, index: int) -> bool:
        """Whether sums of earlier microbatches have a gradient of parameter ``index``, and ``.grad`` would show it."""
        is_used = self._written[index] or (self._partial is not None and self._used[index])
        return is_used and not self._is_elsewhere[index]

    def forget(self, index: int) -> None:
        """Drop what earlier microbatches have collected for parameter ``index``."""
        self._written[index] = False
        if self._shown.pop(index, None) is not None:
            self.group.fulls[index].grad = None
        if self._partial is not None:
            self._used[index] = False
            self.group.held_view(index, self._partial).zero_().neg_()
            self._flags_in(self._partial)[index] = 0

    def _begin(self, pool: GradientPool) -> BufferViews:
        """Have a buffer to collect in; returns its views."""
        if self._local is not None:
            return self._local
        home = self.home
        if self.is_pooled or home.is_lent or (not home.is_apart and self.has_sums):
            buffer = self._borrowed = pool.take(self.pool_key, self.group.reduce_dtype, self.group.device)
        else:
            home.make()
            buffer = home.full
        assert buffer is not None
        views = self._views.get(id(buffer))
        if views is None:
            views = self._views[id(buffer)] = BufferViews(self.layout, buffer, pool)
        self._local = views
        return views

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

    def reduce(self, pool: GradientPool, *, is_last: bool = True) -> Handle:
        """Complete the local gradients and issue their reduction.

        A missing gradient travels as -0.0, the exact identity of addition, with 0 as its flag.

        Args:
            pool: Where the buffer was borrowed.
            is_last: Later microbatches do not add to it: the sum goes on over ``dp_replicate`` where there is one.

        Collective:
            As ``Form.reduce``. Then, when the handle advances, all-reduce on ``dp_replicate`` of what the rank holds.
        """
        group = self.group
        views = self._begin(pool)
        self._hide()
        views.set_flags(self._written)
        if not all(self._written):
            _fill_with_nothing(
                [t for i, is_there in enumerate(self._written) if not is_there for t in views.by_param[i]]
            )
        if views.gaps:
            torch._foreach_zero_(views.gaps)
        buffer = views.buffer[: self.layout.numel]
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
            return Chain(inside, lambda: self._add_up(replicate, pool, partial, is_last=is_last))
        is_home = self.result is self.home.tensor

        def arrived() -> None:
            if is_home:
                self._give_back(pool)  # the sum is not in the borrowed buffer

        return replicate.follow(inside, lambda: self._go_across(replicate), arrived)

    def _place_of_sum(self, buffer: Tensor, partial: Tensor | None) -> Tensor:
        """Where the sum over ``dp_shard`` goes: straight to where ``.grad`` lives if that is free, else in place."""
        if not self.group.facts.row.shards_optimizer:
            return buffer
        is_free = not (self.home.is_lent or self.home.is_apart or self.has_sums)
        if self.is_pooled and is_free and partial is None:
            return self.home.make(is_filled=False)
        return buffer[self.layout.slice_of(self.group.rank)]

    def _add_up(self, replicate: Comm, pool: GradientPool, partial: Tensor | None, *, is_last: bool) -> Handle:
        """The sum inside the group is there: add it to that of earlier microbatches; go on over the groups at last."""
        result = self.result
        assert result is not None
        if partial is not None:
            result = partial.add_(result)
        elif result is not self.home.tensor:
            if self.partial_store is None:
                self.partial_store = torch.empty_like(result)
            result = self.partial_store.copy_(result)
        self._give_back(pool)  # the sum has left the borrowed buffer
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
        home = self.home
        if home.is_kept or home.tensor is None or home.is_lent or self.is_local or self.has_sums:
            return
        if home.full is not None:
            self._views.pop(id(home.full), None)
        home.free()

    # -- reducing -> empty

    def finish(self, pool: GradientPool) -> None:
        """Put the reduced gradients on the shards: set where there was none, add where there was one.

        A parameter that no rank used is left alone. Whether another rank used one that this rank did not, the header
        tells, on the device. The host does not wait for it: it asks at the end of backward (:func:`settle`).
        """
        result, home = self.result, self.home
        if result is None:
            return  # it waits for the last microbatch
        if home.is_lent:
            home.borrow(result, pool)
        is_home = result.data_ptr() == home.make().data_ptr()
        if self._doubtful or not is_home:
            self.group.form.wait_for_host()  # the host is about to read it, where it is there
        if self._doubtful:  # the second reduction of one backward
            settle([self])
        self._put(result, is_home=is_home)
        self.result = None
        if home.is_lent:
            settle([self])  # the optimizer steps now
        else:
            self._give_back(pool)

    @torch_private.on_plain_tensors
    def _put(self, result: Tensor, *, is_home: bool) -> None:
        """Put what was reduced on the shards, as far as the host knows that some rank has used them."""
        group, used, home = self.group, self._used, self.home
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
                self._doubtful.append(index)
        if self._doubtful and not is_home:
            self._flags_in(home.tensor).copy_(flags)

    def _flags_in(self, reduced: Tensor) -> Tensor:
        """The flags in this rank's slice of what was reduced, or in what is laid out as that slice is."""
        return reduced[self._flags]

    @property
    def doubtful_flags(self) -> Tensor | None:
        """The flags that the host has yet to read, if there are any."""
        return self._flags_in(self.home.make()) if self._doubtful else None

    @torch_private.on_plain_tensors
    def show_used(self, flags: Sequence[float]) -> None:
        """Set ``.grad`` of the doubtful parameters that other ranks have used; ``flags`` as :attr:`doubtful_flags`."""
        for index in self._doubtful:
            if flags[index] > 0:
                self.group.shards[index].grad = self.home.views[index]
        self._doubtful = []

    # -- .grad in borrowed buffers

    def lend_home(self, pool: GradientPool) -> None:
        """Have ``.grad`` live in borrowed buffers from now on, from :meth:`finish` to :meth:`release_home`."""
        self.home.lend(pool)
        self._views.clear()

    def release_home(self, pool: GradientPool) -> None:
        """Take ``.grad`` off the shards and give back the buffers that it lived in."""
        self.home.give_back(pool)
        self._give_back(pool)

    def drop(self, pool: GradientPool) -> None:
        """Forget gradients that are not on the shards: a backward failed, or ``zero_grad()`` has dropped them."""
        self._shown.clear()
        for full in self.group.fulls:
            full.grad = None
        self._written = [False] * len(self._written)
        self._local = self.result = self._partial = None
        self._doubtful = []
        if self.home.is_lent:
            self.home.give_back(pool)
        self._give_back(pool)

    def _give_back(self, pool: GradientPool) -> None:
        if self._borrowed is not None:
            pool.give(self.pool_key, self._borrowed)
            self._borrowed = None


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


def _views(buffer: Tensor, layout: ReduceLayout, index: int, rows: Sequence[Rows]) -> list[Tensor]:
    """Views of a parameter that has these rows in a buffer: one, or one of each row where it is divided."""
    if layout.is_divided(index):
        return _of_rows(buffer, rows)
    spec = layout.group.params[index]
    return [buffer.as_strided(spec.shape, spec.strides, buffer.storage_offset() + rows[0].offset)]


def _of_rows(buffer: Tensor, rows: Sequence[Rows]) -> list[Tensor]:
    first = buffer.storage_offset()
    return [buffer.as_strided((r.count, r.numel), (r.step, 1), first + r.offset) for r in rows]


class BufferViews:
    """Views of one full-size buffer, made once: where each gradient goes, the gaps, and the flags.

    Attributes:
        buffer: The buffer.
        by_param: The views of each parameter: one in its shape, or one for each of its rows in ``layout``.
        every: All of them, in order.
        divided: Numbers of the parameters that have rows or nothing, the last one first.
        gaps: What no gradient is written to.
    """

    def __init__(self, layout: ReduceLayout, buffer: Tensor, pool: GradientPool) -> None:
        params = layout.group.params
        self.buffer = buffer
        self.divided = [index for index in reversed(range(len(params))) if layout.is_divided(index)]
        self.by_param = [_views(buffer, layout, index, rows) for index, rows in enumerate(layout.rows)]
        self.every = [view for held in self.by_param for view in held]
        self.gaps = [buffer[start:stop] for start, stop in layout.gaps]
        self._headers = _of_rows(buffer, layout.header_rows)
        key = len(params), self._headers[0].shape[-1] if self._headers else 0, buffer.dtype
        self._all_used = pool.constant(key, lambda: self._flags([True] * len(params)))

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
