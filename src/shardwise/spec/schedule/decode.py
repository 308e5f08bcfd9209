"""Generation over a pipeline: each part of the batch goes round the stages, once for every new token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


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
