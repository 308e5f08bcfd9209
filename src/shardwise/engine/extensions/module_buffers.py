"""Synchronization of buffers that training changes, such as batch norm's running statistics.

Each rank's forward changes that rank's buffers. Before the next forward, with or without grad, one rank's buffers are
sent to all, or their mean is taken, so that an evaluation gives the same result on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.base import Comm
from shardwise.comm.dtype import dtype_name
from shardwise.engine.attach import Observer
from shardwise.engine.engine import Engine
from shardwise.engine.extensions.batch_norm import SyncBatchNorm
from shardwise.spec.order import EntryPoint
from shardwise.spec.traffic.data import BUFFERS, BufferMessage


class BufferSync(Observer):
    """Synchronizes the buffers of a model, in one message per dtype.

    Attributes:
        mode: ``"broadcast"``, ``"mean"`` or ``"none"``, with ``"auto"`` resolved.
        is_auto: Whether ``"auto"`` was given.
        is_due: Whether a forward that may have changed the buffers has run since the last sync.
    """

    def __init__(self, model: nn.Module, mode: str, comm: Comm, ignored: Collection[str] = ()) -> None:
        self.is_auto = mode == "auto"
        selected = _select(model, ignored, saved_only=self.is_auto) if mode != "none" else []
        self._buffers = [(torch_private.buffers_of(module), key) for module, key in selected]
        self._modules = [weakref.ref(module) for module in dict.fromkeys(module for module, _ in selected)]
        self.mode = ("broadcast" if self.is_auto else mode) if self._buffers else "none"
        self.is_due = False
        self._comm = comm
        self.set_sources(range(comm.size))
        self._flats: dict[tuple[str, torch.dtype], Tensor] = {}

    def set_sources(self, ranks: Sequence[int]) -> None:
        """Set the ranks that have a batch; the buffers of the first one are sent, or the mean is taken over them."""
        self._root, self._num_sources = ranks[0], len(ranks)
        self._is_source = self._comm.rank in ranks

    @property
    def has_training_module(self) -> bool:
        """Whether a module with buffers is in training mode, in which any forward may change them."""
        return any(module.training for module_ref in self._modules if (module := module_ref()) is not None)

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:  # noqa: ARG002
        """Synchronize the buffers before an outermost forward, which every rank runs.

        Collective:
            As :meth:`sync`, if one is due, unless microbatches are being accumulated.
        """
        if not self._buffers:
            engine.extras.pause(self)
        elif not engine.window.is_open:
            self.begin(engine)

    def begin(self, engine: Engine) -> None:
        """Synchronize the buffers before one or more forwards on the same parameters, which every rank runs.

        Collective:
            As :meth:`sync`, if one is due.
        """
        self.sync()
        self.is_due = (engine.forward.trains or self.has_training_module) and bool(self._buffers)

    def sync(self) -> None:
        """Make the buffers equal on all ranks, if that is due.

        Collective:
            A broadcast from one rank for each dtype; with ``"mean"`` also an all-reduce for each floating-point dtype.
            All ranks must call.
        """
        if not self.is_due:
            return
        self.is_due = False
        for dtype, tensors in self._by_dtype().items():
            self._sync_dtype(dtype, tensors)

    @torch.no_grad()
    def _sync_dtype(self, dtype: torch.dtype, tensors: list[Tensor]) -> None:
        numel = sum(tensor.numel() for tensor in tensors)
        if numel == 0:
            return
        device = tensors[0].device
        flat = self._flat("values", numel, dtype, device)
        pieces = [
            piece.view(tensor.shape)
            for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
        ]
        torch._foreach_copy_(pieces, tensors)
        is_averaged = self.mode == "mean" and _is_averaged(dtype)
        own = self._flat("differences", numel, dtype, device).copy_(flat) if is_averaged else flat
        self._comm.broadcast(
            flat.view(torch.uint8) if dtype is torch.bool else flat, root=self._root, unit=BUFFERS
        ).wait()
        if is_averaged:
            # The root's value plus the mean difference: values that are equal on all ranks, even infinite ones, stay.
            is_same = own == flat
            own.sub_(flat).masked_fill_(is_same, 0)
            if not self._is_source:
                own.zero_()
            self._comm.all_reduce(own, unit=BUFFERS, divisor=self._num_sources).wait()
            flat.add_(own)
        torch._foreach_copy_(tensors, pieces)

    def messages(self) -> list[BufferMessage]:
        """The messages of a sync, for the traffic arithmetic of ``spec``."""
        found = []
        for dtype, tensors in self._by_dtype().items():
            numel = sum(tensor.numel() for tensor in tensors)
            is_averaged = self.mode == "mean" and _is_averaged(dtype)
            found.append(BufferMessage(dtype_name(dtype), numel, is_averaged=is_averaged))
        return [message for message in found if message.numel]

    def __str__(self) -> str:
        if self.mode == "none":
            return "not synchronised" + (": none is saved with the model (auto)" if self.is_auto else "")
        count = sum(len(tensors) for tensors in self._by_dtype().values())
        which = "that are saved with the model (auto)" if self.is_auto else "in all"
        how = "rank 0's are sent" if self.mode == "broadcast" else "averaged over the ranks"
        return f"{count} {which}; {how} before the first forward after one in train mode"

    def _by_dtype(self) -> dict[torch.dtype, list[Tensor]]:
        """The present buffers, each once, as ``.data``: autograd must not count a sync as an in-place change."""
        found: dict[torch.dtype, list[Tensor]] = {}
        seen: set[int] = set()
        for buffers, key in self._buffers:
            tensor = buffers.get(key)
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found.setdefault(tensor.dtype, []).append(tensor.data)
        return found

    def _flat(self, use: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        flat = self._flats.get((use, dtype))
        if flat is None or flat.numel() != numel:
            flat = self._flats[use, dtype] = torch.empty(numel, dtype=dtype, device=device)
        return flat


def _is_averaged(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _select(model: nn.Module, ignored: Collection[str], *, saved_only: bool) -> list[tuple[nn.Module, str]]:
    """The buffers to send, by module and key, without those of modules that synchronize themselves.

    ``saved_only`` leaves out buffers that are not saved with the model (masks, rotary frequencies): training does not
    change these.
    """
    return [
        (module, key)
        for path, module in model.named_modules()
        if not isinstance(module, (nn.SyncBatchNorm, SyncBatchNorm))
        for key in torch_private.buffers_of(module)
        if (f"{path}.{key}" if path else key) not in ignored
        and (not saved_only or torch_private.is_persistent(module, key))
    ]


def sync_if_due(engine: Engine) -> None:
    """Synchronize the buffers of an engine's model before one or more forwards on the same parameters.

    Collective:
        As :meth:`BufferSync.sync`, if one is due. All ranks must call.
    """
    buffers = engine.extras.find(BufferSync)
    if buffers is not None:
        buffers.begin(engine)
