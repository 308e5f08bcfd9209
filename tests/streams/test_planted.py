"""Planted bugs: a missing wait, an early free or a wait of the host in the source is found, each in its case."""

from __future__ import annotations

import pytest

from shardwise.testing import run_on_ranks
from tests.planted import PatchError, read
from tests.streams import planted

#: One of each kind, which `make test` runs.
FEW = ["a gather is not waited for", "a handle holds no tensors", "the host reads the norm"]


def found(names: list[str]) -> list[str]:
    """The bugs of which this rank sees what the table says."""
    return [name for name in names if planted.find(name)]


def test_a_bug_of_each_kind_is_found():
    assert set().union(*run_on_ranks(found, 2, FEW, timeout_s=120)) == set(FEW)


@pytest.mark.long
@pytest.mark.parametrize("name", planted.BUGS)
def test_a_bug_is_found_or_is_none(name):
    ranks = run_on_ranks(found, 2, [name], timeout_s=120)
    is_equivalent = planted.BUGS[name].found not in {*planted.KINDS, "wait"}
    assert (all if is_equivalent else any)(ranks)


def test_every_patch_applies_to_the_source_as_it_is():
    for bug in planted.BUGS.values():
        with bug.planted():
            pass
    assert len(planted.BUGS) >= 40
    kinds = [bug.found for bug in planted.BUGS.values()]
    assert sum(kind in {*planted.KINDS, "wait"} for kind in kinds) >= 40


def test_a_patch_that_does_not_apply_is_a_failure():
    text = "# {}\ncomm/nccl.py | zero3 | race\n-{}\n+    {}\n"
    comment = "        # torch 2.13 renamed the in-place calls and deprecates the old names."
    gone = read(text.format("gone", "no line of the source", "pass"), planted.Bug)["gone"]
    nothing = read(text.format("nothing", comment, "# no word"), planted.Bug)["nothing"]
    with pytest.raises(PatchError, match=r"occurs 0 times in comm/nccl\.py"), gone.planted():
        pass
    with pytest.raises(PatchError, match="changes no function"), nothing.planted():
        pass
