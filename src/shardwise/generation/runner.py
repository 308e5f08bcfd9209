"""Runs a batch's chunks through the model on this rank: through the whole model, or through its pipeline stages."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm, Handle, Message
from shardwise.generation.chunks import Chunk
from shardwise.generation.decoder import Forward, MakeForward
from shardwise.parallel.pipeline.runner import BoundaryTensor, empty_header, header, read_header
from shardwise.parallel.pipeline.stage import Stages as PipelineStages
from shardwise.parallel.pipeline.trace import Source, StageFlow

#: Maximum number of exchanges whose sends may be pending while this rank computes.
_EXCHANGES_AHEAD = 2


class Rows(Protocol):
    """Rows that go through the model together: a chunk of a batch, a running batch, or rows that are scored.

    Attributes:
        new_BT: The next input.
    """

    index: int  # their number among the running rows
    keeps_cache: bool  # whether keys and values are kept for further forwards
    new_BT: Tensor  # noqa: N815 - a shape suffix

    @property
    def make_decoder(self) -> MakeForward:
        """The function that makes decoders of the model."""

    @property
    def is_padded(self) -> bool:
        """Whether some rows are padded on the left."""

    def choose(self, logits: Tensor, /) -> Tensor:
        """Choose the next token of each row, (B,), from the decoder's logits; called on the last stage."""


class Runner(ABC):
    """Computes rows on this rank.

    Attributes:
        num_stages: Number of stages on all ranks.
    """

    stages: tuple[int, ...] = (0,)  # the stages on this rank
    num_stages = 1
    #: Indices of the layers of each stage on this rank; ``None``: all layers of the model.
    layers: Mapping[int, Collection[int] | None]

    @abstractmethod
    def begin(self, rows: Rows, decoders: Mapping[int, Forward]) -> None:
        """Use these decoders, one for each stage of this rank, for the rows' next forwards.

        Collective:
            With a pipeline, an all-gather along ``pp`` for each new shape. All ranks must call.
        """

    @abstractmethod
    def compute(self, rows: Rows, stage: int) -> None:
        """Run a stage of this rank on the new tokens of some rows."""

    def exchange(self, turns: Sequence[tuple[Rows, int]]) -> None:  # noqa: B027 - not every runner communicates
        """Send the results since the last exchange, and receive the inputs of the next ``turns`` (rows, stages)."""

    @abstractmethod
    def take(self, rows: Rows) -> list[int]:
        """Return the tokens that were chosen for the rows, and make them the next input."""

    def finish(self) -> None:  # noqa: B027 - not every runner sends
        """Wait until everything that was sent has been received."""


class WholeModel(Runner):
    """A model without a pipeline: all of it is on this rank, or other ranks compute other parts in step (``tp``)."""

    def __init__(self, model: nn.Module, chunks: Sequence[Chunk] = ()) -> None:
        self._model = model
        self.layers = {0: None}
        self._decoders: dict[int, Forward] = {chunk.index: chunk.decoder() for chunk in chunks}

    def begin(self, rows: Rows, decoders: Mapping[int, Forward]) -> None:
        """See :meth:`Runner.begin`."""
        self._decoders[rows.index] = decoders[0]

    def compute(self, rows: Rows, stage: int) -> None:
        """See :meth:`Runner.compute`."""
        del stage
        decoder = self._decoders[rows.index]
        with torch.no_grad(), _uncompiled():
            output = decoder.call(self._model, rows.new_BT)
            rows.new_BT = rows.choose(decoder.logits(output))[:, None]

    def take(self, rows: Rows) -> list[int]:
        """See :meth:`Runner.take`."""
        return rows.new_BT[:, 0].tolist()


class _Boundary(NamedTuple):
    """The tensors that a chunk passes from ``stage`` to the next one, as listed by ``flow``."""

    stage: int
    chunk: int
    flow: StageFlow


