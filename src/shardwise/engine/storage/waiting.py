"""Stand-ins for ``.grad`` while sums of accumulated microbatches wait for their reduction.

torch has no hook for zeroing a gradient. So while the sum of a parameter waits in another buffer, its ``.grad`` is a
:class:`WaitingGradient`, a tensor without memory. If another object, or ``None``, has replaced it by the next backward,
``zero_grad()`` was called, and the sum is dropped. Reading a :class:`WaitingGradient` raises, because the reduced value
does not exist yet.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.engine.attach import Observer
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.spec.errors import StateError


class WaitingSums(Observer):
    """Shows stand-ins between the backwards of a step, and drops sums for which ``zero_grad()`` was called."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[Group, _StandIns] = weakref.WeakKeyDictionary()

    def backward_begins(self, engine: Engine) -> None:
        """Restore the real ``.grad``, and drop sums for which ``zero_grad()`` was called."""
        self.hide(engine)

    def backward_ended(self, engine: Engine) -> None:
        """Show stand-ins where sums wait."""
        if not engine.window.syncs:
            self.show(engine)

    def show(self, engine: Engine) -> None:
        """Show a stand-in as ``.grad`` wherever sums wait, so that ``zero_grad()`` is detected."""
        for group in engine.groups:
            if group.gradient.is_local:
                self._groups.setdefault(group, _StandIns(group)).show()

    def hide(self, engine: Engine) -> None:
        """Undo :meth:`show`, and drop the sums that were zeroed."""
        self.drop_zeroed(engine)
        for stand_ins in self._groups.values():
            stand_ins.hide()

    def drop_zeroed(self, engine: Engine) -> None:
        """Drop the sums for which ``zero_grad()`` was called since the last backward."""
        for stand_ins in self._groups.values():
            stand_ins.drop_zeroed(engine)


def set_gradient_sync(engine: Engine, *, is_enabled: bool, mode: str | None = None) -> None:
    """Set whether backwards from now on reduce gradients; ``mode`` as ``Window.mode``."""
    if not is_enabled:
        engine.extras.get_or_make(WaitingSums)
    engine.window.sync(is_last=is_enabled, mode=mode)


def drop_zeroed(engine: Engine) -> None:
    """Drop the sums of accumulated microbatches for which ``zero_grad()`` was called since the last backward."""
    sums = engine.extras.find(WaitingSums)
    if sums is not None:
        sums.drop_zeroed(engine)


def refuse_sums(engine: Engine, call: str) -> None:
    """Refuse ``call`` while gradients of accumulated microbatches are not in ``.grad``."""
    drop_zeroed(engine)
    if any(group.gradient.is_local for group in engine.groups):
        raise StateError(
            f"{call} came before the gradients of accumulated microbatches were reduced over the ranks.\n"
            "  Run the last backward of a step outside of sw.gradient_sync(model, False)."
        )


class _StandIns:
    """The stand-ins of one group, made once."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self._made: dict[int, WaitingGradient] = {}
        self._hidden: dict[int, Tensor | None] = {}  # .grad before; empty while no stand-in is shown

    def show(self) -> None:
        """Show a stand-in as ``.grad`` of every trained parameter."""
        group = self._group()
        assert group is not None
        for index, shard in enumerate(group.shards):
            if not shard.requires_grad:
                continue
            stand_in = self._made.get(index)
            if stand_in is None:
                zero = functools.partial(_zero, weakref.ref(self), index)
                stand_in = self._made[index] = WaitingGradient.of(shard, zero)
            self._hidden[index] = shard.grad
            shard.grad = stand_in

    def zero(self, index: int) -> None:
        """Replace the stand-in of a parameter, on which ``zero_()`` was called, by zeros if it has a gradient."""
        group = self._group()
        assert group is not None
        shard, before = group.shards[index], self._hidden.get(index)
        if before is not None:
            shard.grad = before.zero_()
        elif group.gradient.has_collected(index):
            zeros = torch.zeros_like(shard)
            shard.grad = group.gradient.storage.as_part(zeros, shard) if group.facts.has_part_grads else zeros
        else:
            shard.grad = None

    def hide(self) -> None:
        """Undo :meth:`show` for stand-ins that have not been replaced."""
        group = self._group()
        if group is None or group.form.is_shown:
            return  # full_parameters() has removed every .grad, and restores it at its end
        for index, before in self._hidden.items():
            shard = group.shards[index]
            if shard.grad is self._made[index]:
                shard.grad = before
        self._hidden.clear()

    def drop_zeroed(self, engine: Engine) -> None:
        """Drop the sums of parameters whose ``.grad`` was zeroed, removed or replaced while the sums waited."""
        group = self._group()
        if group is None or not self._hidden or group.form.is_shown:
            return
        zeroed = {index for index in self._hidden if group.shards[index].grad is not self._made[index]}
        if zeroed and group.facts.flat_kinds is not None:
            zeroed |= self._zeroed_elsewhere(group, zeroed, group.facts.flat_kinds)
        if len(zeroed) == len(self._hidden):
            self.hide()
            group.gradient.drop(engine.gradients)
            return
        for index in zeroed:
            del self._hidden[index]
            group.gradient.drop_parameter(index)

    def _zeroed_elsewhere(self, group: Group, zeroed: set[int], kinds: Sequence[int | None]) -> set[int]:
        """Parameters that an optimizer over flat parameters has zeroed, and of whose kind this rank owns no element.

        On this rank such an optimizer has only the first parameter of the kind.
        """
        found: set[int] = set()
        for kind in (0, 1):
            own = [index for index, other in enumerate(kinds) if other == kind]
            if own and own[0] in zeroed and not any(group.pieces[index].numel for index in own):
                found |= self._hidden.keys() & own
        for index in found:
            group.shards[index].grad = None
        return found


def _zero(stand_ins_ref: weakref.ref[_StandIns], index: int) -> None:
    stand_ins = stand_ins_ref()
    if stand_ins is not None:
        stand_ins.zero(index)


class WaitingGradient(Tensor):
    """Gradient of a parameter whose sum has not been reduced. It can be zeroed, replaced or removed, but not read."""

    __torch_function__ = torch_private.disabled_torch_function
    zero: Callable[[], None]

    @classmethod
    def of(cls, parameter: Tensor, zero: Callable[[], None]) -> WaitingGradient:
        """Make a gradient of the parameter's shape, dtype and device, without memory.

        Args:
            parameter: The parameter. The result does not keep it alive.
            zero: Called when the gradient is zeroed in place. It must not keep the parameter alive.
        """
        made: WaitingGradient = torch_private.empty_subclass(cls, parameter)
        made.zero = zero
        return made

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override] - torch's own stub has no defaults
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Allow zeroing the gradient, also through ``.data``, and refuse all other operators."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.zero_.default or func is torch_private.foreach_zero:
            for gradient in [args[0]] if isinstance(args[0], Tensor) else args[0]:
                if isinstance(gradient, WaitingGradient):
                    gradient.zero()
                else:
                    gradient.zero_()
            return args[0]
        raise StateError(
            f"{func} of a gradient that is not there yet: sums of accumulated microbatches wait for their reduction"
            " over the ranks.\n"
            "  Use .grad after a backward outside of sw.gradient_sync(model, False); zero_grad() drops the sums."
        )

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"WaitingGradient(shape={list(self.shape)}, dtype={self.dtype})"
