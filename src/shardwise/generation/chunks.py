"""Parts of a batch that generate side by side, each some rows that go through the model together.

Where the model is whole on a rank there is one part. Over a pipeline there are several, so that every stage has one to
work on: stage ``s`` computes part ``j`` while stage ``s - 1`` computes part ``j + 1``. The rank of the last stage
chooses the tokens and sends them to the others; the first embeds them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.generation.decoder import Decoder, MakeDecoder
from shardwise.generation.relay import Crossed, Relay
from shardwise.generation.sample import RngStreams, Sampling
from shardwise.pipeline.interpret import Interpreter


class How(NamedTuple):
    """What all parts of a call have in common.

    Attributes:
        make_decoder: Of the model.
        sampling: Chooses tokens.
        seed: Of the draws.
        max_new_tokens: At most so many.
    """

    make_decoder: MakeDecoder
    sampling: Sampling
    seed: int
    max_new_tokens: int


class Part:
    """Some rows.

    Args:
        index: Which part of the batch.
        numbers: Of its rows in the batch, for the draws.
        prompts: Of its rows; one that nobody asked for where there are none, so that this rank does what others do.
        how: They are continued.
        device: Of the tokens.

    Attributes:
        how: As given.
        new_BT: The tokens that go in next.
        is_over: All its rows have ended, on every rank that is in step with this one.
    """

    def __init__(
        self, index: int, numbers: Sequence[int], prompts: Sequence[Sequence[int]], how: How, device: torch.device
    ) -> None:
        self.index = index
        self.num_rows = len(numbers)
        prompts = prompts or [[0]]
        self._longest = max(map(len, prompts))
        self.padding = [self._longest - len(prompt) for prompt in prompts]
        padded = [[0] * pad + list(prompt) for pad, prompt in zip(self.padding, prompts, strict=True)]
        self.new_BT = torch.tensor(padded, device=device)
        self.is_over = False
        self.how = how
        self._draws = RngStreams(how.seed, numbers or [0])

    def decoder(self, layers: Collection[int] | None = None) -> Decoder:
        """A new one."""
        return self.how.make_decoder(self._longest + self.how.max_new_tokens - 1, self.padding, layers)

    def choose(self, logits_BV: Tensor) -> Tensor:
        """The next token of each row, (B,)."""
        sampling = self.how.sampling
        return sampling.choose(logits_BV, self._draws.next() if sampling.temperature else None)


class Runner(ABC):
    """Computes parts on this rank.

    Attributes:
        stages: Of the model on this rank.
        num_stages: Of all ranks.
    """

    stages: tuple[int, ...] = (0,)
    num_stages = 1

    @abstractmethod
    def compute(self, part: Part, stage: int) -> None:
        """Take the part's new tokens through a stage of this rank."""

    def exchange(self, turns: Sequence[tuple[Part, int]]) -> None:  # noqa: B027 - not every runner communicates
        """Before the next turns of this rank: send what was made since the last ones, and receive what these take.

        Args:
            turns: Parts and stages; behind the last stage a part's tokens arrive.
        """

    @abstractmethod
    def take(self, part: Part) -> list[int]:
        """The tokens that were chosen for the part, by row, and from now on its new ones."""

    def finish(self) -> None:  # noqa: B027 - not every runner sends
        """Everything has been computed and taken."""


class Whole(Runner):
    """A model that is whole on this rank, or whose other parts compute the same step (``tp``)."""

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        self._model = model
        self._decoders = [part.decoder() for part in parts]

    def compute(self, part: Part, stage: int) -> None:
        """As :meth:`Runner.compute`."""
        del stage
        decoder = self._decoders[part.index]
        with torch.no_grad(), _uncompiled():
            output = decoder.call(self._model, part.new_BT)
            part.new_BT = part.choose(decoder.logits(output))[:, None]

    def take(self, part: Part) -> list[int]:
        """As :meth:`Runner.take`."""
        return part.new_BT[:, 0].tolist()