class Stages(Runner):
    """The pipeline stages on this rank.

    Collective:
        An all-gather along ``pp`` for each new shape.
    """

    def __init__(
        self, model: nn.Module, chunks: Sequence[Chunk], pipeline: PipelineStages, comm: Comm, ranks: Sequence[int]
    ) -> None:
        self._model, self._pipeline, self._comm = model, pipeline, comm
        self._ranks = tuple(ranks)
        self.num_stages = len(ranks)
        self.stages = tuple(stage for stage, rank in enumerate(ranks) if rank == comm.rank)
        self.layers = {stage: _layers(pipeline, stage) for stage in self.stages}
        self._decoders: dict[tuple[int, int], Forward] = {}
        self._flows: dict[tuple[int, bool], StageFlow] = {}
        self._has_begun: set[tuple[int, int]] = set()
        self._tokens: dict[int, Tensor] = {}
        self._tokens_to_send: list[Tensor] = []  # since the last exchange, as for _to_send
        self._to_send: list[tuple[_Boundary, Sequence[Tensor]]] = []  # results for a stage on another rank
        self._inputs: dict[tuple[int, int], Sequence[Tensor]] = {}  # results for a stage here, by stage and chunk
        self._pending: deque[Handle] = deque()
        for chunk in chunks:
            self.begin(chunk, {stage: chunk.decoder(layers) for stage, layers in self.layers.items()})
            self._flows[chunk.index, False] = self._trace_flow(chunk, chunk.new_BT[:, :1])

    def begin(self, rows: Rows, decoders: Mapping[int, Forward]) -> None:
        """See :meth:`Runner.begin`."""
        for stage, decoder in decoders.items():
            self._decoders[rows.index, stage] = decoder
            self._has_begun.discard((rows.index, stage))
        self._flows[rows.index, True] = self._trace_flow(rows, rows.new_BT)

    def exchange(self, turns: Sequence[tuple[Rows, int]]) -> None:
        """See :meth:`Runner.exchange`.

        Collective:
            An exchange with the ranks of the previous and the next stages, with one message per tensor. For a new flow
            it is preceded by an exchange of shapes and dtypes. The rank of the last stage also sends eight bytes per
            row to every other rank.
        """
        last_rank, rank_here = self._ranks[-1], self._comm.rank
        others = [rank for rank in range(self._comm.size) if rank != last_rank]
        sends: list[Message] = [(tokens_B, rank, "tokens") for tokens_B in self._tokens_to_send for rank in others]
        self._tokens_to_send = []
        receives: list[Message] = []
        expected = []
        for rows, stage in turns:
            if stage == self.num_stages and rank_here != last_rank:
                buffer = torch.empty(rows.new_BT.shape[0], dtype=torch.int64, device=rows.new_BT.device)
                self._tokens[rows.index] = buffer
                receives.append((buffer, last_rank, "tokens"))
            elif 0 < stage < self.num_stages and self._ranks[stage - 1] != rank_here:
                expected.append(_Boundary(stage - 1, rows.index, self._flow(rows, stage)))
        self._exchange_headers(expected)
        to_send, self._to_send = self._to_send, []
        for (stage, _, _), tensors in to_send:
            to, unit = self._ranks[stage + 1], f"activation of stage {stage}"
            sends += [(tensor.detach().contiguous().view(-1), to, unit) for tensor in tensors]
        for stage, index, flow in expected:
            device = self._pipeline.device
            buffers = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in flow.announced[stage]]
            self._inputs[stage, index] = buffers
            receives += [(each.view(-1), self._ranks[stage], f"activation of stage {stage}") for each in buffers]
        if not sends and not receives:
            return
        handle = self._comm.exchange(sends, receives)
        handle.wait_received()
        self._pending.append(handle)
        while len(self._pending) > _EXCHANGES_AHEAD:
            self._pending.popleft().wait()

    def compute(self, rows: Rows, stage: int) -> None:
        """See :meth:`Runner.compute`."""
        flow = self._flow(rows, stage)
        self._has_begun.add((rows.index, stage))
        decoder = self._decoders[rows.index, stage]
        received: dict[Source, Tensor] = {}
        if stage:
            received = dict(zip(flow.boundary[stage - 1], self._inputs.pop((stage - 1, rows.index)), strict=True))
        with torch.no_grad(), _uncompiled():
            forward = partial(decoder.call, self._model, rows.new_BT)
            output = self._pipeline.run(stage, flow, received, forward)
            if stage == self.num_stages - 1:
                self._tokens[rows.index] = rows.choose(decoder.logits(output))
                self._tokens_to_send.append(self._tokens[rows.index])
            elif self._ranks[stage + 1] == self._comm.rank:
                self._inputs[stage, rows.index] = output
            else:
                self._to_send.append((_Boundary(stage, rows.index, flow), output))

    def take(self, rows: Rows) -> list[int]:
        """See :meth:`Runner.take`."""
        tokens_B = self._tokens.pop(rows.index)
        rows.new_BT = tokens_B[:, None]
        return tokens_B.tolist()

    def finish(self) -> None:
        """See :meth:`Runner.finish`."""
        assert not self._to_send
        while self._pending:
            self._pending.popleft().wait()

    def _flow(self, rows: Rows, stage: int) -> StageFlow:
        """Return the tensors between stages in the next forward of some rows."""
        return self._flows[rows.index, (rows.index, stage) not in self._has_begun]

    def _trace_flow(self, rows: Rows, ids_BT: Tensor) -> StageFlow:
        """Return the tensors between stages for new tokens of this shape."""
        call = partial(_trace, rows.make_decoder)
        return self._pipeline.flow(
            {"new tokens": ids_BT, "is padded": rows.is_padded, "keeps cache": rows.keeps_cache}, call
        )

    def _exchange_headers(self, expected: Sequence[_Boundary]) -> None:
        """Exchange shapes and dtypes of the tensors of new flows."""
        sends: list[Message] = []
        receives: list[Message] = []
        headers = []
        for (stage, _, flow), tensors in self._to_send:
            if stage not in flow.announced:
                flow.announced[stage] = tuple(
                    BoundaryTensor(tuple(t.shape), t.dtype, requires_grad=False) for t in tensors
                )
                message = header(stage, flow.announced[stage], self._pipeline.device)
                sends.append((message.view(-1), self._ranks[stage + 1], f"shapes of stage {stage}"))
        for stage, _, flow in expected:
            if stage not in flow.announced:
                message = empty_header(len(flow.boundary[stage]), self._pipeline.device)
                headers.append((stage, flow, message))
                receives.append((message.view(-1), self._ranks[stage], f"shapes of stage {stage}"))
        if sends or receives:
            self._comm.exchange(sends, receives).wait()
        for stage, flow, message in headers:
            flow.announced[stage] = read_header(message)


def round_up_length(length: int) -> int:
    """Round ``length`` up by at most a quarter or 32, to one of four lengths between powers of two.

    With a pipeline the model is traced for each new shape, which takes seconds for many layers. Therefore prompts are
    padded to a few lengths.
    """
    step = max(32, 1 << (length - 1).bit_length() >> 3)
    return -(-length // step) * step


def _trace(make_decoder: MakeForward, model: nn.Module, batch: Any) -> Any:
    """Run the model on new tokens as if they were the first, without padding, which takes the same path."""
    new_BT = batch["new tokens"]
    return make_decoder(new_BT.shape[1], (), None).call(model, new_BT)


def _layers(stages: PipelineStages, stage: int) -> set[int]:
    """Return the indices of the layers of a stage, if its attention modules have them."""
    parents = [each.module for each in stages.modules if each.stage == stage]
    modules = [module for each in parents for module in each.modules()]
    numbers: list[Any] = [getattr(m, "layer_idx", getattr(m, "layer_id", None)) for m in modules]  # GPT-Neo has an id
    return {number for number in numbers if isinstance(number, int)}


def _uncompiled() -> AbstractContextManager[object]:
    """Run compiled units eagerly, because shapes change with every token, and each would be compiled again."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
