"""Strategy ``data_parallel``: the model itself runs as replicas, in a world of one; the rest works as with ddp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.common.oracle import Chain, adamw, sample
from tests.common.ranks import on_ranks


class Scalar(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Joint(Chain):
    """Two tensors of a batch, which may have different numbers of rows."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x).square().mean() + other.mean()


@on_ranks(1)
def test_a_step_records_the_exchanges_between_replicas_and_the_summary_says_which_device_does_what():
    model = sw.parallelize(Scalar(), sw.ParallelPlan(strategy="data_parallel"))
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    x = sample(0, 0, 6, 8)
    for _ in range(2):
        with sw.record_collectives(model) as events:
            sw.train_step(model, x)
        assert sum(event.sent_bytes for event in events if event.axis != "devices") == 0
        assert [(event.kind, event.unit, event.sent_bytes) for event in events if event.axis == "devices"] == [
            ("scatter", "inputs", x.nbytes // 2),
            ("broadcast", "parameters", num_bytes),
            ("gather", "outputs", 4),
            ("scatter", "gradients of outputs", 4),
            ("reduce", "gradients", num_bytes),
        ]
    found = str(sw.summary(model))
    assert "replicas on cpu, cpu: the first device keeps the parameters, gradients and optimizer state" in found


@on_ranks(1)
def test_replicas_with_different_numbers_of_samples_count_by_their_samples():
    """Three samples on two replicas are two and one: their mean is that of the three."""
    plain, model = Scalar(), sw.parallelize(Scalar(), sw.ParallelPlan(strategy="data_parallel"))
    x = sample(0, 0, 3, 8) * torch.tensor([[1.0], [1.0], [9.0]])
    expected, got = plain(x), model(x)
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert (torch.stack([plain(x[:2]), plain(x[2:])]).mean() - expected).abs() > 0.1  # unweighted
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6, msg=name)
    joint = sw.parallelize(Joint(), sw.ParallelPlan(strategy="data_parallel"))
    joint(x[:2], torch.ones(4))
    with pytest.raises(sw.StateError, match="do not say how many samples"):
        joint(x, torch.ones(4))


@on_ranks(1)
def test_a_model_trains_as_replicas_like_one_process_that_runs_the_halves_in_order(tmp_path):
    """Losses are averaged over the replicas, as over the ranks of ddp."""
    plain, model = Scalar(), sw.parallelize(Scalar(), sw.ParallelPlan(strategy="data_parallel"))
    assert type(model) is Scalar
    optimizers = [adamw(plain.parameters()), adamw(model.parameters())]
    for step in range(3):
        x = sample(0, step, 6, 8)
        losses = [plain(chunk) / 2 for chunk in x.chunk(2)]
        for loss in losses:
            loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        got = sw.train_step(model, x)
        assert torch.equal(got, torch.stack([2 * loss.detach() for loss in losses]).mean())
        sw.clip_grad_norm(model, 1e9)
        for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = sw.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    sw.save(f"{tmp_path}/checkpoint", model, optimizers[1])
    other = sw.parallelize(Scalar(), sw.ParallelPlan(strategy="zero3"))
    sw.load(f"{tmp_path}/checkpoint", other, adamw(other.parameters()))
    with torch.no_grad():
        x = sample(0, 9, 6, 8)
        assert torch.equal(model.eval()(x), torch.stack([other(chunk) for chunk in x.chunk(2)]).mean())
    told = sw.summary(model).placements
    assert told == "parameters replicate, gradients replicate, optimizer replicate, replicas in one process"
