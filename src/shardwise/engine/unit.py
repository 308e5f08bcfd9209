"""A unit: one wrapped module, or several small ones, whose parameters are gathered, released and reduced together.

===========  =====================================  ==========================================
state        parameters                             the module holds
===========  =====================================  ==========================================
SHARDED      only this rank's slice is valid        the shards
UNSHARDING   being gathered                         the shards
UNSHARDED    full, in the gathered buffer           the full ones while the unit computes
REDUCING     as SHARDED; gradients being reduced    the shards
===========  =====================================  ==========================================

Where parameters are replicated (``ddp``, ``zero1``, ``zero2``) the states are the same. The gathered buffer is then the
permanent replica, and a gather brings it up to date.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise import torch_private
from shardwise.spec.errors import StateError
from shardwise.spec.order import Ahead

if TYPE_CHECKING:
    from shardwise.comm.base import Handle
    from shardwise.engine.group import Group


class State(StrEnum):
    """The states of a unit's parameters."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    REDUCING = "reducing"


#: The only allowed moves. (UNSHARDED, UNSHARDING) brings a replica or a kept unit up to date. A unit is released before
#: it is reduced, except a unit that a pipeline's step keeps gathered: (UNSHARDED, REDUCING). A gather under way is
#: waited for before any other move.
LEGAL_MOVES: frozenset[tuple[State, State]] = frozenset(
    {
        (State.SHARDED, State.UNSHARDING),
        (State.UNSHARDING, State.UNSHARDED),
        (State.UNSHARDED, State.UNSHARDING),
        (State.UNSHARDED, State.SHARDED),
        (State.UNSHARDED, State.REDUCING),
        (State.SHARDED, State.REDUCING),
        (State.REDUCING, State.SHARDED),
    }
)


class Owner:
    """A module that holds parameters of a unit, with its shards and its full parameters by attribute name.

    Attributes:
        parameters: The module's ``_parameters``. The module itself has only a weak reference, so that it can be freed.
        is_guarded: Whether ``state_dict()`` and similar methods of the module refuse sharded parameters.
        replaced: Names of parameters that ``torch.func.functional_call`` has replaced for this call.
    """

    __slots__ = ("flat_weights", "is_guarded", "module", "parameters", "path", "replaced", "shards", "unsharded")

    def __init__(self, module: nn.Module, path: str, shards: dict[str, nn.Parameter]) -> None:
        self.module = weakref.ref(module)
        self.path = path
        self.parameters = torch_private.parameters_of(module)
        self.shards = shards
        self.is_guarded = False
        self.unsharded: dict[str, nn.Parameter] = {}
        self.replaced: frozenset[str] = frozenset()
        # RNNs read their weights from a separate list.
        self.flat_weights = torch_private.take_rnn_weights(module) if isinstance(module, nn.RNNBase) else None

    def set_parameters(self, parameters: dict[str, nn.Parameter]) -> None:
        """Make the module compute with ``parameters``."""
        if self.replaced:
            parameters = {name: parameter for name, parameter in parameters.items() if name not in self.replaced}
        self.parameters.update(parameters)
        if self.flat_weights is not None:
            module = self.module()
            if module is not None:
                module.__dict__["_flat_weights"] = [self.parameters.get(name) for name in self.flat_weights]

    def accept_replaced(self) -> None:
        """Accept tensors that ``functional_call`` has put in place of shards; refuse any other replacement."""
        names = [name for name, shard in self.shards.items() if self.parameters.get(name) is not shard]
        title = f"{self.path}.{names[0]}".lstrip(".")
        if not torch_private.is_in_functional_call():
            raise replaced_after(title)
        for name in names:
            value, shape = self.parameters[name], list(self.unsharded[name].shape)
            if value is None or list(value.shape) != shape:
                raise StateError(
                    f"torch.func.functional_call() gave {title!r} a value of shape"
                    f" {None if value is None else list(value.shape)}; its unit computes with shape {shape}, of which"
                    " this rank's parameter is a part.\n"
                    "  Make the values from model.state_dict() of `with sw.full_parameters(model):`, or set"
                    " strategy='ddp', under which model.named_parameters() gives whole tensors."
                )
        self.replaced = frozenset(names)


