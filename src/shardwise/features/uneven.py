"""Ranks with different numbers of batches: those that have run out follow those that have not.

Inside ``join`` every outermost forward begins with a word to all ranks (three integers each). A rank that has left its
loop says so with the same words, and listens. While any rank listens, the others say what they are about to issue, each
gather, each reduction, each step of the optimizer, and the listeners do the same: with their shards, and with gradients
that are -0.0, the exact identity of addition. When nobody has anything left to say, all leave together.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.comm.control import agree_row, all_gather_json, check_same, digest_text
from shardwise.engine import engine as heart
from shardwise.engine.hooks import Observer
from shardwise.features.module_buffers import BufferSync
from shardwise.forms.waiting import WaitingSums
from shardwise.spec.errors import CommError, RankDisagreement, StateError

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group
    from shardwise.engine.unit import Unit
    from shardwise.spec.order import Entry

#: What communicates in ways that a rank without a batch does not follow.
_NOT_FOLLOWED = ("sw.save", "sw.load", "sw.full_state_dict", "sw.load_full_state_dict", "sw.full_parameters()")

_ADVICE = "Give every rank as many batches (drop_last=True), or use sw.join(model, optimizer)."


class Word(IntEnum):
    """What a rank says. Two integers go with it."""

    LEFT = 0  #: it has no batch left
    FAILED = 1  #: an exception took it out of the loop
    FORWARD = 2  #: 1 if it trains, 2 if it may change buffers, 3 for both; a hash of the module that was called
    GATHER = 3  #: number of the unit; place of the group in it, twice, plus one if the inner group is gathered
    BACKWARD = 4  #: which gradients there are to add to, as ``_Held``; ranks may differ
    REDUCE = 5  #: number of the unit; whether this is the last microbatch
    END = 6  #: of a backward; whether more microbatches follow
    CLIP = 7  #: bits of the norm
    LOSS = 8  #: a mean over the ranks
    STEP = 9  #: place of the optimizer
    REFUSED = 10  #: place in ``_NOT_FOLLOWED``


class _Held(IntEnum):
    """What ``.grad`` of a rank's shards is. Nothing tells when ``zero_grad()`` is called."""

    NONE = 0
    SOME = 1
    UNKNOWN = 2  #: the rank owns no element that is trained


