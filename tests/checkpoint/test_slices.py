"""Tensors that are saved in slices: any slices into any others, as strictly checked as whole ones."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint import shard
from shardwise.checkpoint.reader import describe_summary, open_checkpoint
from shardwise.checkpoint.writer import write
from shardwise.comm.dtype import dtype_name
from shardwise.spec.errors import CheckpointError
from shardwise.spec.extent import Extent
from shardwise.spec.slice import Cut, Slice, even_ranges, simplest
from tests.checkpoint.test_damage import manifest_error, rewrite, set_in
from tests.checkpoint.threads import alone, run_in_threads


def part_of(tensor, cuts):
    """The slice, as a tensor of its own."""
    for cut in cuts:
        tensor = torch.cat([tensor.narrow(cut.dim, a, b - a) for a, b in cut.ranges], dim=cut.dim)
    return tensor.contiguous()


def pieces(tensors, slices, rank):
    """What a rank holds where ``slices[name]`` are divided evenly over the ranks: (extent, elements)."""
    found = []
    for name, tensor in tensors.items():
        parts = slices[name]
        cuts, of, index = (parts[rank % len(parts)], len(slices["ranks"]) // len(parts), rank // len(parts))
        flat = part_of(tensor, cuts).view(-1)
        start, stop = flat.numel() * index // of, flat.numel() * (index + 1) // of
        extent = Extent(name, tuple(tensor.shape), dtype_name(tensor.dtype), start, stop, cuts=cuts)
        found.append((extent, flat[start:stop].clone()))
    return found


@st.composite
def some_slices(draw, shape, most):
    """1 or 2 or 3 slices that make the whole: one dimension is divided, in any pieces."""
    count = draw(st.integers(1, most))
    if count == 1 or not shape:
        return [()]
    dim = draw(st.integers(0, len(shape) - 1))
    marks = [0, *sorted(draw(st.sets(st.integers(1, max(1, shape[dim] - 1)), max_size=5))), shape[dim]]
    owners = [draw(st.integers(0, count - 1)) for _ in range(len(marks) - 1)]
    parts = [[pair for pair, o in zip(itertools.pairwise(marks), owners, strict=True) if o == i] for i in range(count)]
    return [simplest(shape, [Cut(dim, tuple(ranges))]) for ranges in parts if sum(b - a for a, b in ranges)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_slices_load_into_any_other_slices(tmp_path_factory, data):
    dtypes = data.draw(
        st.lists(st.sampled_from(["fp32", "bf16", "fp8_e4m3", "int8", "complex64"]), min_size=2, max_size=2)
    )
    tensors, saved, loaded = {}, {}, {}
    for name, dtype in zip("ab", dtypes, strict=True):
        shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
        raw = torch.randint(0, 256, (math.prod(shape) * 8,), dtype=torch.uint8)
        tensors[name] = raw.view(getattr(torch, TORCH[dtype]))[: math.prod(shape)].reshape(shape)
        saved[name], loaded[name] = (data.draw(some_slices(shape, 3)) for _ in range(2))
    path = tmp_path_factory.mktemp("any") / "step-00000020"
    for slices in (saved, loaded):
        slices["ranks"] = range(math.lcm(*(len(slices[name]) for name in tensors)) * data.draw(st.integers(1, 2)))
    outcome = run_in_threads(
        lambda comm: write(
            path, comm, pieces(tensors, saved, comm.rank), {}, step=20, run_id="r", allow_non_finite=True
        ),
        len(saved["ranks"]),
    )
    assert outcome == [path] * len(saved["ranks"])
    open_checkpoint(path).verify()

    def body(comm):
        expected = pieces(tensors, loaded, comm.rank)
        targets = [(extent, torch.zeros_like(tensor)) for extent, tensor in expected]
        open_checkpoint(path).read_into(targets, comm=comm)
        return [
            extent
            for (extent, got), (_, want) in zip(targets, expected, strict=True)
            if got.view(torch.uint8).tolist() != want.view(torch.uint8).tolist()
        ]

    assert run_in_threads(body, len(loaded["ranks"])) == [[]] * len(loaded["ranks"])


TORCH = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
    "complex64": "complex64",
}


def columns(tensor, parts):
    return [(Cut(1, even_ranges(tensor.shape[1], parts, part)),) for part in range(parts)]


@pytest.fixture
def saved(tmp_path):
    """A weight in two slices of its columns, and a whole one."""
    weight = torch.arange(24.0).reshape(4, 6)
    slices = {"w": columns(weight, 2), "b": [()], "ranks": range(2)}
    tensors = {"w": weight, "b": torch.arange(3.0)}
    path = tmp_path / "step-00000020"
    run_in_threads(lambda comm: write(path, comm, pieces(tensors, slices, comm.rank), {}, step=20, run_id="r"), 2)
    return path


def test_what_is_read_is_bounded_and_next_to_what_is_wanted(tmp_path, monkeypatch):
    """Far apart, runs are read alone; close by, many rows at once, and never more than a chunk is held."""
    weight = torch.arange(400.0 * 300).reshape(400, 300)
    write(
        tmp_path / "s",
        alone(),
        [(Extent("w", (400, 300), "fp32", 0, 120_000), weight.view(-1))],
        {},
        step=0,
        run_id="r",
    )
    wanted = Extent("w", (400, 300), "fp32", 0, 400 * 30, cuts=(Cut(1, ((90, 120),)),))
    read = []
    real = shard.folders.read_at
    monkeypatch.setattr(shard, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(shard.folders, "read_at", lambda f, v, o: read.append(v.nbytes) or real(f, v, o))
    for most_between, largest in [(100_000, (16 * 300 + 30) * 4), (100, 30 * 4)]:  # 17 rows, with what is between
        monkeypatch.setattr(shard, "MAX_GAP_BYTES", most_between)
        target = torch.zeros(wanted.numel)
        found = open_checkpoint(tmp_path / "s")
        read.clear()
        found.read_into([(wanted, target)], verify=False)
        assert torch.equal(target.view(400, 30), weight[:, 90:120])
        assert max(read[2:]) == largest
    assert sum(read[2:]) == target.nbytes


def test_a_slice_can_be_loaded_from_a_whole_and_a_whole_from_slices(saved):
    for cuts in [(), (Cut(0, ((3, 4), (0, 1))),), (Cut(0, ((1, 3),)), Cut(1, ((2, 5),)))]:
        expected = part_of(torch.arange(24.0).reshape(4, 6), cuts).view(-1)
        target = torch.zeros(expected.numel())
        extent = Extent("w", (4, 6), "fp32", 0, target.numel(), cuts=cuts)
        open_checkpoint(saved).read_into([(extent, target)], ignored=open_checkpoint(saved).tensors)
        assert torch.equal(target, expected)


def test_what_nobody_needs_of_a_file_is_not_read(saved):
    target = torch.zeros(4)
    extent = Extent("w", (4, 6), "fp32", 0, 4, cuts=(Cut(1, ((2, 3),)),))
    assert len(open_checkpoint(saved).read_into([(extent, target)], ignored=open_checkpoint(saved).tensors)) == 1
    assert target.tolist() == [2, 8, 14, 20]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [Slice((4, 6), (Cut(1, ((0, 3),)),))] * 2,
            r"w\[:, 0:3 of 6\]: elements 0 to 12 are held by rank 0 and by rank 1",
        ),
        (
            [Slice((4, 6), (Cut(1, ((0, 3),)),)), Slice((4, 6), (Cut(1, ((4, 6),)),))],
            r"w: no slice holds \[:, 3:4 of 6\]",
        ),
        (
            [Slice((4, 6), (Cut(1, ((0, 4),)),)), Slice((4, 6), (Cut(1, ((3, 6),)),))],
            r"w: two slices hold \[:, 3:4 of 6\]",
        ),
        (
            [Slice((4, 6), (Cut(1, ((0, 3),)),)), Slice((4, 6), (Cut(0, ((0, 2),)),))],
            r"w: two slices hold \[0:2 of 4, 0:3 ",
        ),
        (
            [Slice((4, 6), (Cut(1, ((0, 3),)),)), Slice((4, 6))],
            r"w: two slices hold \[0:4|w: two slices hold \[:, 0:3 of 6\]",
        ),
    ],
)
def test_slices_that_are_not_exactly_the_whole_are_not_saved(tmp_path, parts, message):
    def body(comm):
        part = parts[comm.rank]
        extent = Extent("w", part.shape, "fp32", 0, part.numel, cuts=part.cuts)
        write(tmp_path / "s", comm, [(extent, torch.zeros(part.numel))], {}, step=0, run_id="r")

    outcome = run_in_threads(body, 2)
    assert all(isinstance(error, CheckpointError) for error in outcome)
    assert re.search(message, str(outcome[0]))
    assert len({str(error) for error in outcome}) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "its partitions have another number of slices than 3"),
        ([[[1, 0, 3]], [[1, 3, 5]]], r"w\[:, 3:5 of 6\]: element 11 is outside of its 8"),
        ([[[1, 0, 3]], [[1, 2, 5]]], r"w: two slices hold \[:, 2:3 of 6\]"),
        ([[[1, 0, 3]], [[1, 3, 7]]], "w: the range 3 to 7 of dimension 1 overlaps another, or is none of it"),
        ([[[1, 0, 3]], [[1, 3, 6, 4, 5]]], "overlaps another, or is none of it"),
        ([[[1, 0, 3]], [[2, 3, 6]]], "w: a cut of dimension 2 does not belong to shape"),
        ([[[2, 0, 3]], [[2, 3, 6]]], "w: a cut of dimension 2 does not belong to shape"),
        ([[[1, 0, 3]], [[1, 3]]], "a cut is not a dimension with ranges"),
        ([[[1, 0, 3]], [[1, 3, 4, 4, 6]]], "w: its slice is not given in the simplest form"),
        ([[[1, 0, 3]], [[1, 0, 3]]], "w: a slice is listed twice, or is none"),
        ([[[1, 0, 3]], []], "w: a slice is listed twice, or is none"),
        ([[[1, *range(6)]]] * 10**3, "its partitions have another number of slices than 3|listed twice"),
        ([[[0, 0, 3]], [[0, 3, 6]]], "w: the range 3 to 6 of dimension 0 overlaps another, or is none of it"),
    ],
)
def test_a_manifest_whose_slices_make_no_sense_is_refused(saved, slices, message):
    rewrite(saved, set_in("partitions", "slices", 0, value=slices))
    assert re.search(message, manifest_error(saved))


def test_pieces_that_do_not_fill_their_slice_are_refused(saved):
    rewrite(saved, set_in("partitions", "length", 1, value=11))
    assert "w[:, 3:6 of 6]: no rank holds elements 11 to 12" in manifest_error(saved)


def test_a_hostile_grid_is_refused_quickly(saved):
    """Many ranges in many dimensions: what they make together is counted before it is made."""

    def change(content):
        sides = [[dim, *itertools.chain(*((2 * i, 2 * i + 1) for i in range(500)))] for dim in range(6)]
        content["tensors"]["shape"][0] = [1000] * 6
        content["partitions"]["slices"][0] = [sides, [[0, 1, 2]]]

    rewrite(saved, change)
    assert "its slice is more than 1048576 boxes" in manifest_error(saved)


def test_random_changes_never_give_other_than_a_refusal(saved):
    numbers = random.Random(0)
    for file in saved.iterdir():
        original = file.read_bytes()
        for _ in range(60):
            content = bytearray(original)
            content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
            file.write_bytes(content)
            with pytest.raises(CheckpointError):
                open_checkpoint(saved).verify()
        file.write_bytes(original)
    open_checkpoint(saved).verify()


def test_slices_are_shown(saved):
    found = open_checkpoint(saved).summary()
    assert found["slices"] == {"w": {"shape": [4, 6], "slices": ["[:, 0:3 of 6]", "[:, 3:6 of 6]"]}}
    assert describe_summary(found).splitlines()[-2:] == ["in slices   1 tensors", "  w: [:, 0:3 of 6] [:, 3:6 of 6]"]
