"""Which rows are sent, in which order, and which are dropped."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.parallel.experts.route import combine, dispatch, find_route
from shardwise.spec.traffic.rows import capacity, local_range


def taken(chosen: list[list[int]], limit: int | None) -> dict[int, list[tuple[int, int]]]:
    """By expert, the (choice, token) pairs that it takes: first choices first, then the order of tokens."""
    experts: dict[int, list[tuple[int, int]]] = {}
    for choice in range(len(chosen[0])):
        for token, picked in enumerate(chosen):
            rows = experts.setdefault(picked[choice], [])
            if limit is None or len(rows) < limit:
                rows.append((choice, token))
    return experts


choices = st.integers(1, 5).flatmap(
    lambda num_experts: st.tuples(
        st.just(num_experts),
        st.integers(1, num_experts).flatmap(
            lambda count: st.lists(st.permutations(range(num_experts)).map(lambda p: p[:count]), min_size=1, max_size=9)
        ),
    )
)


@given(choices, st.sampled_from([None, 0.3, 1.0, 1.5]))
@settings(max_examples=60, deadline=None)
def test_experts_take_first_choices_first_and_then_tokens_in_their_order(given_choices, factor):
    num_experts, chosen = given_choices
    limit = capacity(factor, len(chosen), len(chosen[0]), num_experts)
    route = find_route(torch.tensor(chosen), num_experts, factor, None, "mlp")
    expected = taken(chosen, limit)
    assert route.by_expert == route.sent == [len(expected.get(expert, ())) for expert in range(num_experts)]
    rows = [row for expert in range(num_experts) for row in expected.get(expert, ())]
    assert route.order.tolist() == [choice * len(chosen) + token for choice, token in rows]

    x_NC = torch.arange(2.0 * len(chosen), dtype=torch.float64).view(-1, 2).requires_grad_()
    sent = dispatch(x_NC, route)
    assert [row[0] for row in sent.tolist()] == [2.0 * token for _, token in rows]
    y_KNC: Tensor = combine(sent, route)
    for choice in range(len(chosen[0])):
        for token in range(len(chosen)):
            is_there = (choice, token) in rows
            assert torch.equal(y_KNC[choice, token], x_NC[token] if is_there else torch.zeros(2, dtype=torch.float64))
    y_KNC.sum().backward()
    counts = torch.tensor([sum(row[1] == token for row in rows) for token in range(len(chosen))], dtype=torch.float64)
    assert x_NC.grad is not None
    assert torch.equal(x_NC.grad, counts.unsqueeze(1).expand(-1, 2))


def test_a_capacity_is_the_even_share_times_the_factor_rounded_up():
    assert capacity(None, 10, 2, 4) is None
    assert capacity(1.0, 10, 2, 4) == 5
    assert capacity(1.25, 10, 2, 4) == 7
    assert capacity(0.01, 10, 2, 4) == 1
    assert [local_range(8, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
