"""What goes wrong in a step: forwards and backwards that raised, gradients without a ticket, uses that are refused."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.engine.unit import State, Unit
from shardwise.spec.errors import CommError, StateError

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group


def recover(engine: Engine) -> None:
    """A backward raised before its end: drop what it left and start afresh."""
    while engine.reducing:
        engine.reducing.popleft()[2].wait()  # the buffer is in flight; what it brings is dropped below
    for unit in engine.units:
        if unit.state is State.REDUCING:
            unit.move_to(State.SHARDED)
        if unit.state is State.UNSHARDING:
            engine.wait(unit)
        engine.reshard(unit)
        unit.clear_frames()
        unit.replays.clear()
        unit.num_silent = unit.num_repeated = 0
        unit.has_run = False
        for group in unit.groups:
            group.gradient.drop(engine.gradients)
    engine.entered.clear()
    engine.left.clear()
    engine.is_in_backward = False
    engine.active = None
    engine.num_frames = 0
    if engine.had_sums:
        raise StateError(
            "a backward failed while gradients were being accumulated: the sums of the earlier microbatches are"
            " lost.\n"
            "  Call zero_grad() and begin the step again."
        )
    if any(unit.updated_in == engine.generation for unit in engine.units):
        raise StateError(
            "a backward failed after it had updated some of the units: the parameters are of two different steps.\n"
            "  Load a checkpoint."
        )


def wait_for_all(engine: Engine) -> None:
    """The model is going: what is under way must have come before its memory is given to others.

    Over Gloo a receive whose memory has gone also holds up every later message of the process group. Peers that work on
    issue the same, so that the wait ends; where they do not, the watch ends it. The end of the process frees nothing
    that anybody would be given.
    """
    if sys.is_finalizing():
        return
    handles = [handle for unit in engine.units for handle in unit.handles]
    for handle in [*handles, *(entry[2] for entry in engine.reducing)]:
        with contextlib.suppress(CommError):  # whoever communicates next is told
            handle.wait()


def drop_later(engine: Engine, *, had_sums: bool) -> None:
    """The step of a pipeline raised: the next call drops what it has added up, and waits for what it has under way.

    Nobody waits here: peers may be waiting for this rank in turn.

    Args:
        engine: Of the model.
        had_sums: Gradients of earlier steps were waiting when it began, and are lost with its own.
    """
    engine.is_in_backward, engine.had_sums = True, had_sums


def finish_strays(engine: Engine) -> None:
    """Reduce what no ticket announced: values that left a unit by a side door, and microbatches left over.

    Raises:
        StateError: A gradient came for a unit whose parameters had been released: it cannot be trusted.
    """
    for unit in engine.units:
        trained = [group for group in unit.groups if group.wants_gradients]
        strays = [
            spec
            for group in trained
            for spec, full in zip(group.layout.params, group.fulls, strict=True)
            if full.grad is not None
        ]
        was_kept = unit.state is State.UNSHARDED and not unit.reshards_after_forward
        is_released = not unit.is_resident and not was_kept and unit.healed_in != engine.generation
        if strays and (is_released or unit.updated_in == engine.generation):
            for group in trained:
                for full in group.fulls:
                    full.grad = None
            when = "while unit {!r} was not gathered" if is_released else "after unit {!r} had been updated"
            raise StateError(
                f"a gradient for {strays[0].name!r} (logical shape {list(strays[0].shape)}) arrived"
                f" {when.format(unit.name)}: a value left the unit otherwise than through its outputs.\n"
                "  Return the value from the unit's forward, or wrap the module that uses it as well."
            )
        if strays or (engine.syncs_gradients and any(group.gradient.is_local for group in trained)):
            engine.finalise(unit)


def leave_frames(engine: Engine) -> None:
    """A forward was left without its hooks: nothing is under way any more."""
    engine.saved.leave_forward()
    engine.left.clear()
    for unit in engine.units:
        unit.clear_frames()
        if unit.state is State.UNSHARDING:
            engine.wait(unit)
        engine.reshard(unit)
    engine.num_frames = 0


def refuse_grad(engine: Engine) -> None:
    """As :func:`refuse_between`, of a forward."""
    if torch.is_grad_enabled():
        refuse_between(engine, "a forward with grad")


def refuse_compiled(unit: Unit) -> None:
    """Refuse a call of the unit from compiled code: the compiler would trace the engine.

    Raises:
        StateError: It is one.
    """
    if torch_private.is_in_compiled_code():
        raise StateError(
            f"unit {unit.name!r} was called inside torch.compile(), which would trace the engine's messages.\n"
            "  Set sw.ParallelPlan(compile=True), which compiles the units, and leave torch.compile() out."
        )


def refuse_distributed_autograd(forward_thread: int) -> None:
    """Refuse a backward of ``torch.distributed.autograd``, which keeps gradients in a context of its own.

    A plain backward on the CPU runs in the thread that calls it, while other processes' may pass through this one.

    Args:
        forward_thread: Where forward ran.

    Raises:
        StateError: This is one.
    """
    if not torch_private.is_in_distributed_autograd() or threading.get_ident() == forward_thread:
        return
    text = (
        "dist_autograd.backward() reached a parallelized model: it keeps gradients in its context, where they are not"
        " summed over the ranks, and DistributedOptimizer does not know this rank's shards.\n"
        "  Run two backwards: x = remote.detach().requires_grad_(); loss_of(model(x)).backward(); optimizer.step() for"
        " the model, then dist_autograd.backward(context, [(remote * x.grad).sum()]) for the remote modules. For a huge"
        " embedding sw.ParallelPlan(row_sharded=[...]) needs no remote module."
    )
    sys.stderr.write(f"shardwise: StateError: {text}\n")  # of an exception RPC tells the user "python_error" alone
    raise StateError(text)


def refuse_between(engine: Engine, what: str) -> None:
    """Between the tokens of a stream the modules hold whole parameters, and gradients would be lost."""
    step = engine.pipeline_step
    if step is not None and step.only_for is not None:
        raise StateError(
            f"{what} while {step.only_for} is under way: its iterator is neither exhausted nor closed.\n"
            "  Call its close(), or go on to its end, before."
        )


def refuse_rootless(engine: Engine) -> None:
    """Refuse a forward of modules that are one unit while nothing around them is one.

    Raises:
        StateError: There is no unit around them.
    """
    if not engine.has_root:
        names = ", ".join(unit.type_name for unit in engine.units[1:] if unit.depth == 1)
        raise StateError(
            f"a forward of {names}: sw.fully_shard made one unit of these modules, but no module around them is a"
            " unit.\n"
            "  Call sw.fully_shard(model) for the model that holds them before the first forward."
        )


def refuse_whole(engine: Engine) -> None:
    """Inside full_parameters a forward may compute where every rank can, but not train."""
    shown = [unit.whole for unit in engine.units if unit.whole is not None]
    if shown and (torch.is_grad_enabled() or any(whole.is_on_root_only for whole in shown)):
        raise StateError(
            "a forward with grad, or on some ranks only, inside sw.full_parameters(): gradients could not be"
            " reduced.\n"
            "  Train outside of it; inside, use torch.no_grad(), without rank0_only."
        )


def check_not_updated(engine: Engine, unit: Unit) -> None:
    """Backward needs the parameters with which forward has computed.

    Raises:
        StateError: The optimizer has changed them, as backward seemed to have left the unit.
    """
    if unit.updated_in == engine.generation:
        raise StateError(
            f"backward came back to unit {unit.name!r} after its parameters had been updated: a value left the unit"
            " otherwise than through its outputs.\n"
            "  Return the value from the unit's forward, or do without sw.optimizer_in_backward()."
        )


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
        return is_on or self.num_healed > 0 or not self._is_settled or not keeps

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


#: Released slots are filled with NaN, and saved tensors are checked in every step. Slow; on in the engine's tests.
is_on = False


@contextlib.contextmanager
def checks(*, is_enabled: bool = True) -> Iterator[None]:
    """Switch the debug flag inside the context."""
    global is_on  # noqa: PLW0603 - one flag for the process, read on hot paths
    before, is_on = is_on, is_enabled
    try:
        yield
    finally:
        is_on = before
