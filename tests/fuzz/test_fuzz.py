"""Random programs train as one plain process does; and those that once did not."""

from __future__ import annotations

import pytest

from tests.fuzz.program import Node, Op, Program, generate
from tests.fuzz.run import search, shrink


def check(programs: list[Program]) -> None:
    """Run them; the message shows the smallest program found that fails, and what FSDP2 makes of it."""
    for failure in search(programs, batch=len(programs), judges=False):
        seed = failure.program.seed
        least = shrink(failure, limit_s=120)
        pytest.fail(
            f"seed {seed}: {failure.message}\n{least.program}\n{least.message}\nFSDP2: {least.judgement}\n{least.trace}"
        )


@pytest.mark.long
@pytest.mark.parametrize(("world", "count"), [(1, 24), (2, 24), (3, 6)])
def test_random_programs_train_as_one_process_does(world, count):
    check([generate(seed, world) for seed in range(count)])


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 500, 50))
def test_many_random_programs_train_as_one_process_does(first):
    check([generate(seed) for seed in range(first, first + 50)])


#: Programs that failed once, as small as they could be made.
FOUND = {
    # Backward begins in a unit, not in the root, which returns the same tensor: the root's ticket then entered blocks
    # that the agreed order expects behind the root, and left the unit that backward was in.
    "the root's ticket after that of a unit": (
        Program(
            nodes=(Node(skips=2), Node(gives="mapping", recompute="reentrant")),
            steps=((Op("evaluate", place=2), Op(graph=2), Op("backward", 2, loss="side")),),
        ),
        Program(
            nodes=(Node(), Node(skips=2), Node(gives="side", recompute="plain")),
            steps=((Op(graph=2), Op("backward", 2, loss="side")),),
        ),
        Program(
            nodes=(Node(gives="side"), Node(gives="side", inside="plain")),
            steps=((Op(), Op("backward", loss="first")), (Op(), Op("backward", loss="side"))),
        ),
    ),
    # The slot is another unit's by the time that the value is used. Under ddp no ticket told that there was a backward.
    "a unit returns its parameter": (
        Program(nodes=(Node(gives="weight"), *(Node(),) * 4), steps=((Op(), Op("backward", loss="both")),)),
        Program(strategy="ddp", nodes=(Node(gives="weight"),), steps=((Op(), Op("backward", loss="first")),)),
        Program(nodes=(Node(gives="view"), *(Node(),) * 4), steps=((Op(), Op("backward", loss="side")),)),
    ),
    # Right up to rounding: one sum for each call.
    "a unit returns its parameter twice": (
        Program(nodes=(Node(gives="weight", again=True),), steps=((Op(), Op("backward", loss="both")),)),
        Program(
            strategy="ddp",
            nodes=(Node(gives="weight"), Node(gives="side")),
            steps=((Op(graph=1), Op(graph=2), Op("backward", 1, other=2, loss="side")),),
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once(name):
    check(list(FOUND[name]))
