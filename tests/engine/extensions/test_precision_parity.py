"""Mixed precision: every strategy against one process that casts at the same points."""

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.engine.extensions.precision import resolve
from shardwise.testing import checks, forget_notices, probe, run_on_ranks
from tests.common import casts, models
from tests.common.casts import DTYPES, PRESETS
from tests.common.oracle import descend, some_presets
from tests.common.ranks import on_ranks

POLICIES = (("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp16", "fp16"), ("fp32", "bf16"))
#: Of a sum in fp16: half of the division before it, the rest after it, each about the square root of the world.
DIVISORS = {1: (1, 1), 2: (2, 1), 3: (2, 1.5)}


def train_every_preset(param_dtype: str, reduce_dtype: str) -> dict[str, casts.Numbers]:
    policy = sw.PrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    plans = {preset: sw.ParallelPlan(strategy=preset, mp_policy=policy) for preset in some_presets()}
    how = {"max_norm": 0.3, "is_flat": reduce_dtype == "bf16"}
    with checks():
        return {preset: casts.train(lambda: models.build("tied"), plan, **how) for preset, plan in plans.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), POLICIES)
def test_every_preset_equals_one_process_with_the_same_casts(world: int, param_dtype: str, reduce_dtype: str) -> None:
    """fp32 masters, a copy in ``param_dtype`` that computes, sums in rank order in ``reduce_dtype``."""
    before, after = DIVISORS[world] if reduce_dtype == "fp16" else (1, world)
    expected = casts.one_process(
        models.build("tied"),
        models.build("tied").to(DTYPES[param_dtype]),
        world,
        send=lambda _name, grad: grad.to(DTYPES[reduce_dtype]) / before,
        mean=lambda grads: sum(grads[1:], grads[0]) / after,
        max_norm=0.3,
    )
    for rank, by_preset in enumerate(run_on_ranks(train_every_preset, world, param_dtype, reduce_dtype)):
        for preset, got in by_preset.items():
            got.check(expected[rank], preset)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("offset", torch.ones(6))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> dict[str, Tensor]:
        self.seen = [x.dtype, self.inner.weight.dtype, self.norm.weight.dtype, self.offset.dtype]
        out = self.norm(self.inner(x)) + self.offset
        return {"out": out if shift is None else out + shift, "picked": out.argmax(dim=1)}


def look(policy: sw.PrecisionPolicy) -> tuple[list[torch.dtype], dict[str, torch.dtype], dict[str, torch.dtype]]:
    torch.manual_seed(0)
    model = sw.parallelize(Normed(), sw.ParallelPlan(auto_wrap_policy="none", mp_policy=policy))
    output = model(torch.randn(4, 6), shift=torch.zeros(6))
    output["out"].float().sum().backward()
    grads = {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}
    return model.seen, {key: value.dtype for key, value in output.items()}, grads


def test_inputs_outputs_and_buffers_are_cast_and_batch_norm_is_not() -> None:
    policy = sw.PrecisionPolicy(output_dtype="fp32", buffer_dtype="bf16")
    ((seen, outputs, grads),) = run_on_ranks(look, 1, policy)
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    assert outputs == {"out": torch.float32, "picked": torch.int64}
    assert set(grads.values()) == {torch.float32}


def test_without_casting_inputs_they_arrive_as_they_are() -> None:
    policy = sw.PrecisionPolicy(param_dtype=None, reduce_dtype="bf16", cast_forward_inputs=False)
    ((seen, outputs, _),) = run_on_ranks(look, 1, policy)
    assert seen[0] is torch.float32
    assert outputs["out"] is torch.float32


@on_ranks(1)
def test_a_16_bit_model_may_be_given_32_bit_masters() -> None:
    torch.manual_seed(0)
    model = models.build("tied").bfloat16()
    policy = sw.PrecisionPolicy(master_dtype="fp32")
    sw.parallelize(model, sw.ParallelPlan(mp_policy=policy))
    before = {parameter.dtype for parameter in model.parameters()}
    model(*models.batch(0, 0, 0)).backward()
    dtypes = {group.dtypes for unit in sw.summary(model).units for group in unit.groups}
    assert (before, {value.dtype for value in sw.full_state_dict(model).values()}, dtypes) == (
        {torch.float32},
        {torch.float32},
        {"fp32>bf16>fp32"},
    )


@pytest.mark.parametrize("preset", PRESETS)
@on_ranks(2)
def test_masters_replicas_and_gradients_take_the_bytes_of_the_formula(preset: str) -> None:
    model = models.build("tied")
    sw.parallelize(model, sw.ParallelPlan(strategy=preset, mp_policy=sw.PrecisionPolicy()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    descend(optimizer, (model(*models.batch(step, 0, distributed.get_rank())) for step in range(3)))
    seen, categories = probe(model), ("parameters", "gradients", "gathered")
    measured, predicted = seen.held_bytes(), seen.predicted_bytes()
    measured, predicted = sum(measured[each] for each in categories), sum(predicted[each] for each in categories)
    assert measured == predicted


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "master_dtype"])
def test_a_dtype_that_is_none_is_refused_by_name(field: str) -> None:
    with pytest.raises(sw.PlanError, match=f"{field}='int8'.*\n.*fp64, fp32, bf16, fp16"):
        sw.PrecisionPolicy(**{field: "int8"})


def test_auto_means_bf16_where_the_device_supports_it_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    forget_notices()
    assert sw.bf16_supported("cpu")
    for _ in range(2):
        assert resolve(sw.PrecisionPolicy(param_dtype="auto"), torch.device("cpu")).param_dtype == "bf16"
    assert capfd.readouterr().err == "shardwise: param_dtype 'auto' is bf16 here (the CPU)\n"


@pytest.mark.parametrize(
    ("computes", "version", "chosen"),
    [(True, (2, 27, 5), "bf16"), (True, (2, 9, 9), "fp32"), (False, (2, 27, 5), "fp32")],
)
def test_on_a_gpu_auto_looks_at_the_device_and_at_nccl(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    computes: bool,
    version: tuple[int, ...],
    chosen: str,
) -> None:
    forget_notices()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: computes)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA Example")
    assert resolve(sw.PrecisionPolicy(param_dtype="auto"), torch.device("cuda")).param_dtype == chosen
    shown = ".".join(map(str, version[:2]))
    assert capfd.readouterr().err == f"shardwise: param_dtype 'auto' is {chosen} here (NVIDIA Example, NCCL {shown})\n"
