"""One process, several replicas: their numbers are those of one process that runs the chunks in order and adds."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.api.data_parallel import gather, scatter
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.plan import ParallelPlan

CPU = torch.device("cpu")
DEVICES = pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"], ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:0"]])


class Net(nn.Module):
    """Ties, a frozen parameter, one that only some chunks use, an LSTM, batch norm, a parameter list, a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.full((6,), 0.5))])
        self.frozen = nn.Parameter(torch.full((6,), 0.3), requires_grad=False)
        self.rare = nn.Parameter(torch.ones(6))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)) * self.scales[0] + self.frozen)
        x = x + self.lstm(x[:, None])[0][:, 0] * self.scales[1]
        self.last = x.detach().mean(0)
        if x[0, 0] > 0:
            x = x * self.rare
        return self.again(x)


def batch(count=7):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count))


def in_order(plain, chunks):
    """Each chunk after the other; buffers are those after the first."""
    outputs, buffers = [], None
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    for chunk in chunks:
        for name, buffer in plain.named_buffers():
            buffer.copy_(before[name])
        output = plain(chunk)
        output.square().sum().backward()
        outputs.append(output.detach())
        buffers = buffers or {name: buffer.clone() for name, buffer in plain.named_buffers()}
    return torch.cat(outputs), buffers


@DEVICES
@pytest.mark.parametrize("count", [8, 6, 4])  # of 4 samples three replicas leave one without
def test_outputs_gradients_and_buffers_are_bitwise_those_of_the_chunks_in_order(devices, count):
    x = batch(count)
    plain, model = Net(), sw.DataParallel(Net(), devices)
    expected, buffers = in_order(plain, x.chunk(len(devices)))
    got = model(x)
    assert torch.equal(got, expected)
    got.square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), model.module.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for name, buffer in model.module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    model.eval()
    plain.eval()
    with torch.no_grad():
        for name, buffer in plain.named_buffers():
            buffer.copy_(buffers[name])
        assert torch.equal(model(x), torch.cat([plain(chunk) for chunk in x.chunk(len(devices))]))


def test_training_goes_on_from_step_to_step():
    plain, model = Net(), sw.DataParallel(Net(), ["cpu:0", "cpu:1"])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for step in range(3):
        x = batch(8 + step)
        _, buffers = in_order(plain, x.chunk(2))
        for name, buffer in plain.named_buffers():
            buffer.copy_(buffers[name])
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[f"module.{name}"], value), name


def test_parameters_are_shared_on_their_own_device_and_threads_are_one_per_device():
    seen = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            seen.append((self.weight.data_ptr(), threading.current_thread()))
            return x * self.weight

    model = sw.DataParallel(Looks(), ["cpu:0", "cpu:1", "cpu:0"])
    model(torch.ones(3, 3)).sum().backward()
    assert {pointer for pointer, _ in seen} == {model.module.weight.data_ptr()}
    assert len({thread for _, thread in seen}) == 2
    assert threading.current_thread() not in {thread for _, thread in seen}
    assert torch.equal(model.module.weight.grad, torch.full((3,), 3.0))
    seen.clear()
    sw.DataParallel(Looks(), ["cpu", "cpu"])(torch.ones(2, 3))
    assert [thread for _, thread in seen] == [threading.current_thread()] * 2


def test_each_replica_gets_its_part_of_the_batch_on_its_own_device():
    seen = []

    class Looks(nn.Linear):
        def forward(self, x, *, scale):
            seen.append((self.weight.device.type, x.device.type, scale.device.type))
            return torch.zeros(x.shape)  # a meta tensor would have no values to give back

    sw.DataParallel(Looks(2, 2), ["cpu", "meta"])(torch.ones(4, 2), scale=torch.tensor(2.0))
    assert sorted(seen) == [("cpu",) * 3, ("meta",) * 3]


# -- what is recorded


