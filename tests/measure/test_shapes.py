"""Results on ``meta`` whose shapes are remembered are those that torch computes, and are new tensors each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.measure import shapes
from shardwise.measure.shapes import KnownShapes


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def facts(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [facts(each) for each in value]
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type, value.untyped_storage().nbytes()
    return value


def computed(call: Callable[[], object]) -> int:
    """How many operations ``call`` has torch compute."""
    num_known = len(shapes._known)
    with KnownShapes():
        call()
    return len(shapes._known) - num_known


INTEGERS = meta(3, 4, dtype=torch.int64)
OPERATIONS: dict[str, Callable[[], object]] = {
    "add": lambda: meta(3, 4) + meta(4),
    "promotes": lambda: meta(3, 4, dtype=torch.bfloat16) * meta(3, 1),
    "integers times an int": lambda: INTEGERS * 2,
    "integers times a float": lambda: INTEGERS * 2.0,
    "integers times a bool": lambda: INTEGERS * True,
    "strides": lambda: F.gelu(meta(3, 5, 4).transpose(0, 2)),
    "norm": lambda: F.layer_norm(meta(2, 3, 8), (8,), meta(8), meta(8)),
    "linear": lambda: F.linear(meta(2, 3, 8), meta(5, 8), meta(5)),
    "several results": lambda: torch.var_mean(meta(4, 6), dim=1),
    "a list": lambda: torch.cat([meta(2, 3), meta(5, 3)]),
    "no affine": lambda: torch.native_layer_norm(meta(2, 8), (8,), None, None, 1e-5),
    "kernel": lambda: torch.ops.aten._scaled_dot_product_flash_attention(
        *(meta(1, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3))
    ),
    "view": lambda: meta(3, 4).view(2, 6),
    "in place": lambda: meta(3, 4).add_(1),
}


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_what_is_remembered_is_what_torch_computes(name: str) -> None:
    operation = OPERATIONS[name]
    expected = facts(operation())
    with KnownShapes():
        assert [facts(operation()) for _ in range(3)] == [expected] * 3


def test_an_operation_on_the_same_shapes_is_computed_once() -> None:
    shapes._known.clear()
    assert computed(lambda: meta(7, 4) * 2) == 1
    assert computed(lambda: [meta(7, 4) * 2 for _ in range(5)]) == 0
    assert computed(lambda: meta(4, 7).t() * 2) == 1  # other strides
    assert computed(lambda: meta(7, 4) * 2.0) == 1  # the number's type may decide on the dtype


def test_the_default_dtype_counts() -> None:
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            with KnownShapes():
                assert (INTEGERS / 2).dtype is dtype
    finally:
        torch.set_default_dtype(before)


def test_results_share_no_memory_and_views_and_changed_arguments_keep_theirs() -> None:
    x = meta(3, 4)
    with KnownShapes():
        first, second = x * 2, x * 2
        viewed, changed = x.view(12), x.add_(1)
    assert len({each.untyped_storage()._cdata for each in (x, first, second)}) == 3
    assert viewed.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert changed is x
    assert x._version == 1


def test_a_result_that_is_an_argument_stays_one() -> None:
    """Drop-out of nothing returns its argument, though its schema says that it makes a tensor."""
    x = meta(3, 4)
    for _ in range(2):
        with KnownShapes():
            same = torch.ops.aten.native_dropout(x, 0.0, True)[0]
        plain = torch.ops.aten.native_dropout(x, 0.0, True)[0]
        assert (same.untyped_storage()._cdata == x.untyped_storage()._cdata) == (
            plain.untyped_storage()._cdata == x.untyped_storage()._cdata
        )


def test_values_and_subclasses_are_left_to_torch() -> None:
    class Own(Tensor):
        pass

    shapes._known.clear()
    with KnownShapes():
        assert torch.equal(torch.ones(3) * 2, torch.full((3,), 2.0))
        assert type(meta(3).as_subclass(Own) * 2) is Own
        with pytest.raises(RuntimeError):
            meta(3).sum().item()
    assert not [key for key, known in shapes._known.items() if known is None]


def test_gradients_flow_through_remembered_results() -> None:
    weight = nn.Parameter(meta(8, 8))
    for _ in range(2):
        weight.grad = None
        with KnownShapes():
            F.gelu(F.linear(meta(3, 8), weight)).sum().backward()
        assert weight.grad is not None
        assert facts(weight.grad) == facts(meta(8, 8))
