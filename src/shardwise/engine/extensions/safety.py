"""Detection of reads of released parameters (saved tensors, foreign backwards) and of lost writes.

Normally the ticket of a unit gathers its parameters before its backward reads them. A value that leaves a unit without
passing through the unit's outputs (hidden in an opaque object, stored on a module, used by the loss) is read without a
ticket before it.

So saved tensors that share memory with parameters are recorded with their group. If the group is released when they are
read, the unit is gathered first. This costs tens of microseconds per block. It is on until a pass has been recorded
without a change of the order of units, and stays on for a model that ever needed it. While it is off, such a read finds
no memory: torch raises an error in a matrix product, and an element-wise kernel crashes the process.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.engine import engine as engine_module
from shardwise.engine.attach import Observer
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.spec.errors import StateError
from shardwise.spec.order import EntryPoint


@contextlib.contextmanager
def checks(*, is_enabled: bool = True) -> Iterator[None]:
    """Fill buffers with NaN before each gather, and check saved tensors in every step, inside the context. Slow."""
    before, engine_module.is_checking = engine_module.is_checking, is_enabled
    try:
        yield
    finally:
        engine_module.is_checking = before


class SavedTensors(Observer):
    """Gathers a released unit when autograd reads a tensor that it saved of the unit's parameters.

    Attributes:
        num_regathered: Number of such reads so far.
        pack, unpack: The installed saved-tensor hooks; ``None`` while no forward is watched.
    """

    def __init__(self) -> None:
        self._context: torch.autograd.graph.saved_tensors_hooks | None = None
        self._changes_seen = -1
        self._is_settled = False
        self.num_regathered = 0
        self.pack: Callable[[Tensor], Any] | None = None
        self.unpack: Callable[[Any], Tensor] | None = None

    @property
    def _is_on(self) -> bool:
        """Whether the next forward that trains is watched."""
        return engine_module.is_checking or self.num_regathered > 0 or not self._is_settled

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:  # noqa: ARG002
        """Install the hooks if they are on, and always in the first forward through an entry of the model."""
        if not engine.forward.trains or self._context is not None:
            return
        if engine.orders.forward_order.is_recorded and not self._is_on:
            return
        if torch_private.has_saved_tensor_hooks():
            return  # the caller has installed saved-tensor hooks, which ours would override
        owners = {
            torch_private.storage_identity(group.gathered): weakref.ref(group)
            for group in engine.groups
            if group.resident_buffer is None
        }
        if not owners:
            return
        self_ref, engine_ref = weakref.ref(self), weakref.ref(engine)

        def pack(tensor: Tensor) -> Tensor | tuple[Tensor, weakref.ref[Group]]:
            group_ref = owners.get(torch_private.storage_identity(tensor))
            return tensor if group_ref is None else (tensor, group_ref)

        def unpack(packed: Tensor | tuple[Tensor, weakref.ref[Group]]) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            tensor, group_ref = packed
            observer, engine, group = self_ref(), engine_ref(), group_ref()
            if observer is not None and engine is not None and group is not None:
                observer.check(engine, group)
            return tensor

        self.pack, self.unpack = pack, unpack
        self._context = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._context.__enter__()

    def forward_ended(self, engine: Engine) -> None:  # noqa: ARG002
        """Remove the hooks."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = self.pack = self.unpack = None

    def backward_ended(self, engine: Engine) -> None:
        """Turn the hooks off for later forwards if the order of units is that of the backward before."""
        num_changes = sum(1 + order.num_changes for order in engine.orders.backward.values())
        self._is_settled = num_changes == self._changes_seen
        self._changes_seen = num_changes
        if not self._is_on:
            engine.extras.pause(self)

    def check(self, engine: Engine, group: Group) -> None:
        """Gather the unit of ``group`` if it is released, because autograd is about to read a saved tensor of it."""
        if group.is_allocated and not group.unit.handles:
            return
        if torch_private.current_backward() == -1:
            raise StateError(f"saved tensors of unit {group.unit.name!r} can be read only inside backward().")
        self.num_regathered += 1
        engine.extras.resume_all()
        engine.regather(group.unit)


