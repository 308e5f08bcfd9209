"""What the ranks of a pipeline tell each other before a step, while the first of them begin to compute."""

from __future__ import annotations

import hashlib

import torch

from shardwise.comm.base import Comm, Handle
from shardwise.comm.control import all_gather_json
from shardwise.spec.errors import RankDisagreement


class Agreement:
    """The ranks are about to do the same step.

    Args:
        comm: Along ``pp``.
        step: What must be the same on all of them: any text.
        shown: The same for people, put into a message.
        trained: Which of this rank's parameters are trained.

    Collective:
        An all-gather of 16 bytes per rank; :meth:`wait` waits for it.
    """

    def __init__(self, comm: Comm, step: str, shown: str, trained: bytes) -> None:
        self._comm, self._shown = comm, shown
        told = torch.zeros(comm.size, 2, dtype=torch.int64)
        told[comm.rank] = torch.tensor([_digest(step.encode()), _digest(trained)])
        told = told.to(comm.device)
        self._under_way: tuple[torch.Tensor, Handle] | None = told, comm.all_gather(told.view(-1), unit="step")
        self._all_trained = 0

    def wait(self) -> int:
        """Wait for what the others have told.

        Returns:
            A number for which parameters are trained on all of them.

        Collective:
            Two all-gathers of JSON where the ranks disagree.

        Raises:
            RankDisagreement: They are about to do different steps; on all of them.
        """
        if self._under_way is not None:
            told, handle = self._under_way
            self._under_way = None  # it has no memory for the rest of the step
            handle.wait()
            rows = told.tolist()
            self._check([step for step, _ in rows])
            self._all_trained = _digest(repr([trained for _, trained in rows]).encode())
        return self._all_trained

    def _check(self, steps: list[int]) -> None:
        if len(set(steps)) == 1:
            return
        odd = next(rank for rank, step in enumerate(steps) if step != steps[0])
        shown = all_gather_json(self._comm, self._shown)
        raise RankDisagreement(
            f"the ranks of a pipeline disagree about the step: rank 0 along pp has {shown[0]}, rank {odd} {shown[odd]}."
            "\n  Call the same on every rank of a pipeline, with the same batch and number of microbatches: let data"
            " loaders go by the data-parallel coordinate, not by the rank."
        )


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
