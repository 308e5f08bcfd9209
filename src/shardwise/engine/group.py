"""A group: the parameters of one unit that share dtype and trainability, and move together.

Each parameter has two objects. The *shard* is the Parameter that the model had before: between steps it is in the
module, the optimizer holds it, and its data is a view of this rank's flat master. The *full* one replaces it in the
module while the unit computes: it lies in the gathered buffer, set there once and never moved.

Gradients arrive on the full objects, are copied once into a flat buffer, reduced from there, and put on the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm, Done, Handle
from shardwise.engine.gradient import Gradient
from shardwise.engine.pool import PackedPool, Slot, contiguous_stride, memory_order
from shardwise.forms import packed
from shardwise.forms.host import Transfers, host_zeros
from shardwise.forms.inner import InnerShard
from shardwise.forms.packed import gather_packed
from shardwise.spec.errors import StateError
from shardwise.spec.layout import GroupLayout, ReduceLayout
from shardwise.spec.placement import Placements
from shardwise.spec.policies import OffloadPolicy
from shardwise.spec.quantize import NO_QUANTIZATION, Quantization

if TYPE_CHECKING:
    from shardwise.engine.unit import Unit


class Group:
    """Buffers and moves of one group on this rank.

    Attributes:
        layout: Flat layout of the gathered buffer.
        reduce_layout: Flat layout of the gradient buffer.
        comms: Over the ranks that hold the same parameters; the engine sets it.
        row: Placements in force (a frozen group of a replicated row is held whole on every rank).
        shards: The original Parameter objects.
        fulls: Their stand-ins in the gathered buffer.
        gathered_in: Identity of the gathered buffer's storage.
        master: This rank's flat slice of the parameters; the whole of them where the optimizer is replicated.
        held_as: Form in which the master is held (``spec.quantize``); ``None``: its own dtype.
        sent_as: Form in which they are gathered; ``None``: the compute dtype.
        reduced_as: Form in which gradients are sent to be added up; ``None``: the reduce dtype.
        packed_pool: Where packed bytes are received.
        offload: Where the master and what the optimizer adds to it are on the host: how.
        transfers: ... and who carries what goes between the host and the device.
    """

    comms: Comms
    held_as: str | None = None
    sent_as: str | None = None
    reduced_as: str | None = None
    packed_pool: PackedPool | None = None

    def __init__(
        self,
        unit: Unit,
        layout: GroupLayout,
        row: Placements,
        shards: Sequence[nn.Parameter],
        *,
        rank: int,
        num_ranks: int,
        is_trainable: bool,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None,
        quantization: Quantization = NO_QUANTIZATION,
        offload: OffloadPolicy | None = None,
    ) -> None:
        self._unit = weakref.ref(unit)
        self.layout = layout
        self.row = row
        self.rank = rank
        self.num_ranks = num_ranks  # whose batches gradients are means over: on dp_shard, times those on dp_replicate
        self.is_trainable = is_trainable
        self.shards = list(shards)
        own = shards[0].dtype
        self.dtype, self.compute_dtype, self.reduce_dtype = dtypes or (own, own, own)
        self.device = shards[0].device
        if row.shards_optimizer and quantization.gather != "none":
            self.sent_as = quantization.gather
        if quantization.reduce != "none":
            self.reduced_as = quantization.reduce
        self.reduce_layout = ReduceLayout(layout, layout.size if row.shards_optimizer else 1)
        self.slot: Slot | None = None
        self.replica: Tensor | None = None  # the gathered buffer, where parameters are replicated
        self.whole: Tensor | None = None  # what full_parameters shows
        self.inner: InnerShard | None = None  # what is left between forward and backward, where that is anything
        self.epoch = -1  # the outermost forward whose parameters the gathered buffer holds
        self.offload = offload
        self.transfers: Transfers | None = None
        self.resident: Tensor | None = None  # the shard that the device keeps of a master on the host ...
        self.resident_epoch = -1  # ... and the forward for which it was brought

        self.master = self._make_master()
        self.held = layout.owned_by_param(rank) if row.shards_optimizer else layout.whole
        self.views = self.held_views(self.elements)
        self.flat_kinds: tuple[int | None, ...] | None = None  # weight-decay groups, where the optimizer sees flat runs
        self.fulls: list[nn.Parameter] = []
        self._pointers: list[int] = []
        self.bind_shards()
        self.gradient = Gradient(self)

    @property
    def unit(self) -> Unit:
        """The unit, which holds this group."""
        unit = self._unit()
        assert unit is not None
        return unit

    # -- parameters

    def _make_master(self) -> Tensor:
        """Copy the parameters, as the plain model holds them, into flat buffers; returns what the optimizer updates.

        Where parameters are replicated in the master's own dtype, the master is a slice of the replica, or all of it.
        """
        layout, row = self.layout, self.row
        own = layout.slice_of(self.rank)
        if not row.shards_parameters:
            self.replica = torch.zeros(layout.numel, dtype=self.compute_dtype, device=self.device)
            self._fill(self.replica, whole=True)
            if not self.is_apart:
                return self.replica[own] if row.shards_optimizer else self.replica
        master = self.home_zeros(self.master_numel)
        self._fill(master, whole=not row.shards_optimizer)
        if self.offload is not None and self.offload.keeps_shard(row):
            kept = self.dtype if self.sent_as is not None else self.compute_dtype  # packed from the master's own digits
            self.resident = torch.zeros(self.master_numel, dtype=kept, device=self.device)
        return master

    def home_zeros(self, numel: int) -> Tensor:
        """Memory for what the optimizer works on, in the master's dtype: on the host where that is offloaded."""
        if self.offload is None:
            return torch.zeros(numel, dtype=self.dtype, device=self.device)
        return host_zeros(numel, self.dtype, self.device, pins=self.offload.pin_memory)

    @torch.no_grad()
    def _fill(self, flat: Tensor, *, whole: bool) -> None:
        for piece in self.layout.whole if whole else self.layout.owned(self.rank):
            source = memory_order(self.shards[piece.index])[piece.start : piece.stop]
            flat[piece.offset : piece.offset + piece.numel].copy_(source)

    @property
    def is_expert(self) -> bool:
        """Fewer ranks share it than other groups. It has slots and buffers beside those of its unit's other group."""
        held = self.layout.params[0].slice
        return held is not None and held.is_expert

    @property
    def master_numel(self) -> int:
        """Elements of the master, padding included."""
        return self.layout.slice_numel(self.rank) if self.row.shards_optimizer else self.layout.numel

    @property
    def elements(self) -> Tensor:
        """What shards are views of: the master."""
        return self.master

    @property
    def holds_part(self) -> bool:
        """Other ranks hold other parts of the model's gradients: of this group's, or of other parameters."""
        engine = self.unit.engine() if self.unit.engine is not None else None
        is_divided = bool(self.comms.across) or self.comms.ep is not None
        is_divided = is_divided or (engine is not None and bool(engine.ignored.spread))
        return is_divided or (self.row.shards_optimizer and self.layout.size > 1)

    @property
    def uses_slot(self) -> bool:
        """Whole parameters are there only while the unit computes."""
        return self.row.shards_parameters

    @property
    def is_alone(self) -> bool:
        """One rank's slice is the whole, in the form in which the unit computes: its slot is the master itself."""
        return self.uses_slot and self.layout.size == 1 and self.held_as is None and not self.is_apart

    @property
    def standing(self) -> Tensor | None:
        """Where the whole group lies for good; ``None`` where it is gathered from nothing."""
        return self.master if self.is_alone else self.replica

    def values(self) -> Tensor:
        """The parameters in their own dtype, laid out as the master is; not to be written, it may be the master."""
        return self.master

    def value_views(self, flat: Tensor) -> list[Tensor]:
        """One view for every parameter of what :meth:`values` gave."""
        return self.views if flat is self.master else self.held_views(flat)

    @torch.no_grad()
    def set_values(self, flat: Tensor) -> None:
        """Replace what :meth:`values` gives."""
        if flat is not self.master:
            self.master.copy_(flat)

    @property
    def is_cast(self) -> bool:
        """The unit computes in another dtype than the master's, or with other digits."""
        return self.compute_dtype is not self.dtype or self.sent_as is not None

    @property
    def is_apart(self) -> bool:
        """The master never lies in the gathered buffer: it has another dtype, or is on the host."""
        return self.is_cast or self.offload is not None

    @property
    def needs_stage(self) -> bool:
        """Its master has to be on the device as it is before it is cast, or packed, there."""
        if self.offload is None or self.held_as is not None:
            return False
        return self.is_cast if self.resident is None else self.resident.dtype is not self.dtype

    def held_views(self, flat: Tensor) -> list[Tensor]:
        """One view of ``flat`` for every parameter, laid out as the master is.

        Where the optimizer is replicated it has the parameter's own shape, else what the granularity gives the piece
        that this rank owns.
        """
        return [self.held_view(index, flat) for index in range(len(self.held))]

    def held_view(self, index: int, flat: Tensor, *, first: int = 0) -> Tensor:
        """The view of parameter ``index`` in a tensor that is laid out as the master is from element ``first`` on."""
        spec, piece = self.layout.params[index], self.held[index]
        shape, stride = self.layout.held_shape(piece) if self.row.shards_optimizer else (spec.shape, spec.stride)
        offset = flat.storage_offset() + piece.offset - first
        return flat.as_strided(shape, stride or contiguous_stride(shape), offset)

    def bind_shards(self) -> None:
        """Point the original Parameter objects at their views of the master."""
        for shard, view in zip(self.shards, self.views, strict=True):
            shard.data = view
        self._pointers = [view.data_ptr() for view in self.views]
        self._are_all_somewhere = all(self._pointers)  # empty ones have no address

    def follow_shards(self) -> None:
        """Follow what the user changed on the shards: a ``.data`` of the same shape, ``requires_grad``.

        Raises:
            StateError: A shard's dtype, device or shape was changed.
        """
        if self._is_untouched():
            return
        is_shown_whole = self.whole is not None
        for index, (shard, full, pointer) in enumerate(zip(self.shards, self.fulls, self._pointers, strict=True)):
            if shard.requires_grad is not full.requires_grad:
                full.requires_grad_(shard.requires_grad)
            if is_shown_whole:
                continue
            if shard.data_ptr() == pointer and (pointer or shard.dtype is self.dtype):  # empty ones have no address
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
            with torch.no_grad():
                view.copy_(shard.data)
                shard.data = view

    def _is_untouched(self) -> bool:
        """Every shard lies where it was put and is trained or not as before: what is so in every step but few."""
        return (
            self._are_all_somewhere
            and [shard.data_ptr() for shard in self.shards] == self._pointers
            and [shard.requires_grad for shard in self.shards] == [full.requires_grad for full in self.fulls]
        )

    def use_slot(self, slot: Slot | None) -> None:
        """Make the full parameters in ``slot`` (``None``: in the replica), or move them there."""
        self.slot = slot
        if slot is None:
            assert self.replica is not None
            self.gathered = self.replica
        else:
            self.gathered = slot.allocate(self.compute_dtype, self.device)[: self.layout.numel]
        self._own = self.gathered[self.layout.slice_of(self.rank)] if self.row.shards_optimizer else self.gathered
        self._is_copied = (self.row.shards_parameters or self.is_apart) and not self.is_alone
        storage = self.gathered.untyped_storage()
        self.gathered_in = torch_private.storage_identity(self.gathered)
        is_new = not self.fulls
        for index, (spec, offset) in enumerate(zip(self.layout.params, self.layout.offsets, strict=True)):
            # set_ gives a version counter of its own: refilling the slot does not trip autograd's check.
            stride = spec.stride or contiguous_stride(spec.shape)
            tensor = torch.empty(0, dtype=self.compute_dtype, device=self.device)
            tensor.set_(storage, offset, spec.shape, stride)
            if is_new:
                full = nn.Parameter(tensor, requires_grad=self.shards[index].requires_grad)
                full.__dict__.update(self.shards[index].__dict__)
                self.fulls.append(full)
            else:
                self.fulls[index].data = tensor

    def relabel(self, layout: GroupLayout) -> None:
        """Take a layout that differs in names only."""
        self.layout = layout
        self.reduce_layout = ReduceLayout(layout, self.reduce_layout.num_slices)
        self.gradient.layout = self.reduce_layout

    def gather(self) -> Handle:
        """Issue the all-gather of this group; where every rank holds the whole master, just cast it.

        Collective:
            All-gather on ``dp_shard`` (of experts ``edp``) in the compute dtype, or packed; ``(n-1)/n`` of the padded
            group is sent. All ranks must call in the same order. Nothing is sent where the optimizer is replicated.
        """
        if self.whole is not None:
            return self._take_whole(self.whole)
        comm = self.comms.gather
        if self.transfers is None:
            return self._send(comm, self.master)
        with self.transfers.upward():
            handle = self._send(comm, self._bring(self.transfers))
            return handle if self.row.shards_optimizer else self.transfers.arrival()

    def _send(self, comm: Comm, master: Tensor) -> Handle:
        """Put what this rank has of the parameters into the gathered buffer, and issue the all-gather."""
        form = self.sent_as
        if form is not None:
            return gather_packed(self, comm, lambda own: packed.pack(master, own, form))
        if self._is_copied:
            self._own.copy_(master, non_blocking=True)
        if not self.row.shards_optimizer:
            return Done()
        return comm.all_gather(self.gathered, unit=self.unit.name, cuts=self.layout.uneven_cuts)

    def _bring(self, transfers: Transfers) -> Tensor:
        """The master on its way from the host, or what the device has kept of it in this forward."""
        if self.resident is None:
            return transfers.staged(self.master) if self.is_cast else self.master
        if self.resident_epoch != self.epoch:
            is_cast = self.resident.dtype is not self.dtype
            self.resident.copy_(transfers.staged(self.master) if is_cast else self.master, non_blocking=True)
            self.resident_epoch = self.epoch
        return self.resident

    def _take_whole(self, whole: Tensor) -> Handle:
        """Compute with what full_parameters shows, and what the user may have written there."""
        if self.unit.whole is not None:
            self.unit.whole.has_computed = True
        if whole.data_ptr() != self.gathered.data_ptr():
            self.gathered.copy_(whole)
        return Done()

    @property
    def needs_refresh(self) -> bool:
        """The gathered buffer is not the master itself: changes of the master have to be brought there."""
        return self.row.shards_optimizer or self.is_apart

    def release(self, *, poison: bool) -> None:
        """Give the slot back. With ``poison`` its content is overwritten with NaN, so that a stale use shows."""
        if self.slot is None or self.slot.owner is not self:
            return
        if poison and self.compute_dtype.is_floating_point and not self.is_alone:
            self.gathered.fill_(float("nan"))
        self.slot.owner = None

    @property
    def wants_gradients(self) -> bool:
        """Some parameter is trained: the group takes part in reductions."""
        for shard in self.shards:  # noqa: SIM110 - on a hot path: the first one decides as a rule
            if shard.requires_grad:
                return True
        return False