def replaced_after(name: str) -> StateError:
    """Make the error for a parameter that was replaced after ``sw.parallelize`` sharded it."""
    return StateError(
        f"parameter {name!r} was replaced or removed after sw.parallelize(): this rank's shard and the optimizer are"
        " still those of before.\n"
        "  Replace, or prune, it before sw.parallelize(). To give it other values, use sw.load_full_state_dict()."
    )


#: The key of guards among a module's forward pre-hooks; torch's keys are not negative.
_GUARD = -1
#: Forward pre-hooks that are installed only while a member holds shards: (the module's hooks, the guard).
Guards = Sequence[tuple[MutableMapping[int, Callable[..., object]], Callable[..., object]]]


class Member:
    """One module of a unit. It holds the full parameters while it computes, and otherwise the shards."""

    __slots__ = ("__weakref__", "guards", "module", "num_frames", "owners", "path", "uses_unsharded")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = weakref.ref(module)
        self.owners: list[Owner] = []
        self.guards: Guards = ()
        self.uses_unsharded = False
        self.num_frames = 0  # forward calls under way

    def set_guards(self, guards: Guards) -> None:
        """Replace the guards, which are installed while the modules hold shards."""
        for hooks, _ in self.guards:
            hooks.pop(_GUARD, None)
        self.guards = guards
        if not self.uses_unsharded:
            for hooks, guard in self.guards:
                hooks[_GUARD] = guard

    def use_unsharded(self) -> None:
        """Put the full parameters into the modules, and remove the guards."""
        if self.uses_unsharded:
            return
        for owner in self.owners:
            if not all(map(operator.is_, map(owner.parameters.get, owner.shards), owner.shards.values())):
                owner.accept_replaced()  # if it raises, the module keeps the user's tensors
        self.uses_unsharded = True
        for owner in self.owners:
            owner.set_parameters(owner.unsharded)
        for hooks, _ in self.guards:
            hooks.pop(_GUARD, None)

    def use_sharded(self) -> None:
        """Put the shards back into the modules, and install the guards."""
        if not self.uses_unsharded:
            return
        self.uses_unsharded = False
        for owner in self.owners:
            owner.set_parameters(owner.shards)
            owner.replaced = frozenset()
        for hooks, guard in self.guards:
            hooks[_GUARD] = guard


class CallCounts:
    """Forward calls of a unit: those under way, and those whose backward has not run.

    Attributes:
        frames: Autograd's sequence number at the start of each call under way.
        labels: Profiler ranges of the calls under way.
        replays: Autograd's sequence number at the start of each recomputation under way, inside a backward.
        has_run: Whether the unit has run in a forward with grad since the last backward.
        was_reached: Whether the present backward has reached a call of the unit on this rank.
        num_outstanding: Forward calls since the last update whose backward has not run. Includes calls whose output is
            never used in a loss.
        num_left_before: ``num_outstanding`` after the last backward. The next backward is assumed to leave as many.
        num_without_grad: Calls without grad in forwards that train; a reentrant recomputation may repeat them.
        num_recomputed: Number of these calls that recomputation has repeated in the present backward.
    """

    def __init__(self) -> None:
        self.frames: list[int] = []
        self.labels: list[Any] = []
        self.replays: list[int] = []
        self.has_run = self.was_reached = False
        self.num_outstanding = self.num_left_before = self.num_without_grad = self.num_recomputed = 0

    @property
    def is_outstanding(self) -> bool:
        """Whether backward will reach another call of the unit, as far as this rank knows."""
        return self.num_outstanding > self.num_left_before or 0 < self.num_recomputed < self.num_without_grad

    def end_backward(self) -> None:
        """Reset the counts of the backward that has ended."""
        self.num_without_grad = self.num_recomputed = 0
        self.has_run = self.was_reached = False