def parametrized_in_forward(root: nn.Module) -> set[str]:
    """Names of the parameters that peft adapts as tensors, such as stacked experts and their routers.

    peft's ``ParamWrapper`` registers a parametrization of the parameter in each forward, and removes it. torch then
    calls ``set_`` on the parameter with the parameter itself, which counts as a write and changes nothing.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    wrappers: list[Any] = [module for module in root.modules() if type(module).__name__ == "ParamWrapper"]
    return {f"{paths[id(each.get_base_layer())]}.{each.parameter_name}" for each in wrappers}


class LostWrites(Observer):
    """Refuses a forward that writes to parameters where the next gather would undo it.

    Forwards are checked until one with grad has ended, and again when a step differs from earlier ones.
    """

    def __init__(self, root: nn.Module) -> None:
        self._versions: list[list[int]] = []
        self._set_to_themselves = parametrized_in_forward(root)

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:  # noqa: ARG002
        """Record the version counter of each full parameter."""
        self._versions = [_versions_of(group) for group in engine.groups]

    def forward_ended(self, engine: Engine) -> None:
        """Compare the version counters, unless the forward raised."""
        before, self._versions = self._versions, []
        if engine.forward.num_frames or sys.exception() is not engine.forward.handled_exception:
            return
        for group, versions in zip(engine.groups, before, strict=False):
            memory = torch_private.storage_identity(group.gathered)
            is_lost = group.is_copied or not group.is_permanent
            for spec, full, old, new in zip(
                group.layout.params, group.unsharded, versions, _versions_of(group), strict=True
            ):
                is_written = new != old and spec.name not in self._set_to_themselves
                if torch_private.storage_identity(full) != memory or (is_lost and is_written):
                    engine.clean_up_forward()  # peers that negotiate the forward then raise too
                    engine.extras.resume_all()
                    raise StateError(
                        f"forward has written to parameter {spec.name!r}: this is a copy that was gathered for the"
                        " forward, and the write would be lost.\n  Compute the new value without writing it"
                        " (F.normalize(self.weight) in the product), or write it between steps inside"
                        " `with sw.full_parameters(model, writeback=True):`. What initializes itself by the first batch"
                        " (ActNorm) must have run before sw.parallelize(). Under strategy='ddp' in the model's own"
                        " dtype parameter.copy_(value) works; parameter.data = value never does, and neither does"
                        " flatten_parameters() of an RNN on a GPU: leave it out."
                    )
        if engine.forward.trains:
            engine.extras.pause(self)


def _versions_of(group: Group) -> list[int]:
    return [torch_private.version_of(full) for full in group.unsharded]


class ForeignBackwards(Observer):
    """Refuses a backward of ``torch.distributed.autograd``, which stores gradients in a separate context.

    A plain backward on the CPU runs in the calling thread; backwards of other processes run in other threads.
    """

    def backward_begins(self, engine: Engine) -> None:
        """Refuse the backward if it belongs to ``torch.distributed.autograd``."""
        if not torch_private.is_in_distributed_autograd() or threading.get_ident() == engine.forward.thread:
            engine.extras.pause(self)
            return
        text = (
            "dist_autograd.backward() reached a parallelized model: it keeps gradients in its context, where they are"
            " not summed over the ranks, and DistributedOptimizer does not know this rank's shards.\n"
            "  Run two backwards: x = remote.detach().requires_grad_(); loss_of(model(x)).backward(); optimizer.step()"
            " for the model, then dist_autograd.backward(context, [(remote * x.grad).sum()]) for the remote modules."
            " For a huge embedding sw.ParallelPlan(row_sharded=[...]) needs no remote module."
        )
        sys.stderr.write(f"shardwise: StateError: {text}\n")  # RPC reports an exception only as "python_error"
        raise StateError(text)
