"""Optimizers, random state, text for terminals, MFU, requests to stop."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import plain
from shardwise.cost.hardware import gpus
from shardwise.launch.stop_request import INTERRUPTED, STOPPED, StopRequest, exit_code
from shardwise.spec.errors import CheckpointError, ConfigError, StateError
from shardwise.spec.text import printable, size
from shardwise.train.checkpoints import random_state
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import OptimizerSection, read_config
from shardwise.train.model.build import TokenBatch, build_model, build_optimizer, objective_of, parameter_groups, set_lr
from shardwise.train.predicted.step import peak_flops
from shardwise.train.steps.update import needs_host

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_weight_decay_acts_on_weights_and_not_on_biases_and_norms(name: str, kind: type) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(
        OptimizerSection(name=name, lr=0.5, weight_decay=0.25), parameter_groups(OptimizerSection(), model)
    )
    assert type(optimizer) is kind
    decay, plain = optimizer.param_groups
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert [p.dim() for p in decay["params"]] == [2]
    assert [p.dim() for p in plain["params"]] == [1, 1, 1]
    set_lr(optimizer, OptimizerSection(name=name, lr=0.5), 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


def test_frozen_parameters_are_left_out_and_sgd_has_momentum() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(OptimizerSection(name="sgd", momentum=0.5), parameter_groups(OptimizerSection(), model))
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_the_host_reads_a_finding_that_its_kernels_would_get_too_late() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(4))], fused=True)
    assert needs_host(optimizer, torch.device("cuda"))
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(4, device="meta"))]
    assert not needs_host(optimizer, torch.device("meta"))


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))  # noqa: NPY002


def test_random_states_go_through_json_and_continue_where_they_were() -> None:
    random_state.seed_all(3)
    draw()
    state = json.loads(json.dumps(plain.pack(random_state.capture(CPU))))
    first = [draw() for _ in range(3)]
    random_state.restore(state, CPU)
    assert [draw() for _ in range(3)] == first


def numpy_state(**changes: object) -> dict[str, object]:
    names = ("name", "keys", "place", "has_gauss", "cached")
    held = dict(zip(names, random_state.capture(CPU)["numpy"], strict=True)) | changes
    return {"numpy": list(held.values())}


@pytest.mark.parametrize(
    "damage",
    [
        *({"torch": "!"}, {"torch": b"AAA"}, {"python": [3, bytes(8), None]}, {"numpy": []}),
        {"python": [*random_state.capture(CPU)["python"][:2], "x"]},
        *(numpy_state(place=10**9), numpy_state(place=-1), numpy_state(keys=bytes(4)), numpy_state(name="PCG64")),
    ],
)
def test_a_damaged_random_state_is_refused_and_no_generator_changed(damage: dict[str, object]) -> None:
    before = random_state.capture(CPU)
    random_state.seed_all(4)
    state = {**before, **damage}
    mine = random_state.capture(CPU)
    with pytest.raises(CheckpointError, match="random state is damaged"):
        random_state.restore(state, CPU)
    assert random_state.capture(CPU) == mine


def test_ranks_and_steps_have_seeds_of_their_own() -> None:
    seeds = {random_state.rank_seed(s, r, t) for s in range(5) for r in range(16) for t in range(0, 60, 10)}
    assert len(seeds) == 5 * 16 * 6


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb", "a\\nb"),
        ("a\rb", "a\\rb"),
        ("\u202egnp", "\\u202egnp"),
        ("\u200b", "\\u200b"),
    ],
)
def test_text_of_others_cannot_move_the_cursor(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_blocks_keep_their_lines_only() -> None:
    assert printable("a\n\x07b", is_block=True) == "a\n\\x07b"
    assert [size(n) for n in (999, 1000, 1_234_567)] == ["999 B", "1.0 kB", "1.2 MB"]


def test_unknown_devices_have_no_peak() -> None:
    assert peak_flops("NVIDIA H200", "fp32", uses_tf32=True) == 494.5e12
    assert peak_flops("NVIDIA H200", "fp32", uses_tf32=False) == 67e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16", uses_tf32=False) == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp16", uses_tf32=True) == 989e12
    assert peak_flops("Tesla V100-SXM2-32GB", "fp32", uses_tf32=True) == 15.7e12  # it has no such units
    assert peak_flops("NVIDIA H100 PCIe", "bf16", uses_tf32=True) == 756e12
    for name, dtype in (("NVIDIA H200 NVL", "bf16"), ("Some other device", "fp32")):
        assert peak_flops(name, dtype, uses_tf32=True) is None
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16", uses_tf32=True) is None
    assert peak_flops("NVIDIA H200", "fp64", uses_tf32=True) is None


def test_every_peak_has_its_source_and_is_dense() -> None:
    named = [gpu for gpu in gpus().values() if gpu.device_name]
    assert len({gpu.device_name for gpu in named}) == len(named) > 5
    for gpu in named:
        assert gpu.source, gpu
        halves = [gpu.peaks[dtype] for dtype in ("bf16", "fp16") if dtype in gpu.peaks]
        assert len(set(halves)) == 1, gpu
        if gpu.name == "L40S":  # its data sheet states 183 and 362, which is not twice as much
            assert (gpu.peaks["tf32"], halves[0]) == (183e12, 362e12)
        elif "tf32" in gpu.peaks:  # half as fast as 16 bit where a device has it; with sparsity it would be as fast
            assert gpu.peaks["tf32"] == pytest.approx(halves[0] / 2, rel=0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, STOPPED), (signal.SIGINT, INTERRUPTED)])
def test_signals_are_remembered_and_given_back(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.signal_number == 0
        os.kill(os.getpid(), number)
        assert exit_code(stop.signal_number) == code
    assert signal.getsignal(number) is before


LLAMA = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 16,'
    ' "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,'
    ' "max_position_embeddings": 32}'
)


def test_a_hugging_face_folder_is_built_offline_from_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    (tmp_path / "config.json").write_text(LLAMA)
    base = {"model": {"hf": str(tmp_path)}, "data": {"source": "random"}, "train": {"steps": 1}}
    resolved = resolve(read_config(None, base=base, title="test"), 1)
    random_state.seed_all(0)
    model = build_model(resolved, CPU)
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    loss = objective_of(resolved).loss(model, TokenBatch(tokens[:, :-1], tokens[:, 1:]))
    assert 4.0 < loss.item() < 7.0  # about ln 256


@pytest.mark.parametrize("has_metrics", [False, True])
def test_under_tp_no_rank_gathers_the_logits_of_a_hugging_face_model_unless_metrics_read_them(
    tmp_path: Path, *, has_metrics: bool
) -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    (tmp_path / "config.json").write_text(LLAMA)
    base = {"model": {"hf": str(tmp_path)}, "data": {"source": "random"}, "parallel": {"tp": 2}, "train": {"steps": 1}}
    metrics = {"right": lambda output, batch: sw.Mean(output.logits.sum(), batch.targets.numel())}
    spec = sw.TrainSpec(metrics=metrics) if has_metrics else sw.TrainSpec()
    resolved = resolve(read_config(None, base=base, title="test"), 2, spec=spec)
    objective, tokens = objective_of(resolved), torch.empty(1, 8, dtype=torch.int64, device="meta")
    run = sw.dry_run(
        lambda: build_model(resolved, torch.device("meta")),
        resolved.plan,
        world_size=2,
        batch=TokenBatch(tokens, tokens),
        forward=objective.forward,
        loss_fn=objective.scalar,
    )
    logits_bytes = 8 * 128 * 4  # of the ids of one rank; without them, three numbers for each position are gathered
    assert (run.traffic["all_gather on tp"][1] >= logits_bytes) == has_metrics


def test_an_output_that_is_no_loss_is_refused_with_the_field_to_give() -> None:
    spec = sw.TrainSpec(model=lambda: nn.Linear(3, 1), data=[torch.ones(3)] * 16)
    given = objective_of(resolve(read_config(None, base={}), 1, spec=spec))
    said = r"the model gave a tensor of shape \[8, 1\] .*\n  Give sw.TrainSpec\(loss=...\), or let the model return its"
    with pytest.raises(StateError, match=said):
        given.loss(nn.Linear(3, 1), torch.ones(8, 3))


def test_a_rank_without_anything_to_train_is_told_so() -> None:
    """Under parity and dry-run it was torch's error of an empty list."""
    with pytest.raises(ConfigError, match=r"nothing to train: no adapter lies in its stage.\n  Lower parallel.pp"):
        build_optimizer(OptimizerSection(), [])
