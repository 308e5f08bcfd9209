"""What takes the chunks of a batch through the model on this rank: the whole model, or some stages of a pipeline."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm, Handle, Message
from shardwise.generation.chunks import Chunk
from shardwise.generation.decoder import MakeDecoder
from shardwise.pipeline.interpret import BoundaryTensor, Interpreter, read_header
from shardwise.pipeline.trace import Source, StageFlow

#: Exchanges whose sends may be under way while this rank computes.
_EXCHANGES_AHEAD = 2


class Runner(ABC):
    """Computes chunks on this rank.

    Attributes:
        stages: The model's stages on this rank.
        num_stages: Stages of all ranks.
    """

    stages: tuple[int, ...] = (0,)
    num_stages = 1

    @abstractmethod
    def compute(self, chunk: Chunk, stage: int) -> None:
        """Take the chunk's new tokens through a stage of this rank."""

    def exchange(self, turns: Sequence[tuple[Chunk, int]]) -> None:  # noqa: B027 - not every runner communicates
        """Before the next turns (chunks, stages): send what was made since the last ones, receive what these take."""

    @abstractmethod
    def take(self, chunk: Chunk) -> list[int]:
        """The tokens that were chosen for the chunk, by row; they go in next."""

    def finish(self) -> None:  # noqa: B027 - not every runner sends
        """Wait until everything that was sent has been received."""


class WholeModel(Runner):
    """A model that is whole on this rank, or whose other parts compute the same step (``tp``)."""

    def __init__(self, model: nn.Module, chunks: Sequence[Chunk]) -> None:
        self._model = model
        self._decoders = [chunk.decoder() for chunk in chunks]

    def compute(self, chunk: Chunk, stage: int) -> None:
        """See :meth:`Runner.compute`."""
        del stage
        decoder = self._decoders[chunk.index]
        with torch.no_grad(), _uncompiled():
            output = decoder.call(self._model, chunk.new_BT)
            chunk.new_BT = chunk.choose(decoder.logits(output))[:, None]

    def take(self, chunk: Chunk) -> list[int]:
        """See :meth:`Runner.take`."""
        return chunk.new_BT[:, 0].tolist()


class _Boundary(NamedTuple):
    """The tensors that cross from ``stage`` to the next one for a chunk, as ``flow`` lists them."""

    stage: int
    chunk: int
    flow: StageFlow


