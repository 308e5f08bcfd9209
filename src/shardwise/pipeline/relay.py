"""Forwards of single stages, without gradients, in an order that the caller keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from shardwise.comm.base import Comm, Handle
from shardwise.pipeline.interpret import Crossing, Interpreter
from shardwise.pipeline.trace import Flow, Source

#: Activations that may be on their way to the next stage while this rank computes.
_SENDS_AHEAD = 2


class Relay:
    """Takes what the stage before has made, and hands on what a stage makes.

    Args:
        interpreter: Of the model.
        comm: On ``pp``.
        ranks: Of each stage.
    """

    def __init__(self, interpreter: Interpreter, comm: Comm, ranks: Sequence[int]) -> None:
        self._its = interpreter
        self._comm = comm
        self._ranks = tuple(ranks)
        self._kept: dict[tuple[int, Hashable], Sequence[Tensor]] = {}  # for a stage of this rank
        self._sends: deque[list[tuple[Handle, Tensor]]] = deque()

    def run(self, stage: int, part: Hashable, flow: Flow, forward: Callable[[], Any]) -> Any:
        """One forward of a stage.

        Args:
            stage: Which of this rank's.
            part: Of the batch; what one stage makes of it the next one takes.
            flow: What goes from stage to stage.
            forward: Calls the model.

        Returns:
            Of the last stage what ``forward`` returns.

        Collective:
            A message from the rank of the stage before, and one to that of the next stage, for each tensor that
            crosses. The first ones of a flow are preceded by shapes and dtypes.
        """
        received = self._received(stage, part, flow)
        made = self._its.stages.run(stage, flow, received, forward)
        if stage < self._its.stages.num_stages - 1:
            self._hand_on(stage, part, flow, made)
            return None
        return made

    def finish(self) -> None:
        """Wait until everything has been received."""
        while self._sends:
            self._wait_for_oldest()

    def _received(self, stage: int, part: Hashable, flow: Flow) -> dict[Source, Tensor]:
        if stage == 0:
            return {}
        boundary, source = stage - 1, self._ranks[stage - 1]
        crossing = flow.crossing[boundary]
        if source == self._comm.rank:
            return dict(zip(crossing, self._kept.pop((boundary, part)), strict=True))
        shapes = flow.learned.get(boundary)
        if shapes is None:
            shapes = self._its.receive_header(boundary, len(crossing), source)
            flow.learned[boundary] = shapes
        posted = [self._its.receive(shape, source, f"activation of stage {boundary}") for shape in shapes]
        for handle, _ in posted:
            handle.wait()
        return dict(zip(crossing, (buffer for _, buffer in posted), strict=True))

    def _hand_on(self, stage: int, part: Hashable, flow: Flow, made: Sequence[Tensor]) -> None:
        target = self._ranks[stage + 1]
        if target == self._comm.rank:
            self._kept[stage, part] = made
            return
        sends = []
        if stage not in flow.learned:
            shapes = tuple(Crossing(tuple(tensor.shape), tensor.dtype, requires_grad=False) for tensor in made)
            flow.learned[stage] = shapes
            sends.append(self._its.send_header(stage, shapes, target))
        sends += [self._its.send(tensor, target, f"activation of stage {stage}") for tensor in made]
        self._sends.append(sends)
        if len(self._sends) > _SENDS_AHEAD:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for handle, _ in self._sends.popleft():
            handle.wait()
