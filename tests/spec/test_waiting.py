"""Activations and the gradients that wait beside them, against walks by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.facts import GroupFacts, UnitFacts
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.memory.activations import Activations, backward_bytes
from shardwise.spec.placement import PRESETS


def unit(index, depth, family, *params, is_trainable=True, compute_dtype=None):
    layout = GroupLayout.build([ParamSpec(name, (numel,), "fp32", is_trainable) for name, numel in params], 2)
    group = GroupFacts(index, layout, PRESETS["zero3"], depth, True, is_trainable, compute_dtype)
    return UnitFacts(f"unit{index}", frozenset(family), [group])


def chain(*blocks, root=1):
    """A root with one parameter, ``head``, and blocks below it with one each."""
    units = [unit(0, 0, range(len(blocks) + 1), ("head", root))]
    return units + [unit(i, 1, {0, i}, (f"b{i}", numel)) for i, numel in enumerate(blocks, 1)]


def test_gradients_wait_for_their_unit_and_the_roots_for_the_end():
    units = chain(100, 100, root=10)
    flat = Activations((("head", 1000), ("b2", 1000), ("b1", 1000)), 1000)
    assert backward_bytes(flat, units) == 1000 + 40 + 400


def test_a_unit_is_left_when_the_next_ones_first_gradient_comes():
    units = [unit(0, 0, {0, 1, 2}), unit(1, 1, {0, 1}, ("a", 7), ("b", 5)), unit(2, 1, {0, 2}, ("c", 100), ("d", 3))]
    arrivals = Activations((("d", 50), ("c", 60), ("b", 500), ("a", 450)), 10)
    # when a comes b is there, of 20 bytes; when c came, d's 12; 428 after c and 48 at the end
    assert backward_bytes(arrivals, units) == 500
    assert backward_bytes(Activations((("d", 50), ("c", 60)), 10), units) == 10 + 412


def test_units_above_and_below_wait_together():
    units = [
        unit(0, 0, {0, 1, 2, 3}),
        unit(1, 1, {0, 1, 2}, ("outer", 100)),
        unit(2, 2, {0, 1, 2}, ("inner", 10)),
        unit(3, 1, {0, 3}, ("other", 1)),
    ]
    arrivals = (("inner", 0), ("outer", 0), ("other", 300))
    assert backward_bytes(Activations(arrivals[:2]), units) == 440
    assert backward_bytes(Activations(arrivals[:1], 1), units) == 41
    assert backward_bytes(Activations(arrivals), units) == 300  # both have been moved


def test_what_is_frozen_or_in_no_unit_does_not_wait_and_bf16_waits_in_two_bytes():
    units = [unit(0, 0, {0, 1}, ("w", 10), compute_dtype="bf16"), unit(1, 1, {0, 1}, ("f", 99), is_trainable=False)]
    assert backward_bytes(Activations((("w", 1), ("ignored", 1)), 1), units) == 21
    assert backward_bytes(Activations((("f", 1),), 1), units) == 1


@given(st.integers(1, 12), st.integers(1, 1 << 16), st.integers(0, 1 << 16))
def test_of_equal_units_it_is_the_larger_of_the_closed_forms_two(count, numel, share):
    """When the last gradient of the first of L units comes, A (L - 1) / L is left, and w waits."""
    names = [(f"first{i}", f"last{i}") for i in range(count)]
    units = [unit(0, 0, range(count + 1))]
    units += [unit(i + 1, 1, {0, i + 1}, (first, numel), (last, 1)) for i, (first, last) in enumerate(names)]
    arrivals = []
    for left, (first, last) in reversed(list(enumerate(names))):
        arrivals += [(first, share * (left + 1)), (last, share * left)]
    found = backward_bytes(Activations(tuple(arrivals)), units)
    assert found == max(share * count, share * (count - 1) + 4 * numel, 4 * numel + 4)


@pytest.mark.parametrize("last", [0, 70])
def test_the_peak_alone_is_that_of_the_activations(last):
    assert Activations((("a", 30), ("b", 20)), last).peak_bytes == max(30, last)
    assert Activations(()).peak_bytes == 0
