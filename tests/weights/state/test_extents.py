"""The one gather and the one scatter: what ranks hold in any slices and cuts comes to rank 0, and back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.comm.dtype import dtype_name
from shardwise.spec.errors import StateError
from shardwise.spec.extent import Extent
from shardwise.spec.slice import Cut, Slice, simplest
from shardwise.weights.state.extents import StoredRanges, gather_metadata, gather_ranges, refuse_gaps, scatter_ranges
from tests.checkpoint.threads import run_in_threads


def tensors(first: int) -> dict[str, Tensor]:
    """Logical tensors: one of them lies column by column, one is a number, one is empty."""
    made = {
        "rows": torch.arange(24.0).view(4, 6),
        "columns": torch.arange(24.0).view(6, 4).t(),
        "half": torch.arange(7.0).bfloat16(),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 3),
    }
    return {name: value if value.dtype is torch.bool else value + first for name, value in made.items()}


def extent_of(name: str, value: Tensor, start: int, stop: int, cuts: tuple[Cut, ...] = ()) -> Extent:
    stride = None if value.is_contiguous() else value.stride()
    return Extent(name, tuple(value.shape), dtype_name(value.dtype), start, stop, stride, cuts)


def memory(value: Tensor, cuts: tuple[Cut, ...] = ()) -> Tensor:
    """The elements of a slice in the order of its memory."""
    found = torch.zeros(Slice(tuple(value.shape), cuts).local_shape, dtype=value.dtype)
    for logical, local in Slice(tuple(value.shape), cuts).boxes():
        found[tuple(slice(*side) for side in local)] = value[tuple(slice(*side) for side in logical)]
    return (found if value.is_contiguous() else found.t().contiguous()).reshape(-1)


def holding(extents: list[Extent], parts: list[Tensor], log: list[str], copies=None) -> StoredRanges:
    """Parts in one piece of memory for each dtype alone: here one part each."""
    (extent,), (part,) = extents, parts
    return StoredRanges(extent.name, (extent,), lambda: (part, [part]), lambda _: log.append(extent.name), copies)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cuts_make_the_whole_and_are_filled_from_it(data):
    size = data.draw(st.integers(1, 3), label="ranks")
    sides = data.draw(st.integers(0, 4), label="first rows")
    old, new = tensors(0), tensors(100)
    plan: list[list[tuple[str, int, int, tuple[Cut, ...]]]] = [[] for _ in range(size)]
    for name, value in old.items():
        slices: list[tuple[Cut, ...]] = [()]
        if name in {"rows", "columns"} and 0 < sides < 4:
            slices = [(Cut(0, ((0, sides),)),), (Cut(0, ((sides, 4),)),)]
        for cuts in slices:
            cuts = simplest(tuple(value.shape), cuts)  # noqa: PLW2901
            numel = memory(value, cuts).numel()
            edges = [0, *sorted(data.draw(st.integers(0, numel)) for _ in range(size - 1)), numel]
            for rank in range(size):
                plan[rank].append((name, edges[rank], edges[rank + 1], cuts))

    def body(comm):
        pieces = plan[comm.rank]
        parts = [memory(old[name], cuts)[start:stop].clone() for name, start, stop, cuts in pieces]
        extents = [extent_of(name, old[name], start, stop, cuts) for name, start, stop, cuts in pieces]
        log: list[str] = []
        stored = [holding([extent], [part], log) for extent, part in zip(extents, parts, strict=True)]
        metadata, answer = gather_metadata(comm, stored, lambda metadata: [refuse_gaps(metadata), len(metadata)])
        assert answer == [None, size]
        whole = gather_ranges(comm, stored, metadata)
        assert whole.keys() == (old.keys() if comm.rank == 0 else set())
        for name, value in whole.items():
            assert torch.equal(value, old[name])
            assert (value.dtype, value.stride()) == (old[name].dtype, old[name].stride()), name
        present = set(new) - {"half"}
        scatter_ranges(comm, stored, metadata, new if comm.rank == 0 else {}, present)
        for part, (name, start, stop, cuts) in zip(parts, pieces, strict=True):
            assert torch.equal(part, memory((new if name in present else old)[name], cuts)[start:stop]), name
        assert "half" not in log

    assert run_in_threads(body, size) == [None] * size


def test_copies_are_gathered_once_and_filled_by_a_broadcast():
    whole = torch.arange(6.0)

    def body(comm):
        part = whole.clone()
        stored = [holding([extent_of("w", whole, 0, 6)], [part], [], copies=comm)]
        metadata, _ = gather_metadata(comm, stored, refuse_gaps)
        gather_ranges(comm, stored, metadata)
        before = comm.received_bytes
        scatter_ranges(comm, stored, metadata, {"w": whole + 1} if comm.rank == 0 else {}, ["w"])
        assert torch.equal(part, whole + 1)
        return comm.received_bytes - before

    assert run_in_threads(body, 3) == [0, 24, 24]


def test_what_is_no_whole_is_refused_on_every_rank():
    def body(comm):
        shape = (4,) if comm.rank < 2 else (5,)
        start = 2 * comm.rank
        extents = [Extent("a", (6,), "fp32", start, start + 1 + comm.rank % 2), Extent("b", shape, "fp32", 0, 0)]
        stored = [holding([extent], [torch.zeros(extent.numel)], []) for extent in extents]
        gather_metadata(comm, stored, refuse_gaps)

    outcome = run_in_threads(body, 3)
    assert {type(error) for error in outcome} == {StateError}
    expected = (
        "the parts on the ranks do not make up the whole model:\n"
        "  b: of shape [5] on one rank, [4] on another\n"
        "  a: no rank holds elements 1 to 2\n"
        "  a: no rank holds elements 5 to 6\n"
        "  b: no rank holds elements 0 to 4"
    )
    assert [str(error) for error in outcome] == [expected] * 3
