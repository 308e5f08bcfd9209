"""What the ranks of a pipeline tell each other before a step, while the first of them begin to compute."""

from __future__ import annotations

import torch

from shardwise.comm.base import Comm, Handle
from shardwise.comm.control import digest_text, refuse_different


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
        told[comm.rank] = torch.tensor([digest_text(step), digest_text(trained)])
        told = told.to(comm.device)
        self._under_way: tuple[torch.Tensor, Handle] | None = told, comm.all_gather(told.view(-1), unit="step")
        self._all_trained = 0

    def wait(self) -> int:
        """Wait for what the others have told.

        Returns:
            A number for which parameters are trained on all of them.

        Collective:
            Two all-gathers of JSON where the ranks disagree.
        """
        if self._under_way is not None:
            told, handle = self._under_way
            self._under_way = None  # it has no memory for the rest of the step
            handle.wait()
            rows = told.tolist()
            refuse_different(
                self._comm,
                [step for step, _ in rows],
                "the ranks of a pipeline disagree about the step",
                "Call the same on every rank of a pipeline, with the same batch and number of microbatches: let data"
                " loaders go by the data-parallel coordinate, not by the rank.",
                show=lambda: self._shown,
            )
            self._all_trained = digest_text(repr([trained for _, trained in rows]))
        return self._all_trained