class Stages(Runner):
    """Some stages of a model.

    Collective:
        An all-gather along ``pp`` for each shape that is new.
    """

    def __init__(
        self, model: nn.Module, chunks: Sequence[Chunk], interpreter: Interpreter, comm: Comm, ranks: Sequence[int]
    ) -> None:
        self._model, self._interpreter, self._comm = model, interpreter, comm
        self._ranks = tuple(ranks)
        self.num_stages = len(ranks)
        self.stages = tuple(stage for stage, rank in enumerate(ranks) if rank == comm.rank)
        layers = {stage: _layers(interpreter, stage) for stage in self.stages}
        places = [(chunk, stage) for chunk in chunks for stage in self.stages]
        self._decoders = {(chunk.index, stage): chunk.decoder(layers[stage]) for chunk, stage in places}
        self._flows: dict[tuple[int, bool], StageFlow] = {}
        for chunk in chunks:
            for is_first in (True, False):
                ids = chunk.new_BT if is_first else chunk.new_BT[:, :1]
                call = partial(_trace, chunk.settings.make_decoder)
                batch = {"new tokens": ids, "is padded": any(chunk.padding)}
                _, self._flows[chunk.index, is_first] = interpreter.stages.flow(batch, call)
        self._has_begun: set[tuple[int, int]] = set()
        self._tokens: dict[int, Tensor] = {}
        self._chosen: list[Tensor] = []  # since the last exchange, as _made
        self._made: list[tuple[_Boundary, Sequence[Tensor]]] = []  # for a stage of another rank
        self._kept: dict[tuple[int, int], Sequence[Tensor]] = {}  # for a stage of this rank, by stage and chunk
        self._under_way: deque[Handle] = deque()

    def exchange(self, turns: Sequence[tuple[Chunk, int]]) -> None:
        """See :meth:`Runner.exchange`.

        Collective:
            An exchange with the ranks of the stages before and behind, of a message for each tensor that crosses; the
            first ones of a flow are preceded by an exchange of shapes and dtypes. The rank of the last stage also sends
            eight bytes per row to every other rank.
        """
        last_rank, own = self._ranks[-1], self._comm.rank
        others = [rank for rank in range(self._comm.size) if rank != last_rank]
        sends: list[Message] = [(tokens_B, rank, "tokens") for tokens_B in self._chosen for rank in others]
        self._chosen = []
        receives: list[Message] = []
        expected = []
        for chunk, stage in turns:
            if stage == self.num_stages and own != last_rank:
                buffer = torch.empty(chunk.new_BT.shape[0], dtype=torch.int64, device=chunk.new_BT.device)
                self._tokens[chunk.index] = buffer
                receives.append((buffer, last_rank, "tokens"))
            elif 0 < stage < self.num_stages and self._ranks[stage - 1] != own:
                expected.append(_Boundary(stage - 1, chunk.index, self._flow(chunk, stage)))
        self._exchange_headers(expected)
        made, self._made = self._made, []
        for (stage, _, _), tensors in made:
            to, unit = self._ranks[stage + 1], f"activation of stage {stage}"
            sends += [(tensor.detach().contiguous().view(-1), to, unit) for tensor in tensors]
        for stage, index, flow in expected:
            device = self._interpreter.stages.device
            buffers = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in flow.learned[stage]]
            self._kept[stage, index] = buffers
            receives += [(each.view(-1), self._ranks[stage], f"activation of stage {stage}") for each in buffers]
        if not sends and not receives:
            return
        handle = self._comm.exchange(sends, receives)
        handle.arrived()
        self._under_way.append(handle)
        while len(self._under_way) > _EXCHANGES_AHEAD:
            self._under_way.popleft().wait()

    def compute(self, chunk: Chunk, stage: int) -> None:
        """See :meth:`Runner.compute`."""
        flow = self._flow(chunk, stage)
        self._has_begun.add((chunk.index, stage))
        decoder = self._decoders[chunk.index, stage]
        received: dict[Source, Tensor] = {}
        if stage:
            received = dict(zip(flow.crossing[stage - 1], self._kept.pop((stage - 1, chunk.index)), strict=True))
        with torch.no_grad(), _uncompiled():
            forward = partial(decoder.call, self._model, chunk.new_BT)
            made = self._interpreter.stages.run(stage, flow, received, forward)
            if stage == self.num_stages - 1:
                self._tokens[chunk.index] = chunk.choose(decoder.logits(made))
                self._chosen.append(self._tokens[chunk.index])
            elif self._ranks[stage + 1] == self._comm.rank:
                self._kept[stage, chunk.index] = made
            else:
                self._made.append((_Boundary(stage, chunk.index, flow), made))

    def take(self, chunk: Chunk) -> list[int]:
        """See :meth:`Runner.take`."""
        tokens_B = self._tokens.pop(chunk.index)
        chunk.new_BT = tokens_B[:, None]
        return tokens_B.tolist()

    def finish(self) -> None:
        """See :meth:`Runner.finish`."""
        assert not self._made
        while self._under_way:
            self._under_way.popleft().wait()

    def _flow(self, chunk: Chunk, stage: int) -> StageFlow:
        """What goes from stage to stage in the chunk's next forward of a stage."""
        return self._flows[chunk.index, (chunk.index, stage) not in self._has_begun]

    def _exchange_headers(self, expected: Sequence[_Boundary]) -> None:
        """Exchange shapes and dtypes of what crosses for the first time."""
        sends: list[Message] = []
        receives: list[Message] = []
        headers = []
        for (stage, _, flow), tensors in self._made:
            if stage not in flow.learned:
                flow.learned[stage] = tuple(
                    BoundaryTensor(tuple(t.shape), t.dtype, requires_grad=False) for t in tensors
                )
                header = self._interpreter.header(stage, flow.learned[stage])
                sends.append((header.view(-1), self._ranks[stage + 1], f"shapes of stage {stage}"))
        for stage, _, flow in expected:
            if stage not in flow.learned:
                header = self._interpreter.empty_header(len(flow.crossing[stage]))
                headers.append((stage, flow, header))
                receives.append((header.view(-1), self._ranks[stage], f"shapes of stage {stage}"))
        if sends or receives:
            self._comm.exchange(sends, receives).wait()
        for stage, flow, header in headers:
            flow.learned[stage] = read_header(header)


def _trace(make_decoder: MakeDecoder, model: nn.Module, batch: Any) -> Any:
    """The model on new tokens, as if they were the first ones, without padding: the same path."""
    new_BT = batch["new tokens"]
    return make_decoder(new_BT.shape[1], (), None).call(model, new_BT)


def _layers(interpreter: Interpreter, stage: int) -> set[int]:
    """Numbers of the layers that a stage holds, where its attention modules know theirs."""
    elements = [element for element in interpreter.stages.elements if stage in element.stages]
    modules = [module for element in elements for module in element.module.modules()]
    numbers: list[Any] = [getattr(module, "layer_idx", None) for module in modules]
    return {number for number in numbers if isinstance(number, int)}


def _uncompiled() -> AbstractContextManager[object]:
    """Run compiled units as they were written: shapes change with every token, and each would be compiled anew."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
