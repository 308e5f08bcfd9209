"""fp16 scaling, int8 blocks and their collectives on one CUDA device, a world of one over NCCL."""

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.packed import empty_packed, pack, sum_packed, unpack
from shardwise.testing import run_on_ranks

#: Of :func:`train_all` on a CPU (``tests/streams/test_gpu.py``), under every preset.
FP16_LOSSES = [4.113, 4.028, 3.963, 3.910, 3.862, 3.820, 3.780, 3.739]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_what_is_read_from_them_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    values = torch.randn(256 * 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for device in ("cpu", "cuda"):
        packed = empty_packed(values.numel(), "int8", dtype, torch.device(device))
        pack(values.to(device), packed, "int8")
        read, total = (torch.empty_like(values, device=device) for _ in range(2))
        unpack(packed, read, "int8", dtype)
        sum_packed([packed, packed, packed], total, dtype, 2)
        found.append([packed.cpu(), read.cpu(), total.cpu()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = sw.models.gpt("gpt-nano").cuda()
    for block in model.blocks:
        block.mlp.requires_grad_(requires_grad=False)
    return model


def train(plan: sw.ParallelPlan, scaler: torch.amp.GradScaler) -> tuple[list[float], set[str], dict[str, Tensor]]:
    model = sw.parallelize(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1)).cuda()
    losses, kinds = [], set()
    for _ in range(8):
        with sw.record_collectives(model) as events:
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            scaler.scale(loss).backward()
        kinds = {event.kind for event in events}
        scaler.unscale_(optimizer)
        sw.clip_grad_norm(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {group.facts.stored_as for group in engine_of(model, "test").groups} == {None, "int8"}
    return losses, kinds, sw.full_state_dict(model)


def train_all() -> dict[str, tuple[list[float], set[str]]]:
    found = {}
    for preset in ("ddp", "zero2", "zero3"):
        gather = "none" if preset == "ddp" else "int8"
        plan = sw.ParallelPlan(
            strategy=preset,
            mp_policy=sw.PrecisionPolicy(param_dtype="fp16"),
            quantize_frozen="int8",
            quantized_gather=gather,
            quantized_reduce="int8",
        )
        found[preset] = train(plan, sw.GradScaler(init_scale=1024.0))[:2]
    return found


def test_fp16_on_quantized_weights_with_quantized_traffic_learns() -> None:
    (results,) = run_on_ranks(train_all, 1, process_group=False)
    for preset, (losses, kinds) in results.items():
        assert losses == pytest.approx(FP16_LOSSES, rel=0.01), preset
        assert "all_to_all" in kinds, preset
