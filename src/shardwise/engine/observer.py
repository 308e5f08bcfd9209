"""What attaches to an engine from outside, and the moments at which it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group
    from shardwise.engine.order import Entry
    from shardwise.engine.unit import Unit


class Observer:
    """Told of the moments of a step by :attr:`Engine.observers`, in their order. Each does nothing by itself.

    An observer may raise, communicate (on all ranks alike) and change ``.grad``; it must not gather or release.

    Attributes:
        sees_every_gather: Nothing may be gathered once for several forwards: every gather matters to it.
        updates_in_backward: It lets optimizers step when a group's gradients are reduced.
        is_stepping: One of these steps right now.
    """

    sees_every_gather = False
    updates_in_backward = False
    is_stepping = False

    def forward_begins(self, engine: Engine, entry: Entry) -> None:
        """An outermost forward is about to begin, through ``entry``. ``engine.trains`` is known."""

    def before_gather(self, engine: Engine, unit: Unit, group: Group, *, is_inner: bool) -> None:
        """The all-gather of a group is about to be issued; ``is_inner``: of what was kept over a few neighbours."""

    def backward_begins(self, engine: Engine) -> None:
        """Backward has reached its first unit."""

    def before_reduce(self, engine: Engine, unit: Unit) -> None:
        """The gradients of a unit are collected; their reductions are about to be issued."""

    def reduced(self, engine: Engine, unit: Unit, group: Group) -> None:
        """The gradients of a group are on its shards."""

    def backward_ended(self, engine: Engine) -> None:
        """Every unit's gradients are on their shards."""

    def before_call(self, engine: Engine, call: str) -> None:
        """The user has called the function ``call`` (``"sw.save"``, ...) between steps: may refuse it."""

    def before_norm(self, engine: Engine, max_norm: float, *, is_of_part: bool) -> None:
        """The norm of all gradients, or of those of a part of the model, is about to be computed."""

    def before_step(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, outside of backward."""

    def before_mean(self, engine: Engine) -> None:
        """A mean over ``engine.num_terms`` ranks is about to be taken: of losses."""
