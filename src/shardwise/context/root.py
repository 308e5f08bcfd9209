"""What stands for the root's forward, inside of its hooks: it is given the whole batch, and divides it.

For the engine nothing is new: a model is called, computes a loss, and its parameters get gradients. That these are
those of some positions is known here and in ``ring`` only.
"""

from __future__ import annotations

import inspect
import weakref
import zlib
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.comm.control import agree
from shardwise.comm.record import RecordComm
from shardwise.context.split import Division
from shardwise.spec.errors import RankDisagreement


class Root(ABC):
    """Stands for a model's forward.

    Args:
        model: Held weakly.
        comm: On ``cp``.
        multiple: What every rank's number of positions has to be a multiple of, besides being even.
    """

    def __init__(self, model: nn.Module, comm: Comm, multiple: int) -> None:
        self._model = weakref.ref(model)
        self._own = model.__dict__.get("forward")  # somebody else's replacement of the class's method
        self._comm = comm
        self._multiple = multiple
        self.is_alone = isinstance(comm, RecordComm)  # nobody is there to talk to, and nothing is really computed
        self._has_compared = self.is_alone
        self.__signature__ = inspect.signature(model.forward)

    @property
    def model(self) -> Any:
        """The model. Whoever calls its forward has it."""
        return self._model()

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """What this stands for."""
        model = self.model
        return (self._own or type(model).forward.__get__(model))(*args, **kwargs)

    def divide(self, whole_BT: Tensor, targets_BT: Tensor | None = None) -> Division:
        """How it is divided.

        Args:
            whole_BT: The tokens.
            targets_BT: Of each.

        Collective:
            The first time an all-gather of one integer on ``cp``.

        Raises:
            RankDisagreement: Other ranks were given others.
        """
        if not self._has_compared:
            self._has_compared = True
            batch = [t.tolist() for t in (whole_BT, targets_BT) if t is not None]
            digest = zlib.crc32(repr(batch).encode())
            if len(set(agree(self._comm, digest))) > 1:
                raise RankDisagreement(
                    f"cp: the {self._comm.size} ranks that divide each sequence were called with different tokens, or"
                    " targets.\n"
                    "  Give all ranks of a cp group the same batch: only ranks that differ on a data-parallel axis read"
                    " other samples."
                )
        return Division(whole_BT.shape[1], self._comm, multiple=self._multiple, device=whole_BT.device)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on whole sequences.

        Collective:
            Those of :class:`~shardwise.context.ring.Ring`, and of :meth:`Division.mean_loss`, or where there is nothing
            to compute a loss from, :meth:`Division.join`. With a key-value cache none: every rank does the whole.
        """


class GPTRoot(Root):
    """Of our GPT."""

    def __call__(self, tokens: Tensor, targets: Tensor | None = None, *, cache: Any = None) -> Tensor:
        """The mean loss over whole sequences, or all logits."""
        if cache is not None:
            return self.compute(tokens, targets, cache=cache)
        self.model.check(tokens, targets)
        division = self.divide(tokens, targets)
        own_BT, positions_T = division.own(tokens), division.positions_T
        if targets is None:
            return division.join(self.compute(own_BT, positions=positions_T), "logits")
        own_targets_BT = division.own_targets(targets)
        loss = self.compute(own_BT, own_targets_BT, positions=positions_T)
        return division.mean_loss(loss, own_targets_BT, targets)
