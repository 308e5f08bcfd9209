"""A group: the parameters of one unit that share dtype and trainability, and move together.

Each parameter has two objects. The *shard* is the Parameter that the model had before: between steps it is in the
module, the optimizer updates it, and its data is a view of this rank's flat master. The *full* parameter replaces it in
the module while the unit computes. It is a view of the gathered buffer, made once. The buffer belongs to this group
alone and has memory only from :meth:`Group.allocate` to :meth:`Group.release`. Tensors that autograd saved from it in
forward have their data again in backward.

The group's *form* defines how a shard is stored, how it becomes the gathered buffer and how gradients are summed. The
plain form is here: the master in its own dtype on the device that computes. ``storage`` has the others.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.axes import Comms
from shardwise.comm.base import Done, Handle
from shardwise.comm.dtype import memory_order, torch_dtype
from shardwise.engine.gradient import Gradient
from shardwise.launch.log_once import log_once
from shardwise.spec.errors import StateError
from shardwise.spec.layout import GroupLayout, Piece, ReduceLayout, contiguous_stride
from shardwise.spec.placement import Placements
from shardwise.spec.unit_facts import GroupFacts

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.unit import Unit


class Form:
    """The plain form of a group: in its own dtype, on the device that computes. Other forms are subclasses.

    Attributes:
        kept_epoch: ``Engine.epoch`` of the parameters that :meth:`keep` has kept for :meth:`gather_kept`.
        is_shown: Whether the shards show full tensors to the user (``weights.state.full_parameters``).
    """

    kept_epoch = -1
    is_shown = False

    def make_master(self, group: Group) -> Tensor:
        """Allocate the master and fill it with the parameters."""
        return group.fill(self.zeros(group, group.master_numel))

    def zeros(self, group: Group, numel: int) -> Tensor:
        """Allocate zeros where the optimizer works: for the master, or for ``.grad``."""
        return torch.zeros(numel, dtype=group.dtype, device=group.device)

    def elements(self, group: Group) -> Tensor:
        """The flat tensor of which the shards are views."""
        return group.master

    def values(self, group: Group) -> Tensor:
        """The parameters in their own dtype, in the master's layout. Read only: it may be the master."""
        return group.master

    def set_values(self, group: Group, flat: Tensor) -> None:
        """Replace the values that :meth:`values` returns."""
        if flat is not group.master:
            group.master.copy_(flat)

    def start(self, group: Group, engine: Engine) -> None:
        """Prepare the form for ``engine``, which is being built."""

    def gather(self, group: Group) -> Handle:
        """Fill the gathered buffer from the masters of all ranks.

        Collective:
            All-gather on ``dp_shard`` (for experts ``edp``) in the compute dtype: every rank sends ``(n-1)/n`` of the
            padded group. All ranks must call in the same order. Nothing is sent where the optimizer is replicated.
        """
        return self.gather_from(group, group.master)

    def gather_from(self, group: Group, master: Tensor) -> Handle:
        """As :meth:`gather`, from a master that is on the device that computes."""
        if group.is_copied:
            group.own_slice.copy_(master, non_blocking=True)
        if not group.placements.shards_optimizer:
            return Done()
        return group.comms.gather.all_gather(group.gathered, unit=group.unit.name, bounds=group.layout.uneven_bounds)

    def keep(self, group: Group) -> None:
        """Keep a copy for backward of a gathered group that is about to be released after forward."""

    def gather_kept(self, group: Group) -> Handle:
        """Fill the gathered buffer from the copies of :meth:`keep`."""
        raise NotImplementedError

    def reduce(self, group: Group, buffer: Tensor, result: Tensor, divisor: float) -> Handle:
        """Sum a gradient buffer over the ranks.

        Args:
            group: The group of the gradients.
            buffer: This rank's gradients, full size.
            result: Receives this rank's slice of the sum; ``buffer`` itself where the optimizer is replicated.
            divisor: Divides the sum.

        Collective:
            Reduce-scatter on ``dp_shard``, for experts ``edp`` (all-reduce where the optimizer is replicated);
            ``(n-1)/n`` (twice that) of the padded buffer is sent. All ranks must call in the same order.
        """
        comm, unit = group.comms.reduce, group.unit.name
        if not group.placements.shards_optimizer:
            return comm.all_reduce(buffer, unit=unit, divisor=divisor)
        return comm.reduce_scatter(
            buffer, result, unit=unit, divisor=divisor, bounds=group.gradient.layout.uneven_bounds
        )

    def store_sum(self, group: Group, reduction: Handle) -> Handle:  # noqa: ARG002
        """Copy the sum from ``group.gradient.result`` to the memory of ``.grad``, once ``reduction`` has finished."""
        return reduction

    def wait_for_host(self) -> None:
        """Make the host wait until it may read the sums that :meth:`store_sum` has copied."""

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers of the form in addition to the master, each with its category in ``measure.storage``."""
        return []


class Group:
    """Buffers and moves of one group on this rank.

    Attributes:
        facts: Layout, placements and dtypes of the group.
        form: The way in which it is stored and moved.
        comms: Comms over the ranks that hold the same parameters.
        dtypes: Dtypes of the master, of computation and of reduction.
        device: The device on which the unit computes.
        shards: The original Parameter objects.
        unsharded: The full parameters, views of the gathered buffer.
        master: This rank's flat slice of the parameters; all of them where the optimizer is replicated.
        replica: The gathered buffer, where parameters are replicated.
        pieces: The piece of each parameter that the master holds.
        views: One view of the master for each parameter.
        is_allocated: Whether the gathered buffer has memory.
        is_permanent: Whether the gathered buffer has memory permanently.
        is_resident: Whether parameters are replicated, so that the full ones are never released.
        own_slice: This rank's part of the gathered buffer.
        is_copied: Whether a gather copies the master into the gathered buffer first.
        needs_refresh: Whether changes of the master must be gathered; False if the gathered buffer is the master.
        epoch: ``Engine.epoch`` of the parameters in the gathered buffer.
        gradient: Collects and reduces the gradients.
    """

    def __init__(
        self,
        unit: Unit,
        facts: GroupFacts,
        form: Form,
        comms: Comms,
        shards: Sequence[nn.Parameter],
        *,
        as_part: Callable[[Tensor, Tensor | None], Tensor],
    ) -> None:
        self.unit = unit
        self.facts = facts
        self.form = form
        self.comms = comms
        names = (facts.master_dtype, facts.compute_dtype, facts.reduce_dtype)
        self.dtypes = tuple(torch_dtype(name or facts.master_dtype) for name in names)
        self.device = shards[0].device
        self.shards = list(shards)
        self.unsharded: list[nn.Parameter] = []
        self.is_allocated = True
        self.is_resident = facts.is_resident
        self.is_permanent = facts.is_resident or facts.is_unsharded_locally
        self.replica: Tensor | None = None
        self.epoch = -1
        layout = facts.layout
        self.pieces = layout.owned_by_param(self.rank) if facts.placements.shards_optimizer else layout.whole
        self.master = self._make_master()
        self.views = self.views_in(form.elements(self))
        self.bind_shards()
        self.gradient = Gradient(self, as_part)

    # -- facts

    @property
    def placements(self) -> Placements:
        """Placements of the group."""
        return self.facts.placements

    @property
    def layout(self) -> GroupLayout:
        """Flat layout of the gathered buffer."""
        return self.facts.layout

    @property
    def rank(self) -> int:
        """This rank's place among the ranks that share the group."""
        return self.comms.gather.rank

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the master."""
        return self.dtypes[0]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the gathered buffer."""
        return self.dtypes[1]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the gradient buffer."""
        return self.dtypes[2]

    @property
    def master_numel(self) -> int:
        """Elements of the master, padding included."""
        return self.facts.master_numel(self.rank)

    @property
    def resident_buffer(self) -> Tensor | None:
        """The permanent full copy of the group; ``None`` if parameters are sharded."""
        return self.master if self.facts.is_unsharded_locally else self.replica

    @property
    def wants_gradients(self) -> bool:
        """Whether the group takes part in reductions: a parameter is trained, or sums of microbatches wait."""
        with torch_private.without_torch_function():
            for shard in self.shards:
                if shard.requires_grad:
                    return True  # usually at the first one
        return self.gradient.is_local

    # -- parameters

    def _make_master(self) -> Tensor:
        """Copy the parameters of the unsharded model into flat buffers; returns the master.

        Where parameters are replicated in the master's own dtype, the master is a slice of the replica, or all of it.
        """
        if not self.is_resident:
            return self.form.make_master(self)
        self.replica = torch.zeros(self.layout.numel, dtype=self.compute_dtype, device=self.device)
        self._fill(self.replica, self.layout.whole)
        if self.facts.has_separate_master:
            return self.form.make_master(self)
        return self.replica[self.layout.slice_of(self.rank)] if self.placements.shards_optimizer else self.replica

    def fill(self, master: Tensor) -> Tensor:
        """Copy the parameters of the unsharded model into ``master``, and return it.

        Parameters without memory are skipped; they are initialized later.
        """
        is_sharded = self.placements.shards_optimizer
        return self._fill(master, self.layout.owned(self.rank) if is_sharded else self.layout.whole)

    @torch.no_grad()
    def _fill(self, flat: Tensor, pieces: Iterable[Piece]) -> Tensor:
        for piece in pieces:
            shard = self.shards[piece.index]
            if shard.numel() and not shard.untyped_storage().nbytes():
                continue
            source = memory_order(shard)[piece.start : piece.stop]
            flat[piece.offset : piece.offset + piece.numel].copy_(source)
        return flat

    def values(self) -> Tensor:
        """The parameters in their own dtype, in the master's layout. Read only: it may be the master."""
        return self.form.values(self)

    @torch.no_grad()
    def set_values(self, flat: Tensor) -> None:
        """Replace the values that :meth:`values` returns."""
        self.form.set_values(self, flat)

    def views_in(self, flat: Tensor) -> list[Tensor]:
        """Return a view of ``flat``, which has the master's layout, for every parameter.

        Where the optimizer is replicated, a view has the parameter's shape. Otherwise the granularity determines the
        shape of the piece that this rank owns.
        """
        return [self.view_in(index, flat) for index in range(len(self.pieces))]

    def view_in(self, index: int, flat: Tensor, *, first: int = 0) -> Tensor:
        """Return the view of parameter ``index`` in ``flat``, which has the master's layout from element ``first``."""
        spec, piece = self.layout.params[index], self.pieces[index]
        is_sharded = self.placements.shards_optimizer
        shape, stride = self.layout.piece_shape(piece) if is_sharded else (spec.shape, spec.stride)
        offset = flat.storage_offset() + piece.offset - first
        return flat.as_strided(shape, stride or contiguous_stride(shape), offset)

    @torch_private.on_plain_tensors
    def bind_shards(self) -> None:
        """Point the original Parameter objects at their views of the master."""
        for shard, view in zip(self.shards, self.views, strict=True):
            shard.data = view
        self._pointers = [view.data_ptr() for view in self.views]
        # Empty shards have no address: only a changed dtype shows that ``.data`` was replaced.
        self._num_uses = sys.maxsize  # of the master's memory, before the user points shards elsewhere
        self._empty = [shard for shard, pointer in zip(self.shards, self._pointers, strict=True) if not pointer]

    @torch_private.on_plain_tensors
    def copy_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the shards to the full parameters; autograd reads it there."""
        trained = [shard.requires_grad for shard in self.shards]
        if trained != [full.requires_grad for full in self.unsharded]:
            for full, is_trained in zip(self.unsharded, trained, strict=True):
                full.requires_grad_(is_trained)

    @torch_private.on_plain_tensors
    def apply_user_changes(self) -> None:
        """Apply the user's changes of the shards to the group: a ``.data`` of the same shape, ``requires_grad``.

        Raises:
            StateError: Shape, dtype or device of a shard has changed.
        """
        self.copy_requires_grad()
        has_dtypes = [shard.dtype for shard in self._empty].count(self.dtype) == len(self._empty)
        num_uses, _ = torch_private.num_holders(self.views[:1])
        if has_dtypes and [shard.data_ptr() for shard in self.shards] == self._pointers:
            self._num_uses = num_uses
            return  # in nearly every step
        num_moved = 0
        for index, (shard, pointer) in enumerate(zip(self.shards, self._pointers, strict=True)):
            if self.form.is_shown or (shard.data_ptr() == pointer and (pointer or shard.dtype is self.dtype)):
                continue
            view = self.views[index]
            if shard.shape != view.shape or shard.dtype != view.dtype or shard.device != view.device:
                spec = self.layout.params[index]
                raise StateError(
                    f"parameter {spec.name!r} (logical shape {list(spec.logical_shape)}) was moved out of its shard:"
                    f" expected {list(view.shape)} {view.dtype} on {view.device}, got {list(shard.shape)} {shard.dtype}"
                    f" on {shard.device}.\n  Change dtype and device before sw.parallelize(); load values with"
                    " sw.load_full_state_dict()."
                )
            num_moved += 1
            with torch.no_grad():
                view.copy_(shard.data)
                shard.data = view
        if num_moved and num_uses >= self._num_uses:  # as many users as before the shards left
            log_once(
                "p.data = x copied x over the old values of p, which another tensor still views: after saved = p.data,"
                " p.data = saved restores nothing.\n"
                "  Save p.data.clone(), or evaluate an average in sw.ExponentialMovingAverage(model).swapped_in()."
            )

    # -- the gathered buffer

    def make_unsharded(self) -> None:
        """Make the full parameters: views of the gathered buffer, whose memory is freed unless it is permanent."""
        if self.unsharded:
            return  # made by an engine of a part of the model (sw.fully_shard)
        resident, layout = self.resident_buffer, self.layout
        if resident is None:
            resident = torch.empty(layout.numel, dtype=self.compute_dtype, device=self.device)
        self.gathered = resident
        has_separate_master, placements = self.facts.has_separate_master, self.placements
        self.own_slice = self.gathered[layout.slice_of(self.rank)] if placements.shards_optimizer else self.gathered
        self.is_copied = (placements.shards_parameters or has_separate_master) and not self.facts.is_unsharded_locally
        self.needs_refresh = placements.shards_optimizer or has_separate_master
        storage = self.gathered.untyped_storage()
        for shard, spec, offset in zip(self.shards, layout.params, layout.offsets, strict=True):
            # set_ gives each view a separate version counter, so that autograd accepts buffers that are gathered again.
            tensor = torch.empty(0, dtype=self.compute_dtype, device=self.device)
            tensor.set_(storage, offset, spec.shape, spec.strides)
            full = nn.Parameter(tensor, requires_grad=shard.requires_grad)
            full.__dict__.update(shard.__dict__)
            self.unsharded.append(full)
        self.release()

    def allocate(self) -> int:
        """Allocate the gathered buffer, uninitialized. Returns the bytes that were allocated."""
        if self.is_allocated:
            return 0
        self.is_allocated = True
        num_bytes = self.layout.numel * self.gathered.itemsize
        self.gathered.untyped_storage().resize_(num_bytes)
        return num_bytes

    def poison(self) -> None:
        """Fill the gathered buffer with NaN before a gather, so that use of stale memory shows in every result."""
        if self.gathered.is_floating_point():
            self.gathered.fill_(math.nan)

    def release(self) -> int:
        """Free the memory of the gathered buffer, unless it is permanent. Returns the bytes that were freed.

        The full parameters remain as objects. Reading one raises torch's "data is not allocated yet".
        """
        if not self.is_allocated or self.is_permanent:
            return 0
        self.is_allocated = False
        self.gathered.untyped_storage().resize_(0)
        return self.layout.numel * self.gathered.itemsize

    def update_facts(self, **facts: Any) -> None:
        """Replace some of the facts."""
        self.facts = dataclasses.replace(self.facts, **facts)

    def relabel(self, layout: GroupLayout) -> None:
        """Replace the layout by one that differs only in names."""
        self.update_facts(layout=layout)
        self.gradient.layout = ReduceLayout(layout, self.gradient.layout.num_slices)
