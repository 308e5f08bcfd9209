"""What several ranks hold a copy of is compared bit for bit, and the rank that differs is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.testing import probe, run_on_ranks
from tests.common.own import own
from tests.common.ranks import on_ranks

BF16 = sw.PrecisionPolicy(param_dtype="bf16", master_dtype="fp32")
PLANS = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero1, bf16": {"strategy": "zero1", "mp_policy": BF16},
    "hsdp": {"strategy": "zero3", "dp_replicate": 2},
    "tp": {"strategy": "zero3", "tp": 2},
}
WITH_TWO = "rank 1 and rank 3 differ"
WITH_FOUR = "rank 3 differs from ranks 0, 1, 2"
#: What is found after a flip on rank 3: of a parameter, of the optimizer's state, of a gathered copy of rank 0's slice.
FOUND = {
    "ddp": [f"parameters of root (float32): {WITH_FOUR}", f"optimizer state of root (float32): {WITH_FOUR}", None],
    "zero1": ["", "", f"gathered parameters of root (float32): {WITH_FOUR}"],
    "zero1, bf16": ["", "", f"gathered parameters of root (float32): {WITH_FOUR}"],
    "hsdp": [f"parameters of root (float32): {WITH_TWO}", f"optimizer state of root (float32): {WITH_TWO}", None],
    "tp": ["parameters of root (float32) that tp does not divide: rank 2 and rank 3 differ", "", None],
}


def flip_on_rank_3(tensor: torch.Tensor) -> None:
    if torch.distributed.get_rank() == 3:
        own(tensor).view(-1)[-1:].view(torch.uint8)[0] ^= 1


def difference(*args, **options) -> str:
    try:
        sw.check_replicas(*args, **options)
    except sw.RankDisagreement as error:
        return str(error).splitlines()[1].removeprefix("  - ")
    return ""


@on_ranks(4)
def test_a_flipped_bit_is_found_where_ranks_hold_copies():
    found = {}
    for name, fields in PLANS.items():
        torch.manual_seed(0)
        model = sw.parallelize(sw.models.gpt("gpt-nano", vocab_size=64), sw.ParallelPlan(**fields))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.arange(32).view(2, 16) + sw.data_parallel_rank(model)
        for _ in range(2):  # all is well
            model(tokens, tokens).backward()
            assert difference(model, optimizer, after_backward=True) == ""
            optimizer.step()
            assert difference(model, optimizer) == ""
            optimizer.zero_grad()
        shards = probe(model).shards
        norms = [shard.parameter for shard in shards if shard.numel and "norm" in shard.name]
        parameter = norms[0] if norms else next(shard.parameter for shard in shards if shard.numel)
        texts: list[str | None] = []
        for tensor in (parameter, optimizer.state[parameter]["exp_avg"]):
            flip_on_rank_3(tensor)
            texts.append(difference(model, optimizer))
            flip_on_rank_3(tensor)
        settings = optimizer.param_groups[0]
        if torch.distributed.get_rank() == 3:
            settings["lr"] *= 2
        with_lr = WITH_TWO if name == "tp" else WITH_FOUR
        found_lr = f"lr of parameter group 0 of the optimizer: {with_lr}"
        assert difference(model, optimizer) == found_lr
        settings["lr"] = 1e-3
        model(tokens, tokens).backward()
        assert difference(model, optimizer, after_backward=True) == ""
        if fields["strategy"] == "zero1":
            flip_on_rank_3(shards[0].whole)
            texts.append(difference(model, optimizer, after_backward=True))
        found[name] = texts if len(texts) == 3 else [*texts, None]
    assert found == FOUND


def save_with_two_rates(folder: str) -> str:
    model = sw.parallelize(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + torch.distributed.get_rank()))
    with pytest.raises(sw.RankDisagreement) as caught:
        sw.save(f"{folder}/step-00000001", model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    sw.save(f"{folder}/step-00000001", model, optimizer)
    assert caught.value.exit_code == 83
    return str(caught.value)


def test_two_learning_rates_are_told_at_a_save_which_writes_nothing(tmp_path: Path) -> None:
    for text in run_on_ranks(save_with_two_rates, 2, str(tmp_path)):
        assert "rank 0 has lr=0.1 in parameter group 0, rank 1 has lr=0.2 in parameter group 0.\n" in text
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