class Join(Observer):
    """One context of ``sw.join`` on this rank.

    Collective:
        Compares the optimizers' settings. All ranks must call.

    Attributes:
        active: Ranks that had a batch at the last outermost forward.
    """

    sees_every_gather = True

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        clip: Callable[[float], object],
        *,
        divides_by_all: bool,
        throws: bool,
    ) -> None:
        self._engine = engine
        self._optimizers = optimizers
        self._clip = clip
        self._divides_by_all = divides_by_all
        self._throws = throws
        self._comm = engine.comms.control
        self.active = list(range(self._comm.size))
        self._is_listening = False
        self._is_over = False
        self._has_stepped = False
        settings = [[_settings(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        if settings:
            check_same(
                self._comm,
                digest_text(json.dumps(settings, sort_keys=True)),
                "sw.join(): the ranks' optimizers have different settings",
                "Step schedulers equally often on every rank, for example by a count of steps that all ranks share.",
                show=lambda: settings,
                error=StateError,
            )

    @property
    def _updates_in_backward(self) -> bool:
        return any(observer.updates_in_backward for observer in self._engine.observers.all)

    # -- a rank that has a batch

    @property
    def is_short(self) -> bool:
        """Some rank has no batch left."""
        return self._engine.gradients.finishes_at_once

    def forward_begins(self, engine: Engine, entry: Entry) -> None:
        """An outermost forward is about to begin.

        Collective:
            One all-gather of three integers per rank. All ranks of the context must call.
        """
        buffers = engine.observers.find(BufferSync)
        may_change = engine.forward.trains if buffers is None else buffers.may_change(engine)
        what = engine.forward.trains + 2 * may_change
        self._count(self._say(Word.FORWARD, what, zlib.crc32(repr(entry).encode()), is_always=True))

    def before_gather(self, engine: Engine, unit: Unit, group: Group, *, is_kept: bool) -> None:  # noqa: ARG002
        """A group's all-gather is about to be issued."""
        if group.row.shards_optimizer and not group.form.is_shown:
            self._say(Word.GATHER, unit.index, 2 * unit.groups.index(group) + is_kept)

    def backward_begins(self, engine: Engine) -> None:  # noqa: ARG002
        """Backward has reached its first unit. What ``.grad`` really is decides what is said."""
        self._hide_sums()
        if self._say(Word.BACKWARD, self._held) and self._updates_in_backward:
            self._share_settings()

    def before_reduce(self, engine: Engine, unit: Unit) -> None:
        """The reductions of a unit are about to be issued."""
        self._say(Word.REDUCE, unit.index, int(engine.syncs_gradients))

    def backward_ended(self, engine: Engine) -> None:
        """Backward has entered its last unit, and reduced it."""
        self._say(Word.END, int(not engine.syncs_gradients))

    def before_call(self, engine: Engine, call: str) -> None:  # noqa: ARG002
        """Refuse what ranks without a batch cannot follow."""
        if call == "sw.GradScaler":
            raise StateError(
                "sw.GradScaler inside sw.join(): a rank without a batch would not learn the scale.\n"
                "  Compute in bf16, which needs no scaler, or give every rank as many batches."
            )
        if self.is_short and call in _NOT_FOLLOWED:
            self._say(Word.REFUSED, _NOT_FOLLOWED.index(call))
            self._refuse(call)

    def before_norm(self, engine: Engine, max_norm: float, *, is_of_part: bool) -> None:  # noqa: ARG002
        """The norm of the gradients is about to be computed."""
        if is_of_part:
            raise StateError(
                "sw.clip_grad_norm() of less or more than the model, or by another norm, inside sw.join(): ranks"
                " without a batch clip the whole model by its 2-norm.\n  Pass the model, without norm_type."
            )
        self._say(Word.CLIP, _bits(max_norm))

    def before_mean(self, engine: Engine) -> None:  # noqa: ARG002
        """A mean over the ranks is about to be computed."""
        self._say(Word.LOSS)

    def before_step(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        """An optimizer is about to step."""
        place = next((i for i, known in enumerate(self._optimizers) if known is optimizer), None)
        if place is None:
            raise StateError(
                f"{type(optimizer).__name__}.step() inside sw.join(), which does not know it: a rank without a batch"
                " could not step.\n  Call sw.join(model, optimizer)."
            )
        if self._say(Word.STEP, place):
            self._share_settings()

    def fail(self) -> None:
        """An exception leaves the context on this rank."""
        if self.is_short and not self._is_over and not self._is_listening:
            with contextlib.suppress(CommError):
                self._say(Word.FAILED)

    # -- a rank that has none

    def follow(self) -> None:
        """Do what the others do, until they have no batch left either.

        Collective:
            What the others issue.
        """
        self._is_listening = True
        self._engine.leave_frames()
        while spoken := self._spoken(self._exchange(Word.LEFT)):
            word, first, second = next(iter(spoken.values()))
            self._do(Word(word), first, second, spoken)
        if self.is_short:
            self._take_over()

    def _do(self, word: Word, first: int, second: int, spoken: dict[int, list[int]]) -> None:
        if word is Word.FORWARD:
            self._count(spoken)
        follow: dict[Word, Callable[[], object]] = {
            Word.FORWARD: lambda: self._follow_forward(trains=bool(first & 1), may_change_buffers=bool(first & 2)),
            Word.GATHER: lambda: self._follow_gather(first, second // 2, is_kept=bool(second % 2)),
            Word.BACKWARD: lambda: self._follow_backward([row[1] for row in spoken.values()]),
            Word.REDUCE: lambda: self._follow_reduction(first, is_last=bool(second)),
            Word.END: lambda: self._follow_end(has_more=bool(first)),
            Word.CLIP: lambda: self._clip(_number(first)),
            Word.LOSS: self._follow_loss,
            Word.STEP: lambda: self._follow_step(self._optimizers[first]),
            Word.REFUSED: lambda: self._refuse(_NOT_FOLLOWED[first]),
        }
        follow[word]()

    def _follow_forward(self, *, trains: bool, may_change_buffers: bool) -> None:
        """An outermost forward begins on the others."""
        self._engine.forward.trains = trains
        buffers = self._engine.observers.find(BufferSync)
        if buffers is not None and not self._engine.parameters_are_unchanged:
            buffers.begin(may_change=may_change_buffers)
        self._engine.refresh()

    def _follow_gather(self, index: int, place: int, *, is_kept: bool) -> None:
        """The others gather a group of a unit: take part."""
        engine = self._engine
        group = engine.units[index].groups[place]
        if group.slot is not None and group.slot.owner is not group:
            engine.claim(group)
        engine.gather(group, is_kept=is_kept).wait()
        if engine.forward.trains and not is_kept:
            group.form.keep(group)
        group.release(poison=heart.poisons_slots)

    def _follow_reduction(self, index: int, *, is_last: bool) -> None:
        """The others reduce a unit: add nothing, or what earlier microbatches have left here."""
        engine = self._engine
        before, engine.syncs_gradients = engine.syncs_gradients, is_last
        engine.finalise(engine.units[index])
        engine.syncs_gradients = before

    def _follow_end(self, *, has_more: bool) -> None:
        """The others end their backward."""
        self._engine.drain()
        self._engine.parameters_are_unchanged = has_more

    def _follow_backward(self, held: Sequence[int]) -> None:
        if self._updates_in_backward:
            self._share_settings()
        self._follow_zero_grad(held)

    def _follow_zero_grad(self, held: Sequence[int]) -> None:
        """Let gradients go if the others have."""
        if _Held.SOME in held or (_Held.NONE not in held and not self._has_stepped):
            return
        self._has_stepped = False
        self._hide_sums()  # sums wait, whatever the others hold
        for group in self._engine.groups:
            for shard in group.shards:
                shard.grad = None

    def _hide_sums(self) -> None:
        sums = self._engine.observers.find(WaitingSums)
        if sums is not None:
            sums.hide(self._engine)

    @property
    def _held(self) -> _Held:
        trained = [shard for group in self._engine.groups for shard in group.shards if shard.requires_grad]
        if any(shard.grad is not None for shard in trained):
            return _Held.SOME
        return _Held.NONE if any(shard.shape.numel() for shard in trained) else _Held.UNKNOWN

    def _follow_loss(self) -> None:
        nothing = torch.zeros(1, dtype=torch.float64, device=self._comm.device)
        self._comm.all_reduce(nothing, unit="loss", divisor=len(self.active)).wait()

    def _follow_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._share_settings()
        optimizer.step()
        self._has_stepped = True

    # -- both

    def restore(self) -> None:
        """Undo what held inside the context."""
        engine = self._engine
        engine.gradients.finishes_at_once = False
        for group in engine.groups:
            group.gradient.divide_by(group.facts.num_ranks)
        buffers = engine.observers.find(BufferSync)
        if buffers is not None:
            buffers.set_sources(range(self._comm.size))

    def _say(self, word: Word, first: int = 0, second: int = 0, *, is_always: bool = False) -> dict[int, list[int]]:
        """Tell what is about to be issued, where anybody listens; returns what all that have a batch have said."""
        if self._is_listening or not (self.is_short or is_always):
            return {}
        return self._spoken(self._exchange(word, first, second))

    def _exchange(self, word: Word, first: int = 0, second: int = 0) -> list[list[int]]:
        return agree_row(self._comm, [word, first, second], unit="join")

    def _spoken(self, rows: list[list[int]]) -> dict[int, list[int]]:
        """What the ranks that have a batch have said, by rank; it must be the same."""
        spoken = {rank: row for rank, row in enumerate(rows) if row[0] != Word.LEFT}
        failed = [rank for rank, row in spoken.items() if row[0] == Word.FAILED]
        self._is_over = bool(failed) or len({_meaning(row) for row in spoken.values()}) > 1
        if self._comm.rank in failed:
            return spoken
        if failed:
            raise CommError(
                f"rank {failed[0]} has left sw.join() by an exception.\n"
                "  Look for the first error among the ranks' logs."
            )
        if self._is_over:
            shown = "\n".join(f"  rank {rank}: {self._describe(row)}" for rank, row in spoken.items())
            raise RankDisagreement(
                f"ranks inside sw.join() do different things:\n{shown}\n"
                "  Let every rank that has a batch run the same model and call the same functions."
            )
        return spoken

    def _describe(self, row: list[int]) -> str:
        word, first, second = row
        if word in {Word.GATHER, Word.REDUCE}:
            return f"{Word(word).name.lower()} of unit {self._engine.units[first].name!r}"
        return f"{Word(word).name.lower()} ({first}, {second})"

    def _count(self, spoken: dict[int, list[int]]) -> None:
        """An outermost forward begins on the ranks that have spoken."""
        if len(spoken) == self._comm.size:
            return
        left = next(rank for rank in range(self._comm.size) if rank not in spoken)
        if self._throws:
            self._is_over = True
            raise RankDisagreement(
                f"rank {next(iter(spoken))} has another batch, rank {left} has none left.\n  {_ADVICE}"
            )
        if len(spoken) == len(self.active) and self.is_short:
            return
        self._engine.gradients.finishes_at_once = True
        self.active = list(spoken)
        self.num_terms = len(self.active)
        if not self._divides_by_all:
            for group in self._engine.groups:
                group.gradient.divide_by(len(self.active))
        buffers = self._engine.observers.find(BufferSync)
        if buffers is not None:
            buffers.set_sources(self.active)

    def _share_settings(self) -> None:
        """Take over the optimizers' settings of a rank that has a batch: a scheduler may have changed them."""
        mine = [[_settings(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        theirs = all_gather_json(self._comm, mine)[self.active[0]]
        if self._is_listening:
            for optimizer, groups in zip(self._optimizers, theirs, strict=True):
                for group, settings in zip(optimizer.param_groups, groups, strict=True):
                    _put_settings(group, settings)

    def _take_over(self) -> None:
        """All have left: what only the last ones know becomes everybody's.

        Collective:
            The recorded orders, as JSON; the buffers.
        """
        engine, last = self._engine, self.active[0]
        known = all_gather_json(self._comm, [[orders.known() for orders in engine.orders.all], self._held])
        for orders, recorded in zip(engine.orders.all, known[last][0], strict=True):
            orders.take(recorded)
        self._follow_zero_grad([known[rank][1] for rank in self.active])
        engine.sync_buffers()

    def _refuse(self, call: str) -> None:
        self._is_over = True
        left = next(rank for rank in range(self._comm.size) if rank not in self.active)
        raise StateError(
            f"{call} inside sw.join() after rank {left} has run out of batches: it could not take part.\n"
            "  Call it outside of sw.join()."
        )


def _meaning(row: list[int]) -> tuple[int, ...]:
    """What ranks that have a batch must all say."""
    return (row[0],) if row[0] == Word.BACKWARD else tuple(row)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as JSON holds them."""
    held = {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in held.items()
        if isinstance(value, (bool, int, float, str, tuple, type(None)))
    }


def _put_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        own = group.get(key)
        if isinstance(own, Tensor):
            own.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
