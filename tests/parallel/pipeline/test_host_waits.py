"""The host reads what it acts on from host memory: on meta, which stands for a device, reading would raise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.comm.record import RecordComm
from shardwise.parallel.context.apply import _check_values
from shardwise.parallel.pipeline.pipelined import Pipelined
from shardwise.parallel.pipeline.stage import StepCheck
from shardwise.spec.errors import StateError
from shardwise.weights.state.optimizer import as_numbers


class OnDevice(RecordComm):
    """One rank whose tensors are on a device, with a Comm for the host."""

    def __init__(self) -> None:
        super().__init__("pp", rank=0, size=1, device="meta")
        self.for_host = RecordComm("pp", rank=0, size=1)

    @property
    def host(self) -> Comm:
        return self.for_host


def test_ranks_of_a_pipeline_agree_without_the_device():
    comm: Any = OnDevice()
    with comm.record() as on_device, comm.for_host.record() as on_host:
        assert StepCheck(comm, "step", "shown", b"trained").wait() > 0
        rank: Any = SimpleNamespace(_comm=comm)
        engine: Any = SimpleNamespace(
            comms=SimpleNamespace(control=RecordComm("dp", rank=0, size=1)), num_ranks_with_data=1
        )
        engine.comms.control.device = torch.device("meta")
        mean = Pipelined.mean_loss(rank, engine, [torch.zeros((), dtype=torch.bfloat16, device="meta")])
    assert (mean.dtype, mean.device.type) == (torch.bfloat16, "meta")
    assert [event.kind for event in on_host] == ["all_gather", "all_reduce"]
    assert [(event.kind, event.unit) for event in on_device] == [("all_reduce", "loss")]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reads: list[str] = []
    for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
        real = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, _real: Any = real, _name: str = name) -> Any:
            reads.append(_name)
            return _real(self, *args)

        monkeypatch.setattr(Tensor, name, read)
    return reads


def test_a_divided_batch_is_checked_by_one_read(monkeypatch):
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    ones, positions = torch.ones(2, 4, dtype=torch.int64), torch.arange(4).expand(2, 4)
    padded = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    labels = torch.tensor([[1, 2, 3, -100], [1, 2, 3, 4]])
    reads = count_reads(monkeypatch)
    for mask in (ones, padded):
        _check_values("m", {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}, labels)
    assert reads == ["tolist"] * 2
    _check_values("m", {"input_ids": tokens}, labels)
    assert len(reads) == 2
    monkeypatch.undo()
    for given, told in (
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids that do not go up by one"),
        ({"attention_mask": padded.flip(1)}, "attention_mask hides"),
        ({"attention_mask": ones[None]}, "attention_mask hides"),
        ({"attention_mask": padded.flip(0)}, "attention_mask hides"),
    ):
        with pytest.raises(StateError, match=told):
            _check_values("m", {"input_ids": tokens} | given, labels)


def test_the_steps_of_a_fused_optimizer_are_read_together(monkeypatch):
    reads = count_reads(monkeypatch)
    states = {str(i): {"step": torch.tensor(float(i)), "kind": i, "count": torch.tensor(2**60 + i)} for i in range(9)}
    assert as_numbers(states) == {str(i): {"step": float(i), "kind": i, "count": 2**60 + i} for i in range(9)}
    assert reads == ["tolist"] * 2
