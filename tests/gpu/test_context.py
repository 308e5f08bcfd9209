"""One block's attention on a CUDA device: the fused kernel against the formula."""

import pytest
import torch

from shardwise.parallel.context import kernel


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_fused_kernel_gives_the_formula(monkeypatch: pytest.MonkeyPatch, is_causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32), (2, 4, 64, 32)]
    q, k, v, grad = (torch.randn(shape, generator=generator).cuda().bfloat16() for shape in shapes)
    assert kernel.is_fused(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=is_causal)
    found = []
    for _ in range(2):
        result = kernel.attend(q, k, v, 0.2, is_causal=is_causal)
        found.append([*result, *kernel.attend_backward(grad, (q, k, v), result, 0.2, is_causal=is_causal)])
        monkeypatch.setattr(kernel, "is_fused", lambda *_, **__: False)
    for fused, formula in zip(*found, strict=True):
        torch.testing.assert_close(fused.float(), formula.float(), rtol=3e-2, atol=3e-2)
