"""The hooks that torch calls: around forward, when backward reaches a call, and at its end."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.profiler import record_function

from shardwise import torch_private
from shardwise.nested import parts_of, replace_tensors
from shardwise.spec.errors import Uncopyable
from shardwise.spec.order import EntryPoint

if TYPE_CHECKING:
    from shardwise.engine.group import Group
    from shardwise.engine.unit import Member, Unit


class Ticket:
    """One forward call of a unit, as a hook on each of its outputs.

    A call is outstanding until backward reaches it or the parameters change, even if its outputs have been freed. How
    long outputs live may differ between ranks, but the order of reductions must not.

    Args:
        on_reached: A method of the engine, called when backward has reached the call.
        unit: The unit.
        path: Path of the module that was called.
        entry: The entry into the model of the forward.
        version: ``Engine.version`` at the call.
        is_counted: Whether the call counts as outstanding.
    """

    __slots__ = ("_is_counted", "_on_reached", "_unit", "entry", "generation", "is_repeated", "path", "version")

    def __init__(
        self,
        on_reached: Callable[[Ticket, Unit], None],
        unit: Unit,
        path: str,
        *,
        entry: EntryPoint,
        version: int,
        is_counted: bool,
    ) -> None:
        self._on_reached = weakref.WeakMethod(on_reached)
        self._unit = weakref.ref(unit)
        self._is_counted = is_counted
        self.is_repeated = not is_counted  # made by a reentrant recomputation
        self.generation = -1
        self.version = version
        self.path = path
        self.entry = entry
        if is_counted:
            unit.calls.num_outstanding += 1

    def __call__(self, _grad: Tensor) -> None:
        """Notify the engine that backward has reached the call."""
        on_reached, unit = self._on_reached(), self._unit()
        if on_reached is not None and unit is not None:
            on_reached(self, unit)

    def mark_reached(self, unit: Unit) -> None:
        """Count this call of ``unit`` as outstanding no longer."""
        if self._is_counted and unit.calls.num_outstanding:  # an update of other parameters of the unit sets it to 0
            unit.calls.num_outstanding -= 1
        self._is_counted = False


def attach_tickets(make: Callable[[], Ticket], output: object, since: int) -> None:
    """Attach one ticket to every output that a call has computed; ``make`` is called if there is such an output.

    An input that a module returns unchanged gets no ticket, because that would fire much later, in the backward of the
    module that computed the tensor. Where a unit returns the output of an enclosed unit, the ticket of the outer unit
    fires first: backward enters units from the outside in, and the order begins with the same unit for every loss.
    ``since`` is autograd's sequence number at the start of the call.
    """
    ticket: Ticket | None = None
    for tensor in tensors_in(output):
        node = tensor.grad_fn
        if node is None or torch_private.sequence_number(node) < since:
            continue
        if ticket is None:
            ticket = make()
        if tensor._backward_hooks:  # noqa: SLF001 - hooks of an enclosed unit, or of the user
            torch_private.hook_first(tensor, ticket)
        else:
            tensor.register_hook(ticket)


class BeforeForward(Uncopyable):
    """Forward pre-hook of a unit's module."""

    def __init__(self, notify: Callable[..., None], unit: Unit, member: Member) -> None:
        self.notify, self.unit, self.member = notify, unit, member

    def __call__(self, _module: nn.Module, _args: object) -> None:
        """Notify the engine that the module is about to run."""
        self.notify(self.unit, self.member)


class AfterForward(BeforeForward):
    """Forward hook of a unit's module."""

    def __call__(self, _module: nn.Module, _args: object, output: object = None) -> object:
        """Notify the engine that the module has run. Returns the output that replaces ``output``."""
        # Usually the output is one computed tensor: not a parameter (a leaf), not a view (it has a base). A sparse
        # tensor has no base, but shares memory with its values.
        if (
            not isinstance(output, Tensor)
            or output.grad_fn is None
            or output._base is not None  # noqa: SLF001
            or output.layout is not torch.strided
        ):
            output = without_parameters(self.unit, output)
        self.notify(self.unit, self.member, output)
        return output


def without_parameters(unit: Unit, output: object) -> object:
    """Return ``output`` of a call of ``unit`` with the unit's parameters, and views of them, replaced by copies.

    The memory of the parameters is freed as soon as the unit is released. Replicated parameters are not copied; a
    parameter itself becomes a view, to which a ticket can be attached.
    """
    is_resident = {torch_private.storage_identity(group.gathered): group.is_resident for group in unit.groups}

    def change(tensor: Tensor) -> Tensor:
        stays = is_resident.get(torch_private.storage_identity(tensor))
        if stays is False:
            return tensor.clone()
        return tensor.view_as(tensor) if stays and tensor.is_leaf else tensor

    return replace_tensors(output, change) if is_resident else output


def gradient_hook(method: Callable[[Group, int], None], group: Group, index: int) -> Callable[[Tensor], None]:
    """Make a hook for a parameter of a group that calls a method of the engine when its gradient is accumulated."""
    method_ref, group_ref = weakref.WeakMethod(method), weakref.ref(group)

    def arrived(_parameter: Tensor) -> None:
        method, group = method_ref(), group_ref()
        if method is not None and group is not None:
            method(group, index)

    return arrived


class EndOfBackward:
    """The callback at the end of a backward."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = weakref.WeakMethod(notify)

    def __call__(self) -> None:
        """Notify the engine that backward has ended."""
        notify = self._notify()
        if notify is not None:
            with torch.no_grad():  # torch restores the caller's grad mode before it runs callbacks
                notify()


def tensors_in(value: object, levels: int = 3) -> Iterator[Tensor]:
    """Yield every tensor in an output: in containers and in objects' attributes, ``levels`` deep."""
    if isinstance(value, Tensor):
        yield value
        return
    parts = parts_of(value)
    is_open = hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, ModuleType))
    if parts is None and levels and is_open:
        parts, levels = tuple(vars(value).values()), levels - 1
    for part in parts or ():
        yield from tensors_in(part, levels)


# -- names in a profile


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def label(what: str, unit: str) -> AbstractContextManager[Any]:
    """Mark a range in the profile, such as ``shardwise::gather [blocks.3]``. Nothing happens if no profiler runs.

    The ranges are ``gather`` (issuing it), ``wait`` (for a gather; on a GPU the compute stream waits), ``forward`` (of
    the unit), ``backward`` (entering the unit: reducing others, waiting for its parameters), ``reduce`` (issuing it).
    """
    # torch.optim reads this private flag too; there is no public one.
    is_profiled = profiler._is_profiler_enabled  # noqa: SLF001
    return record_function(f"shardwise::{what} [{unit}]") if is_profiled else _NOTHING


def begin_label(labels: list[AbstractContextManager[Any]], what: str, unit: str) -> None:
    """Begin a range that :func:`end_label` ends; ``labels`` collects the open ranges, innermost last."""
    named = label(what, unit)
    if named is not _NOTHING:
        named.__enter__()
        labels.append(named)


def end_label(labels: list[AbstractContextManager[Any]]) -> None:
    """End the range that was begun last, if there is one."""
    if labels:
        labels.pop().__exit__(None, None, None)
