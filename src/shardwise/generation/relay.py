"""Forwards of single stages, without gradients, in an order that the caller keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.base import Comm, Handle, Message
from shardwise.pipeline.interpret import BoundaryTensor, Interpreter, read_header
from shardwise.pipeline.trace import Source, StageFlow

#: Exchanges whose sends may be under way while this rank computes.
_AHEAD = 2


class Crossed(NamedTuple):
    """What crosses from ``stage`` to the next for one part of the batch."""

    stage: int
    part: Hashable
    flow: StageFlow


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
        self._made: list[tuple[Crossed, Sequence[Tensor]]] = []  # for one of another rank, since the last exchange
        self._under_way: deque[Handle] = deque()

    def run(self, stage: int, part: Hashable, flow: StageFlow, forward: Callable[[], Any]) -> Any:
        """One forward of a stage.

        Args:
            stage: Which of this rank's.
            part: Of the batch; what one stage makes of it the next one takes.
            flow: What goes from stage to stage.
            forward: Calls the model.

        Returns:
            Of the last stage what ``forward`` returns.
        """
        received: dict[Source, Tensor] = {}
        if stage:
            received = dict(zip(flow.crossing[stage - 1], self._kept.pop((stage - 1, part)), strict=True))
        made = self._its.stages.run(stage, flow, received, forward)
        if stage == self._its.stages.num_stages - 1:
            return made
        if self._ranks[stage + 1] == self._comm.rank:
            self._kept[stage, part] = made
        else:
            self._made.append((Crossed(stage, part, flow), made))
        return None

    def exchange(self, expected: Sequence[Crossed], sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send what was made since the last call, and receive what comes next.

        Args:
            expected: What was made for this rank on others since then.
            sends: Further messages, which go first.
            receives: Likewise.

        Collective:
            An exchange with the ranks of the stages before and behind: a message for each tensor that crosses. The
            first ones of a flow are preceded by an exchange of shapes and dtypes.
        """
        expected = [each for each in expected if self._ranks[each.stage] != self._comm.rank]
        self._tell(expected)
        made, self._made = self._made, []
        sends, receives = list(sends), list(receives)
        for (stage, _, _), tensors in made:
            to, unit = self._ranks[stage + 1], f"activation of stage {stage}"
            sends += [(tensor.detach().contiguous().view(-1), to, unit) for tensor in tensors]
        for stage, part, flow in expected:
            shapes = flow.learned[stage]
            buffers = [torch.empty(s.shape, dtype=s.dtype, device=self._its.stages.device) for s in shapes]
            self._kept[stage, part] = buffers
            unit = f"activation of stage {stage}"
            receives += [(buffer.view(-1), self._ranks[stage], unit) for buffer in buffers]
        if not sends and not receives:
            return
        handle = self._comm.exchange(sends, receives)
        handle.arrived()
        self._under_way.append(handle)
        while len(self._under_way) > _AHEAD:
            self._under_way.popleft().wait()

    def finish(self) -> None:
        """Wait until everything has been received."""
        assert not self._made
        while self._under_way:
            self._under_way.popleft().wait()

    def _tell(self, expected: Sequence[Crossed]) -> None:
        """Shapes and dtypes of what crosses for the first time."""
        sends, receives, headers = [], [], []
        for (stage, _, flow), tensors in self._made:
            if stage not in flow.learned:
                flow.learned[stage] = tuple(
                    BoundaryTensor(tuple(t.shape), t.dtype, requires_grad=False) for t in tensors
                )
                header = self._its.header(stage, flow.learned[stage])
                sends.append((header.view(-1), self._ranks[stage + 1], f"shapes of stage {stage}"))
        for stage, _, flow in expected:
            if stage not in flow.learned:
                header = self._its.empty_header(len(flow.crossing[stage]))
                headers.append((stage, flow, header))
                receives.append((header.view(-1), self._ranks[stage], f"shapes of stage {stage}"))
        if sends or receives:
            self._comm.exchange(sends, receives).wait()
        for stage, flow, header in headers:
            flow.learned[stage] = read_header(header)
