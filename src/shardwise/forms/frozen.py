"""Frozen linear weights, held and gathered as int8 blocks or in 16 bit (``spec.quantize``).

The optimizer never touches them, so their master needs no more digits than the model's loss does. They are unpacked
into a slot, in the compute dtype, while their unit computes, and given up afterwards: also where parameters are
replicated, whose ranks hold all of the packed bytes and unpack without a message.

Between steps such a parameter shows its codes: a view of int8 (bf16) elements of the master.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwise.comm.base import Done, Handle
from shardwise.engine.group import Group
from shardwise.forms.host import host_zeros
from shardwise.forms.packed import codes_of, empty_packed, gather_packed, pack, unpack
from shardwise.spec.layout import GroupLayout
from shardwise.spec.placement import Placements
from shardwise.spec.policies import OffloadPolicy

if TYPE_CHECKING:
    from shardwise.engine.unit import Unit

Use = tuple[nn.Module, str, str]  # a module, its path, the attribute


def is_quantizable(parameter: nn.Parameter, uses: Iterable[Use], form: str) -> bool:
    """Whether ``parameter`` is a frozen weight of linear layers alone, and would become smaller.

    Linear layers are ``nn.Linear`` with its subclasses, and the transposed one that transformers calls ``Conv1D``. A
    weight that is tied to anything else, such as an embedding, is left as it is.
    """
    is_smaller = parameter.is_floating_point() and (form != "bf16" or parameter.dtype.itemsize > 2)
    return (
        is_smaller
        and not parameter.requires_grad
        and all(attribute == "weight" and isinstance(user, _linear_classes()) for user, _, attribute in uses)
    )


def _linear_classes() -> tuple[type[nn.Module], ...]:
    transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return (nn.Linear,) if transposed is None else (nn.Linear, transposed)


class FrozenGroup(Group):
    """A group of frozen weights.

    Attributes:
        held_as: ``int8`` or ``bf16``.
        master: The packed bytes of this rank's slice; of everything where parameters are replicated.
    """

    def __init__(
        self,
        unit: Unit,
        layout: GroupLayout,
        row: Placements,
        shards: Sequence[nn.Parameter],
        *,
        form: str,
        rank: int,
        num_ranks: int,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        offload: OffloadPolicy | None = None,
    ) -> None:
        self.held_as = self._form = form
        place = {"rank": rank, "num_ranks": num_ranks}
        super().__init__(unit, layout, row, shards, **place, is_trainable=False, dtypes=dtypes, offload=offload)
        self.sent_as = form if dtypes[1] is not self.elements.dtype else None

    def _make_master(self) -> Tensor:
        """Pack the parameters, as the plain model holds them."""
        is_whole = not self.row.shards_optimizer
        flat = torch.zeros(self.master_numel, dtype=self.dtype, device=self.device)
        self._fill(flat, whole=is_whole)
        packed = empty_packed(flat.numel(), self._form, self.dtype, self.device)
        pack(flat, packed, self._form)
        if self.offload is None:
            return packed
        return host_zeros(packed.numel(), packed.dtype, self.device, pins=self.offload.pin_memory).copy_(packed)

    @property
    def elements(self) -> Tensor:
        """The codes."""
        return codes_of(self.master, self.master_numel, self._form)

    @property
    def uses_slot(self) -> bool:
        """Always: nothing else holds the parameters unpacked."""
        return True

    @property
    def needs_refresh(self) -> bool:
        """Always: what is gathered is never the master itself."""
        return True

    def values(self) -> Tensor:
        """The parameters as they are read from the codes, in the dtype that they had, in fresh memory."""
        flat = torch.empty(self.master_numel, dtype=self.dtype, device=self.master.device)
        unpack(self.master, flat, self._form, self.dtype)
        return flat

    def set_values(self, flat: Tensor) -> None:
        """Pack ``flat``."""
        pack(flat.to(self.master.device), self.master, self._form)

    def gather(self) -> Handle:
        """Issue the all-gather of the packed bytes, and unpack when it is waited for.

        Collective:
            All-gather on ``dp_shard`` (of experts ``edp``); every rank sends its packed slice to each other. All ranks
            must call in the same order. Nothing is sent where parameters are replicated.
        """
        if self.whole is not None:
            return self._take_whole(self.whole)
        if not self.row.shards_optimizer:
            unpack(self.master, self.gathered, self._form, self.dtype)
            return Done()
        comm = self.comms.gather
        with self.transfers.upward() if self.transfers is not None else contextlib.nullcontext():
            if self.sent_as is None:  # the codes are what is computed with
                self._own.copy_(self.elements, non_blocking=True)
                return comm.all_gather(self.gathered, unit=self.unit.name, cuts=self.layout.uneven_cuts)
            return gather_packed(self, comm, lambda own: own.copy_(self.master, non_blocking=True))
