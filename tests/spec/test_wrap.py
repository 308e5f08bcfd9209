"""Wrap policies as data: what they take, how they show, what they refuse."""

from __future__ import annotations

import pytest

from shardwise.spec.errors import PlanError
from shardwise.spec.policies import WrapByClass, WrapByName, WrapBySize, wrap_by_class, wrap_by_name, wrap_by_size


class Layer:
    pass


class Block(Layer):
    pass


def test_a_class_matches_its_instances_and_those_of_classes_below():
    policy = wrap_by_class({Layer})
    assert policy.matches(Layer())
    assert policy.matches(Block())
    assert not wrap_by_class(Block).matches(Layer())


def test_a_class_can_be_given_by_name():
    policy = wrap_by_class(["Layer", Block])
    assert policy.matches(Block())
    assert policy.matches(Layer())
    assert not wrap_by_class("Other").matches(Block())


def test_the_order_in_which_classes_are_given_does_not_matter():
    assert wrap_by_class([Layer, Block]) == wrap_by_class({Block, Layer}) == WrapByClass((Block, Layer))
    assert hash(wrap_by_class([Layer, "Block"])) == hash(wrap_by_class(["Block", Layer]))


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        (wrap_by_class({Layer, Block}), "wrap_by_class({Block, Layer})"),
        (wrap_by_size(1000), "wrap_by_size(min_num_params=1000)"),
        (wrap_by_name("layers.*", "head"), "wrap_by_name('layers.*', 'head')"),
    ],
)
def test_a_policy_shows_the_call_that_makes_it(policy, shown):
    assert str(policy) == shown


def test_equal_policies_are_equal():
    assert wrap_by_size(7) == WrapBySize(7)
    assert wrap_by_name("a", "b") == WrapByName(("a", "b"))


def test_no_class_is_refused():
    with pytest.raises(PlanError, match=r"got no class.\n  Name at least one, or use auto_wrap_policy='none'"):
        wrap_by_class([])


@pytest.mark.parametrize("wrong", [3, Layer(), None])
def test_what_is_no_class_is_refused(wrong):
    with pytest.raises(PlanError, match="takes classes or class names, got"):
        wrap_by_class([wrong])


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "10", True, None])
def test_a_size_is_a_positive_whole_number(wrong):
    with pytest.raises(PlanError, match=r"expected a whole number of at least 1.\n  A transformer block"):
        wrap_by_size(wrong)


@pytest.mark.parametrize("wrong", [(), ("",), ("layers.*", 3)])
def test_a_name_pattern_is_text(wrong):
    with pytest.raises(PlanError, match="takes one or more patterns such as"):
        wrap_by_name(*wrong)