class Normed(nn.Module):
    """A trained and a frozen parameter, buffers of two dtypes, two outputs of which one takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.linear.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x))
        return y, y.detach().sum()


def recorded(model, *inputs):
    with sw.record_collectives(model) as events:
        model(*inputs)[0].square().sum().backward()
    assert {event.axis for event in events} <= {"devices"}
    return [(event.kind, event.unit, event.dtype, event.sent_bytes) for event in events]


@pytest.mark.parametrize("devices", [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]])
def test_the_exchanges_of_a_step_are_recorded_with_their_bytes(devices):
    model, others = sw.DataParallel(Normed(), devices), len(devices) - 1
    expected = [
        ("scatter", "inputs", "fp32", others * 2 * 6 * 4),  # two samples of six numbers for each replica
        ("broadcast", "parameters", "fp32", others * (18 + 3) * 4),
        ("broadcast", "buffers", "fp32", others * (3 + 3) * 4),
        ("broadcast", "buffers", "int64", others * 8),
        ("gather", "outputs", "fp32", others * (2 * 3 + 1) * 4),
        ("scatter", "gradients of outputs", "fp32", others * 2 * 3 * 4),
        ("reduce", "gradients", "fp32", others * 18 * 4),
    ]
    x = torch.randn(2 * len(devices), 6, generator=torch.Generator().manual_seed(0))
    assert recorded(model, x) == expected
    ours = recorded(model, x.requires_grad_())
    sent_back = [event for event in ours if event[:2] == ("gather", "gradients of inputs")]
    assert sent_back == [("gather", "gradients of inputs", "fp32", 2 * 6 * 4)] * others
    assert sorted(ours) == sorted(expected + sent_back)


def test_a_single_replica_exchanges_nothing():
    assert recorded(sw.DataParallel(Normed(), ["cpu"]), torch.randn(4, 6)) == []
    assert recorded(sw.DataParallel(Normed().eval(), ["cpu"] * 2), torch.randn(1, 6)) == []  # one sample, one part


# -- what goes in and comes out


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Output:
    logits: Tensor
    states: tuple[Tensor, ...]
    note: str = "same"


class Shaped(nn.Module):
    def forward(self, inputs, *, scale, pairs=None):
        (x,), named = inputs
        y = x * scale
        assert x.shape[0] == named["mask"].shape[0]
        out = {"y": y, "pair": Pair(y, y + 1), "none": None, "output": Output(y, (y, 2 * y))}
        if pairs is not None:
            out["pairs"] = [pair.x + pair.y for pair in pairs]
        out["loss"] = y.sum()
        out["count"] = int(x.shape[0])
        out["names"] = {"y", "pair"}
        return out


def test_nested_containers_and_keywords_are_scattered_and_gathered():
    x = torch.arange(10.0).view(5, 2)
    model = sw.DataParallel(Shaped(), ["cpu", "cpu"])
    got = model(([x], {"mask": torch.ones(5)}), scale=torch.tensor(2.0), pairs=[Pair(x, x), Pair(x, -x)])
    assert torch.equal(got["y"], 2 * x)
    assert isinstance(got["pair"], Pair)
    assert torch.equal(got["pair"].y, 2 * x + 1)
    assert got["none"] is None
    assert isinstance(got["output"], Output)
    assert torch.equal(got["output"].states[1], 4 * x)
    assert got["output"].note == "same"
    assert torch.equal(got["pairs"][0], 2 * x)
    assert got["count"] == [3, 2]
    assert got["names"] == {"y", "pair"}
    assert torch.equal(got["loss"], torch.stack([2 * x[:3].sum(), 2 * x[3:].sum()]))


def test_batches_are_cut_as_torch_cuts_them_and_along_any_dimension():
    x = torch.arange(12.0).view(2, 6)
    assert [part[0][0].shape[1] for part in scatter(((x,), {}), 4, 1)] == [2, 2, 2]
    model = sw.DataParallel(nn.Identity(), ["cpu"] * 4, dim=1)
    assert torch.equal(model(x), x)
    assert len(scatter(((), {"flag": True}), 4, 0)) == 1
    with pytest.raises(StateError, match=r"tensors \[2, 6\], \[1\] cannot be cut into as many parts along dim 0"):
        scatter(((x, torch.ones(1)), {}), 2, 0)
    with pytest.raises(StateError, match="the replicas gave Tensor, tuple"):
        gather([x, (x,)], CPU, 0)
    with pytest.raises(StateError, match="containers of different lengths"):
        gather([[x], [x, x]], CPU, 0)
    numbers = [torch.tensor(1.0), torch.tensor(4.0)]
    assert gather(numbers, CPU, 0, samples=[2, 1]) == 2.0
    assert gather([torch.tensor(3), torch.tensor(1)], CPU, 0, samples=[2, 1]).tolist() == [3, 1]
    with pytest.raises(StateError, match="do not say how many samples each replica had"):
        gather(numbers, CPU, 0, samples=[])


@DEVICES
def test_an_error_in_a_replica_is_raised_again_with_its_index(devices):
    class Fails(nn.Module):
        def forward(self, x):
            if x[0] >= 1:
                raise KeyError(f"chunk {int(x[0])}")
            return x

    model = sw.DataParallel(Fails(), devices)
    x = torch.arange(float(len(devices)))
    if len(devices) == 1:
        assert torch.equal(model(x), x)
        return
    with pytest.raises(KeyError, match="chunk 1") as caught:
        model(x)
    assert caught.value.__notes__ == [f"in replica 1 of {len(devices)}, on {devices[1]}"]


@DEVICES
def test_grad_mode_and_autocast_hold_in_every_replica(devices):
    model = sw.DataParallel(nn.Linear(6, 6), devices)
    with torch.no_grad():
        assert not model(batch()).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batch()).dtype is torch.bfloat16
    assert model(batch()).dtype is torch.float32


def test_what_cannot_be_is_refused():
    with pytest.raises(PlanError, match="expected at least one"):
        sw.DataParallel(nn.Linear(2, 2), [])
    with pytest.raises(PlanError, match=r"'weight' is on meta, the first device is cpu"):
        sw.DataParallel(nn.Linear(2, 2, device="meta"), ["cpu"])
    with pytest.raises(PlanError, match="runs replicas in one process, but the world has 2"):
        ParallelPlan(strategy="data_parallel").mesh(2)
    for field, value in (("auto_wrap_policy", sw.wrap_by_class({nn.Linear})), ("merge_units", 77)):
        with pytest.raises(PlanError, match=f"(?s){field}=.* has no meaning for strategy 'data_parallel'"):
            sw.parallelize(nn.Linear(2, 2), ParallelPlan(strategy="data_parallel", **{field: value}))
    with pytest.raises(PlanError, match="activation_checkpointing, offload_activations and compile do not act on them"):
        sw.parallelize(nn.Linear(2, 2), ParallelPlan(strategy="data_parallel", activation_checkpointing="full"))
