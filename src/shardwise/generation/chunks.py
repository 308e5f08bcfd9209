"""Parts of a batch that generate side by side, each some rows that go through the model together.

Where the model is whole on a rank there is one part. Over a pipeline there are several, so that every stage has one to
work on: stage ``s`` computes part ``j`` while stage ``s - 1`` computes part ``j + 1``. The rank of the last stage
chooses the tokens and sends them to the others; the first embeds them.
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.comm.control import agree
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


class Shares:
    """The rows of a batch by data-parallel rank, in parts that go through the model one after the other.

    Args:
        num_rows: Of each data-parallel rank's batch.
        comm: Over the data-parallel ranks; ``None`` where there is one only.
        is_divided: They have one batch, and each generates some rows of it. Else each has rows of its own.
        max_parts: Into so many parts at most. All ranks have equally many, of which some may be empty.
    """

    def __init__(self, num_rows: Sequence[int], comm: Comm | None, *, is_divided: bool, max_parts: int) -> None:
        self._comm = comm
        self._is_divided = is_divided
        self._rank = 0 if comm is None else comm.rank
        self.num_rows = num_rows[self._rank]
        shares = divide(self.num_rows, len(num_rows)) if is_divided else [range(count) for count in num_rows]
        num_parts = min(max_parts, max(map(len, shares)))
        self._parts = [[share[part.start : part.stop] for part in divide(len(share), num_parts)] for share in shares]
        self.num_parts = num_parts

    def own(self, part: int) -> range:
        """This rank's rows in a part."""
        return self._parts[self._rank][part]

    def exchange(self, part: int, tokens: Sequence[int]) -> dict[int, int]:
        """The new tokens of a part, by row: those of this rank's rows, which are given, and the others'.

        Collective:
            Where the rows are divided an all-gather of eight bytes for each on the data-parallel axes.
        """
        if not self._is_divided or self._comm is None:
            return dict(zip(self.own(part), tokens, strict=True))
        every = [rows[part] for rows in self._parts]
        width = max(map(len, every))
        buffer = torch.zeros(len(every), width, dtype=torch.int64, device=self._comm.device)
        buffer[self._rank, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self._comm.all_gather(buffer.view(-1), unit="tokens").wait()
        return {
            row: token
            for rows, found in zip(every, buffer.tolist(), strict=True)
            for row, token in zip(rows, found[: len(rows)], strict=True)
        }

    def is_over(self, part: int, is_live: Sequence[bool]) -> bool:
        """Whether all rows of a part have ended, on every rank.

        Collective:
            Where each rank has rows of its own an all-gather of eight bytes on the data-parallel axes.
        """
        if self._comm is None or self._is_divided:
            return not any(is_live[row] for rows in self._parts for row in rows[part])
        return not any(agree(self._comm, int(any(is_live[row] for row in self.own(part)))))


class Turn(NamedTuple):
    """One computation of one stage: ``part`` of the batch, for its new token number ``step``.

    With ``stage`` behind the last one: here the tokens arrive that the last stage has chosen.
    """

    step: int
    part: int
    stage: int


def slots(stages: Sequence[int], num_stages: int, num_parts: int, num_steps: int) -> Iterator[tuple[Turn, ...]]:
    """What the rank that holds ``stages`` does, one time after the other; at some times nothing.

    Stage ``s`` takes part ``j`` of step ``t`` at time ``t * max(num_parts, num_stages) + j + s``, after the stage
    before and after all of step ``t - 1`` of that part, which gives the token that goes in. From ``num_stages`` parts
    on no stage of a rank's only one ever waits: a part's token is there when its turn comes.

    What is made at one time is taken at the next. A rank that, between two times, sends all that it has made and
    receives all that its next turns take, as one exchange, never waits in a circle, not even where messages wait for
    each other: both ends of a message are between the same two times. Messages from one rank to another are then
    received in the order in which they were sent.
    """
    period = max(num_parts, num_stages)
    for time in range((num_steps - 1) * period + num_parts + num_stages):
        places = [(*divmod(time - stage, period), stage) for stage in (num_stages, *sorted(stages, reverse=True))]
        yield tuple(Turn(*place) for place in places if 0 <= place[0] < num_steps and place[1] < num_parts)


def divide(count: int, num_shares: int) -> list[range]:
    """``count`` rows in ``num_shares`` runs of neighbours, as even as can be, the larger ones first.

    Where there are fewer rows than shares the last ones are empty.
    """
    least, more = divmod(count, num_shares)
    starts = [share * least + min(share, more) for share in range(num_shares + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]
