"""A net under the slots: tensors that autograd saved are checked when backward reads them.

A slot is refilled by other units, and autograd's own version check does not see that. In the normal course of things
the ticket of a unit brings its data back before its backward reads it. A value that leaves a unit otherwise than
through its outputs (hidden in an opaque object, stored on a module, used by the loss) is read with no ticket before it.

So saved tensors that lie in a slot are recorded with their group, and where the slot holds something else when they are
read, the unit is brought back first. That costs tens of microseconds per block: it is on until a pass has been recorded
without a change of the order of units, stays on for a model that ever needed it, and always while debugging or where
slots are freed (``keep_buffers=False``).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.engine import torch_private
from shardwise.features import debug
from shardwise.spec.errors import StateError

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group


class SavedTensorGuard:
    """Packs and unpacks the tensors that autograd saves in a forward of ``engine``'s model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._context: torch.autograd.graph.saved_tensors_hooks | None = None
        self._changes_seen = -1
        self._is_settled = False
        self.num_healed = 0

    @property
    def is_on(self) -> bool:
        """Whether the next forward that trains is watched: always where a slot that is not in use has no memory."""
        engine = self._engine()
        keeps = engine is None or engine.options.keeps_buffers
        return debug.is_on or self.num_healed > 0 or not self._is_settled or not keeps

    def enter_forward(self, *, is_known: bool) -> None:
        """An outermost forward that trains begins; ``is_known``: there was one through the same module before."""
        engine = self._engine()
        if engine is None or not engine.slots.slots or (is_known and not self.is_on) or self._context is not None:
            return
        if torch_private.has_saved_tensor_hooks():
            return  # somebody outside the model has plans for its saved tensors; ours would take their place
        owners = {
            torch_private.storage_identity(slot.buffer): slot for slot in engine.slots.slots if slot.buffer is not None
        }
        me = weakref.ref(self)

        def pack(tensor: Tensor) -> Tensor | tuple[Tensor, weakref.ref[Group]]:
            slot = owners.get(torch_private.storage_identity(tensor))
            if slot is None or slot.owner is None:
                return tensor
            return tensor, weakref.ref(slot.owner)

        def unpack(packed: Tensor | tuple[Tensor, weakref.ref[Group]]) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            tensor, group_ref = packed
            guard, group = me(), group_ref()
            if guard is not None and group is not None:
                guard.check(group)
            return tensor

        self._context = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._context.__enter__()

    def leave_forward(self) -> None:
        """The outermost forward has ended, by return or exception."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None

    def leave_backward(self, num_changes: int) -> None:
        """A backward has ended; ``num_changes`` counts the changes of its order so far."""
        self._is_settled = num_changes == self._changes_seen
        self._changes_seen = num_changes

    def check(self, group: Group) -> None:
        """A saved tensor of ``group`` is about to be read: have its data there."""
        slot, engine = group.slot, self._engine()
        if engine is None or slot is None or (slot.owner is group and not group.unit.handles):
            return
        if torch_private.current_backward() == -1:
            raise StateError(f"saved tensors of unit {group.unit.name!r} can be read only inside backward().")
        self.num_healed += 1
        engine.heal(group.unit)
