"""Runs of parameters that an optimizer may update as one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.layout import GroupLayout, ParamSpec, flat_ranges

shapes = st.lists(st.tuples(st.integers(0, 200)), min_size=1, max_size=8)


def test_runs_of_one_class_are_one_range():
    layout = GroupLayout.build([ParamSpec(name, (100,)) for name in "abcd"], 1)
    spans = flat_ranges(layout.owned(0), (0, 0, 1, 1))
    assert [(span.kind, span.start, span.stop) for span in spans] == [(0, 0, 228), (1, 256, 484)]
    assert [piece.index for piece in spans[0].pieces] == [0, 1]
    assert len(flat_ranges(layout.owned(0), (0, 1, 0, 1))) == 4
    assert [span.numel for span in flat_ranges(layout.owned(0), (0, None, 0, 0))] == [100, 228]
    assert flat_ranges(layout.owned(0), (None,) * 4) == ()


@given(shapes=shapes, size=st.integers(1, 4), data=st.data())
def test_every_element_is_in_one_range_of_its_own_class(shapes, size, data):
    layout = GroupLayout.build([ParamSpec(str(i), shape) for i, shape in enumerate(shapes)], size)
    kinds = data.draw(st.lists(st.sampled_from((0, 1, None)), min_size=len(shapes), max_size=len(shapes)))
    for rank in range(size):
        held = layout.owned_by_param(rank)
        spans = flat_ranges(held, kinds)
        covered = [piece for span in spans for piece in span.pieces]
        assert sorted(covered, key=lambda p: p.index) == [p for p in held if p.numel and kinds[p.index] is not None]
        assert all(kinds[piece.index] == span.kind for span in spans for piece in span.pieces)
        for before, after in itertools.pairwise(spans):
            assert before.stop <= after.start
        assert sum(span.numel for span in spans) >= sum(piece.numel for piece in covered)
