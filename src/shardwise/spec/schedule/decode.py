"""Generation over a pipeline: each part of the batch goes round the stages, once for every new token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """One computation of one stage: ``part`` of the batch, for its new token number ``step``.

    With ``stage`` behind the last one: here the tokens arrive that the last stage has sent.
    """

    step: int
    part: int
    stage: int


def turns(stages: Sequence[int], num_stages: int, num_parts: int, num_steps: int) -> Iterator[Turn]:
    """What the rank that holds ``stages`` does, in order: its computations, and where the tokens of each part arrive.

    Stage ``s`` takes part ``j`` of step ``t`` at time ``t * max(num_parts, num_stages) + j + s``, after the stage
    before and after all of step ``t - 1`` of that part, which gives the token that goes in. From ``num_stages`` parts
    on no stage of a rank's only one ever waits: a part's token is there when its turn comes. Every rank follows one
    order over all ranks, in which whatever a turn needs comes before it, so that ranks never wait in a circle, and
    messages from one rank to another are received in the order in which they were sent.
    """
    period = max(num_parts, num_stages)
    for time in range((num_steps - 1) * period + num_parts + num_stages):
        for stage in (num_stages, *sorted(stages, reverse=True)):
            step, part = divmod(time - stage, period)
            if 0 <= step < num_steps and part < num_parts:
                yield Turn(step, part, stage)


def divide(count: int, num_shares: int) -> list[range]:
    """``count`` rows in ``num_shares`` runs of neighbours, as even as can be, the larger ones first.

    Where there are fewer rows than shares the last ones are empty.
    """
    least, more = divmod(count, num_shares)
    starts = [share * least + min(share, more) for share in range(num_shares + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]