class Staged(Runner):
    """Some stages of a model.

    Args:
        model: The model.
        parts: Of the batch.
        interpreter: Of its pipeline.
        comm: On ``pp``.
        ranks: Of each stage.

    Collective:
        An all-gather along ``pp`` for each shape that is new.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[Part], interpreter: Interpreter, comm: Comm, ranks: Sequence[int]
    ) -> None:
        self._model, self._comm = model, comm
        self._relay = Relay(interpreter, comm, ranks)
        self._last_rank = ranks[-1]
        self.num_stages = len(ranks)
        self.stages = tuple(stage for stage, rank in enumerate(ranks) if rank == comm.rank)
        layers = {stage: _layers(interpreter, stage) for stage in self.stages}
        self._decoders = {(part.index, stage): part.decoder(layers[stage]) for part in parts for stage in self.stages}
        self._flows: dict[tuple[int, bool], Any] = {}
        for part in parts:
            for is_first in (True, False):
                ids = part.new_BT if is_first else part.new_BT[:, :1]
                call = partial(_trace, part.how.make_decoder)
                batch = {"new tokens": ids, "is padded": any(part.padding)}
                _, self._flows[part.index, is_first] = interpreter.stages.flow(batch, call)
        self._has_begun: set[tuple[int, int]] = set()
        self._tokens: dict[int, Tensor] = {}
        self._chosen: list[Tensor] = []  # since the last exchange

    def exchange(self, turns: Sequence[tuple[Part, int]]) -> None:
        """As :meth:`Runner.exchange`.

        Collective:
            As :meth:`Relay.exchange`; from the rank of the last stage also a message of eight bytes per row to every
            other rank.
        """
        others = [rank for rank in range(self._comm.size) if rank != self._last_rank]
        sends = [(tokens_B, rank, "tokens") for tokens_B in self._chosen for rank in others]
        self._chosen = []
        receives, expected = [], []
        for part, stage in turns:
            if stage == self.num_stages and self._comm.rank != self._last_rank:
                buffer = torch.empty(part.new_BT.shape[0], dtype=torch.int64, device=part.new_BT.device)
                self._tokens[part.index] = buffer
                receives.append((buffer, self._last_rank, "tokens"))
            elif 0 < stage < self.num_stages:
                expected.append(Crossed(stage - 1, part.index, self._flow(part, stage)))
        self._relay.exchange(expected, sends, receives)

    def compute(self, part: Part, stage: int) -> None:
        """As :meth:`Runner.compute`."""
        place = part.index, stage
        flow = self._flow(part, stage)
        self._has_begun.add(place)
        decoder = self._decoders[place]
        with torch.no_grad(), _uncompiled():
            forward = partial(decoder.call, self._model, part.new_BT)
            output = self._relay.run(stage, part.index, flow, forward)
            if stage == self.num_stages - 1:
                self._tokens[part.index] = part.choose(decoder.logits(output))
                self._chosen.append(self._tokens[part.index])

    def take(self, part: Part) -> list[int]:
        """As :meth:`Runner.take`."""
        tokens_B = self._tokens.pop(part.index)
        part.new_BT = tokens_B[:, None]
        return tokens_B.tolist()

    def finish(self) -> None:
        """As :meth:`Runner.finish`."""
        self._relay.finish()

    def _flow(self, part: Part, stage: int) -> Any:
        """What goes from stage to stage in the part's next forward of a stage."""
        return self._flows[part.index, (part.index, stage) not in self._has_begun]


def _trace(make_decoder: MakeDecoder, model: nn.Module, batch: Any) -> Any:
    """The model on new tokens, as if they were the first ones, without padding: the same path."""
    new_BT = batch["new tokens"]
    return make_decoder(new_BT.shape[1], (), None).call(model, new_BT)


def _layers(interpreter: Interpreter, stage: int) -> set[int]:
    """Numbers of the layers that a stage holds, where its attention modules know theirs."""
    modules = [
        module
        for element in interpreter.stages.elements
        if stage in element.stages
        for module in element.module.modules()
    ]
    numbers: list[Any] = [getattr(module, "layer_idx", None) for module in modules]
    return {number for number in numbers if isinstance(number, int)}


def _uncompiled() -> AbstractContextManager[object]:
    """Compiled units run as they were written: shapes change with every token, and each would be compiled anew."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