class Unit:
    """State of one unit; ``engine`` and ``group`` act on it.

    Args:
        name: Name in traces and summaries.
        modules: Its modules by path: one, or merged neighbours (``spec.module_chain``), none inside another.
        reshards: Whether the unit is released between forward and backward.
        inner_size: Number of ranks of ``dp_shard`` over which it then stays sharded; ``None``: all.

    Attributes:
        family: Numbers of the enclosing units, of the enclosed units, and of this unit.
        recomputed_in: Name of an enclosing module whose forward is run again in backward.
        ahead: Units to prefetch while this one computes, in forward and in backward.
        is_resident: Whether its parameters are replicated and never released.
        all_use_unsharded: Whether all members hold the full parameters.
        shows_logical_state: Whether the modules hold full tensors, so that ``state_dict()`` is correct.
        shown_mode: State of ``sw.full_parameters`` for the unit; ``None`` outside of it.
        is_unused: Whether no call has run since the unit was gathered, or since its gather was issued.
        version: ``Engine.version`` when its parameters changed last.
        updated_in: Number of the backward in which its parameters were updated.
        regathered_in: Number of the backward in which it was gathered again for a saved tensor (``Engine.regather``).
    """

    def __init__(
        self, name: str, modules: Mapping[str, nn.Module], *, reshards: bool, inner_size: int | None = None
    ) -> None:
        self.name = name
        self.members = [Member(path, module) for path, module in modules.items()]
        self.index = 0
        self.parent: Unit | None = None
        self.family: frozenset[int] = frozenset()
        self.groups: list[Group] = []
        self.reshards_after_forward = reshards
        self.recomputed_in: str | None = None
        self.ahead: tuple[Ahead, Ahead] = (1, 1)
        self.inner_size = inner_size if reshards else None
        self.is_resident = False
        self.state = State.SHARDED
        self.all_use_unsharded = False
        self.handles: list[Handle] = []
        self.calls = CallCounts()
        self.shows_logical_state = False
        self.shown_mode: Any = None
        self.is_unused = False
        self.version = 0
        self.updated_in = self.regathered_in = -1

    @property
    def depth(self) -> int:
        """Number of units that enclose this one."""
        return 0 if self.parent is None else 1 + self.parent.depth

    @property
    def type_name(self) -> str:
        """Class names of the modules: ``Block``, or ``6 x Block`` for a unit of six."""
        counts = Counter(type(member.module()).__name__ for member in self.members)
        return ", ".join(name if counts.total() == 1 else f"{count} x {name}" for name, count in counts.items())

    @property
    def path(self) -> str:
        """The path of its first module."""
        return self.members[0].path

    @property
    def owners(self) -> Iterator[Owner]:
        """The modules that hold parameters of the unit."""
        return (owner for member in self.members for owner in member.owners)

    def shards_below(self, path: str) -> set[int]:
        """Identities (``id``) of this unit's shards in the module at ``path``, its submodules included."""
        inside = (owner for owner in self.owners if not path or f"{owner.path}.".startswith(f"{path}."))
        return {id(shard) for owner in inside for shard in owner.shards.values()}

    @property
    def uses_unsharded(self) -> bool:
        """Whether some member holds the full parameters."""
        return any(member.uses_unsharded for member in self.members)

    def move_to(self, state: State) -> None:
        """Change the state; any move that is not in ``LEGAL_MOVES`` raises."""
        if (self.state, state) not in LEGAL_MOVES:
            raise StateError(f"unit {self.name!r} cannot go from {self.state} to {state}: this is a bug in shardwise.")
        self.state = state

    def use(self) -> None:
        """Put the full parameters into the modules, and count the unit as used."""
        self.is_unused = False
        self.use_unsharded()

    def use_unsharded(self) -> None:
        """Put the full parameters into the modules of all members."""
        if self.all_use_unsharded:
            return
        self.all_use_unsharded = True
        for member in self.members:
            member.use_unsharded()

    def use_sharded(self) -> None:
        """Put the shards back into the modules of all members."""
        self.all_use_unsharded = False
        for member in self.members:
            member.use_sharded()

    def clear_frames(self) -> None:
        """Forget all forward calls under way."""
        self.calls.frames.clear()
        self.calls.labels.clear()
        for member in self.members:
            member.num_frames = 0

    def dissolve(self) -> None:
        """Break reference cycles of the groups, so that they are freed without a garbage collection."""
        for group in self.groups:
            del group.gradient
        self.groups.clear()
