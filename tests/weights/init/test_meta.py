"""Models that are built on ``meta`` get, unit by unit, the values that plain construction gives."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import weight_norm

import shardwise as sw
from shardwise.testing import StorageCount, run_on_ranks, same_bits
from tests.common import models
from tests.common.families import FAMILIES, PRELOAD_ALL
from tests.common.oracle import presets
from tests.common.ranks import on_ranks

SEED = 11


def all_values(model: nn.Module) -> dict[str, Tensor]:
    """Saved or not."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def built_plainly(build) -> tuple[dict[str, Tensor], Tensor]:
    """Every value, and what the generator gives next."""
    torch.manual_seed(SEED)
    values = all_values(build())
    return values, torch.rand(3)


def whole(model: nn.Module) -> dict[str, Tensor]:
    with sw.full_parameters(model):
        return {name: value.detach().clone() for name, value in all_values(model).items()}


class Mixed(nn.Module):
    """Orthogonal and truncated draws, a generator of its own, a seed set on the way, a tie, constants, bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(5))
        self.square = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.square)
        self.cut = nn.Parameter(torch.randn(6) * 2 + self.square[0].detach())
        nn.init.trunc_normal_(self.blocks[1][0].weight, std=0.02)
        torch.manual_seed(5)
        self.own = nn.Parameter(torch.rand(5, generator=torch.Generator().manual_seed(4)))
        self.blocks[3][0].weight = self.blocks[2][0].weight
        self.half = nn.Linear(6, 6).to(torch.bfloat16)
        self.register_buffer("positions", torch.arange(6).float() * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(6) / 6), persistent=False)
        self.old = nn.Parameter(nn.init.xavier_uniform_(torch.Tensor(4, 3)))
        self.older = nn.Parameter(torch.FloatTensor(3).fill_(2.0))
        self.decay = nn.Parameter(torch.empty(3))  # as RWKV sets it
        self.decay.data = torch.tensor([1.0, 2.0, 3.0], device=self.decay.device) * 2
        torch.set_default_dtype(torch.bfloat16)  # as transformers builds a model of that dtype
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)) / 3, persistent=False)
        self.small = nn.Linear(6, 6)
        torch.set_default_dtype(torch.float32)
        self.memory = nn.LSTM(6, 4)  # refers to its parameters weakly


class Reads(nn.Module):
    """A construction that reads values: its own, and those that initialisers reject or choose places by."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
        self.weight = nn.Parameter(torch.rand(30) * self.rates[3])
        self.pair = nn.Parameter(
            torch.tensor([self.weight[1].detach(), self.weight[2].detach()]) + max(self.weight.tolist())
        )
        self.name = f"{self.weight[0]:.3f}"
        self.count = int((self.weight > 0.1).sum())
        self.register_buffer("large", self.weight.detach()[self.weight > 0.1] * torch.rand(self.count))
        with torch.no_grad():
            self.weight[self.weight < 0.1] = torch.rand(30 - self.count)
        self.rejected = nn.Linear(40, 30)
        nn.init.trunc_normal_(self.rejected.weight, std=1.0, a=-1.0, b=1.0)
        nn.init.trunc_normal_(self.rejected.bias, std=1.0, a=1.0, b=2.0)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(9, 4), sparsity=0.3))
        self.kernel = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))
        self.coins = nn.Parameter(torch.bernoulli(torch.rand(50)))
        self.signs = nn.Parameter(torch.empty(50).bernoulli_(0.3))
        self.drawn = nn.Parameter(torch.multinomial(self.coins.detach() + 0.1, 5).float())
        columns = torch.rand(3, 4)
        columns[[0, 2]] *= 2
        self.columns = nn.Parameter(columns[:, [-1, 0]][[True, False, True]])
        self.given = nn.Linear(2, 2)
        self.given.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def build_named(name: str) -> nn.Module:
    if name in {"mixed", "reads"}:
        return {"mixed": Mixed, "reads": Reads}[name]()
    if name == "gpt":
        return sw.models.gpt("gpt-nano")
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    if name == "llama":
        config = transformers.LlamaConfig(**shape, num_key_value_heads=1, vocab_size=37)
        return transformers.LlamaForCausalLM(config)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape, image_size=16, patch_size=8))


def wrap_of(name: str) -> object:
    return sw.wrap_by_name("blocks.*") if name == "mixed" else "auto"


def differing(name: str, preset: str) -> list[str]:
    expected, after = built_plainly(lambda: build_named(name))
    torch.manual_seed(SEED)
    model = sw.deferred_init(lambda: build_named(name))
    assert name == "reads" or all(parameter.is_meta for parameter in model.parameters())
    handles = {id(parameter) for parameter in model.parameters()}
    model = sw.parallelize(model, sw.ParallelPlan(strategy=preset, auto_wrap_policy=wrap_of(name)))
    assert {id(parameter) for parameter in model.parameters()} == handles
    assert torch.equal(torch.rand(3), after)
    found = whole(model)
    assert list(found) == list(expected)
    return [key for key, value in expected.items() if not torch.equal(value, found[key])]


def differing_everywhere(names: tuple[str, ...], presets: tuple[str, ...]) -> dict[tuple[str, str], list[str]]:
    return {(name, preset): differing(name, preset) for name in names for preset in presets}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_are_those_of_plain_construction_on_any_number_of_ranks(world):
    names = ("gpt", "mixed", "reads") if world != 2 else ("gpt", "mixed", "llama", "vit")
    chosen = presets() if world == 2 else ("zero3",)
    for results in run_on_ranks(differing_everywhere, world, names, chosen, timeout_s=150):
        assert all(differing == [] for differing in results.values()), results
        assert len(results) == len(names) * len(chosen)


@pytest.mark.long
@pytest.mark.preload(*PRELOAD_ALL.args)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "ignored" not in family.options])
@on_ranks(1, 2, 3, timeout_s=150)
def test_every_family_has_the_values_of_plain_construction(name: str) -> None:
    """Of a family of ``tests.common.families``, whose ``build`` sets the seed itself."""
    warnings.simplefilter("ignore")
    plain = FAMILIES[name].build()
    expected, after = all_values(plain), torch.rand(3)
    model = sw.deferred_init(FAMILIES[name].build)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = sw.parallelize(model, sw.ParallelPlan(**FAMILIES[name].options))
    found = [] if torch.equal(torch.rand(3), after) else ["what the generator gives next"]
    found += [] if model.training == plain.training else ["training"]
    got = whole(model)
    assert list(got) == list(expected)
    assert found + [key for key, value in expected.items() if not same_bits(value, got[key])] == []


def train(is_deferred: bool) -> list[float]:
    torch.manual_seed(7)
    model = sw.parallelize(sw.deferred_init(models._gpt) if is_deferred else models.build("gpt"), sw.ParallelPlan())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = model(*models.batch(step, 0, distributed.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_a_deferred_model_trains_as_a_real_one():
    assert train(is_deferred=True) == train(is_deferred=False)


class WithAttributes(nn.Module):
    """Keeps tensors that are neither parameters nor buffers; torch's older weight norm keeps one with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(nn.Linear(4, 4))
        self.register_buffer("scale", torch.rand(4))
        self.mask = torch.ones(4, 4).tril()
        self.others = {"noise": [torch.randn(4)], "weight": self.inner.weight_v}
        self.first_mean = self.inner.weight_v.mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.mask + self.others["noise"][0] * self.scale - self.first_mean


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
@on_ranks(2)
def test_tensors_that_are_plain_attributes_have_the_values_of_plain_construction():
    torch.manual_seed(SEED)
    plain = WithAttributes()
    x = torch.ones(3, 4)
    for init in (None, plain.state_dict()):
        torch.manual_seed(SEED)
        model = sw.parallelize(sw.deferred_init(WithAttributes), sw.ParallelPlan(strategy="zero3"), init=init)
        assert model.others["weight"] is model.inner.weight_v
        assert torch.equal(model(x), plain(x))
        model(x).sum().backward()


# -- memory

LAYERS, HIDDEN = 8, 64


def build_deep() -> nn.Module:
    return sw.models.gpt("gpt-tiny", num_layers=LAYERS, hidden=HIDDEN, num_heads=2, vocab_size=64, seq_len=16)


SAVED = io.BytesIO()
torch.save(torch.arange(6.0).view(2, 3), SAVED)
#: Values that a constructor takes from a tensor which has them already: torch copies or reads a storage.
GIVEN: dict[str, Callable[[], Tensor]] = {
    "a norm's counter": lambda: copy.deepcopy(nn.BatchNorm1d(2)).num_batches_tracked,
    "deepcopy": lambda: copy.deepcopy(torch.tensor([1.0, 2.0])),
    "deepcopy of a view": lambda: copy.deepcopy(torch.arange(6.0).to(torch.int32).view(2, 3)[:, 1]),
    "copy": lambda: copy.copy(torch.tensor([True, False])),
    "load": lambda: torch.load(io.BytesIO(SAVED.getvalue())),
    "pickle": lambda: pickle.loads(pickle.dumps(torch.tensor([3.0, 4.0]))),
    "shared": lambda: torch.tensor([5.0, 6.0]).share_memory_(),
    "none": torch.Tensor,
}


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for name, make in GIVEN.items():
            self.register_buffer(name, make())


@on_ranks(2)
def test_buffers_that_are_copied_or_loaded_have_the_values_of_plain_construction():
    """A copy had those that its memory happened to hold; torch.load raised torch's error."""
    plain = built_plainly(Given)[0]
    torch.manual_seed(SEED)
    found = all_values(sw.parallelize(sw.deferred_init(Given), "ddp"))
    assert all(same_bits(found[name], value) for name, value in plain.items())


class Loads(nn.Module):
    """Loads weights into a body that it builds on meta, as ``from_pretrained`` does, and draws those of a new head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            self.is_there = self.body[0].weight.is_meta
        saved = {name: torch.ones(value.shape, dtype=value.dtype) for name, value in self.body.state_dict().items()}
        self.body.load_state_dict(saved, assign=True)
        self.head = nn.Linear(3, 2)


@on_ranks(2)
def test_a_head_beside_loaded_weights_is_drawn_as_in_plain_construction():
    """The recording drew for the body too, which a plain run does not: the head began with other values."""
    plain, after = built_plainly(Loads)
    torch.manual_seed(SEED)
    model = sw.parallelize(sw.deferred_init(Loads), "zero3")
    assert model.is_there
    assert torch.equal(torch.rand(3), after)
    found = whole(model)
    assert all(same_bits(found[name], value) for name, value in plain.items())


@on_ranks(2)
def test_no_rank_holds_more_than_its_shards_and_a_unit_or_two() -> None:
    """The most bytes held while the model is made, and the bytes of the whole model."""
    model = sw.deferred_init(build_deep)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with StorageCount("cpu") as count:
        sw.parallelize(model, sw.ParallelPlan())
    peak = count.peak_bytes
    count.forget()
    block = size / LAYERS
    states = 400 * 5056 / 2  # of the generator, one for each random operation
    assert peak < size / 2 + 2.5 * block + states
    assert peak < 0.95 * size


# -- other sources


@on_ranks(1, 2)
def test_reset_parameters_draws_in_the_order_of_modules() -> None:
    """Our GPT draws in ``reset_parameters``, in the order in which its modules are registered.

    Where the head is tied to the embedding, the embedding alone draws.
    """
    differing = []
    for tied in (False, True):
        expected, after = built_plainly(lambda tied=tied: sw.models.gpt("gpt-nano", tied=tied))
        torch.manual_seed(SEED)
        model = sw.parallelize(sw.models.gpt("gpt-nano", tied=tied, device="meta"))
        assert torch.equal(torch.rand(3), after)
        found = whole(model)
        differing += [key for key, value in expected.items() if not torch.equal(value, found[key])]
    assert differing == []


def fill_with_ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


@on_ranks(2)
def test_a_function_may_initialise() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    sw.parallelize(model, init=fill_with_ones)
    assert {value for tensor in whole(model).values() for value in tensor.view(-1).tolist()} == {1.0}


def replace_all(module: nn.Linear) -> None:
    """Every way to give values but that of writing them in place."""
    module.weight = nn.Parameter(torch.arange(9.0).view(3, 3))
    module.bias.data = torch.tensor([1.0, 2.0, 3.0])
    if module.weight.max() > 8.5:
        raise ValueError(module.weight.max().item())


@on_ranks(2)
def test_a_function_may_replace_what_it_initialises() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2)))
    parameters = list(model.parameters())
    sw.parallelize(model, init=replace_all)
    assert all(own is before for own, before in zip(model.parameters(), parameters, strict=True))
    found = [value.view(-1).tolist() for value in whole(model).values()]
    assert found == [list(map(float, range(9))), [1.0, 2.0, 3.0]] * 2


class Lazy(Mapping):
    """A state dict whose tensors are made when they are asked for, and counted while they live."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self.requested: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.requested.append(name)
        return self.state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


class Rotary(nn.Module):
    """A saved statistic, and frequencies that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.register_buffer("frequencies", 1.0 / torch.arange(1, 5), persistent=False)


@on_ranks(2)
def test_a_state_dict_is_streamed_and_what_is_not_saved_comes_from_the_construction() -> None:
    torch.manual_seed(SEED)
    plain = Rotary()
    state = Lazy(plain.state_dict()) if distributed.get_rank() == 0 else {}
    torch.manual_seed(SEED + 1)
    model = sw.parallelize(sw.deferred_init(Rotary), init=state)
    found = whole(model)
    if isinstance(state, Lazy):
        assert set(state.requested) == set(state.state)
    assert all(torch.equal(value, found[name]) for name, value in all_values(plain).items())


# -- seeds


def differently_seeded(mode: str) -> object:
    torch.manual_seed(SEED + distributed.get_rank())
    model = sw.deferred_init(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with pytest.warns(UserWarning, match="rank 0's are taken by all") if is_told(mode) else contextlib.nullcontext():
        sw.parallelize(model, sw.ParallelPlan(sync=mode))
    return {name: value.tolist() for name, value in whole(model).items()}


def is_told(mode: str) -> bool:
    return mode == "warn" and distributed.get_rank() == 0


def test_where_seeds_differ_rank_0s_values_are_taken():
    torch.manual_seed(SEED)
    expected = {n: p.tolist() for n, p in nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).named_parameters()}
    assert run_on_ranks(differently_seeded, 2, "warn") == [expected, expected]


@on_ranks(2)
def test_sync_error_refuses_different_seeds() -> None:
    with pytest.raises(sw.StateError) as error:
        differently_seeded("error")
    text = str(error.value)
    assert "would draw different weights" in text


@on_ranks(2)
def test_ranks_that_construct_otherwise_are_told() -> None:
    std = 1.0 + distributed.get_rank()

    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        nn.init.normal_(layer.weight, std=std)
        return layer

    model = sw.deferred_init(build)
    with pytest.raises(sw.RankDisagreement) as error:
        sw.parallelize(model)
    text = str(error.value)
    assert "different constructions" in text


# -- what cannot be done


NAMES = {"torch": torch, "array": np.ones(3, np.float32)}


class Foreign(nn.Module):
    """Reads a tensor by way of NumPy, or as ``use`` says."""

    def __init__(self, use: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.found = use(self.weight.detach())


@pytest.mark.parametrize("use", [Tensor.numpy, np.asarray])
def test_a_tensor_without_values_is_not_handed_to_numpy(use):
    with pytest.raises(sw.StateError, match="handed to NumPy") as error:
        sw.deferred_init(lambda: Foreign(use))
    for advice in ("tensor.tolist()", "tensor.copy_(torch.from_numpy(array))"):
        assert advice in str(error.value)
        sw.deferred_init(lambda advice=advice: Foreign(lambda tensor: eval(advice, NAMES | {"tensor": tensor})))


class NoInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("frequencies", 1.0 / torch.arange(1, 4), persistent=False)


class Forgets(nn.Module):
    """As rotary embeddings do: the frequencies are computed by the constructor alone (transformers#45902, #34234)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("frequencies", 1.0 / torch.arange(1, 4), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def refusal(name: str) -> str:
    with torch.device("meta"):
        model = nn.Sequential({"NoInit": NoInit, "Forgets": Forgets}[name]())
    with pytest.raises(sw.StateError) as error:
        sw.parallelize(model)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "NoInit",
            "'0.frequencies' is on the meta device and would stay without values: NoInit has no reset_parameters()",
        ),
        ("Forgets", "'0.frequencies' is on the meta device and would stay without values: Forgets.reset_parameters()"),
    ],
)
def test_a_parameter_or_buffer_that_stays_empty_is_named(name, said):
    """transformers#45902, #34234: meta initialisation leaves garbage in buffers."""
    (text,) = run_on_ranks(refusal, 1, name)
    assert said in text


class Masked(nn.Module):
    """A mask that the constructor makes; ``reset_parameters`` sets its first rows to ``value``, if any."""

    def __init__(self, dtype: torch.dtype, num_rows: int, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.num_rows, self.value = num_rows, value
        self.register_buffer("mask", torch.ones(4, 4).tril().to(dtype), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.mask.data[: self.num_rows] = self.value  # by way of data, which tells no version counter


INTEGERS = (torch.bool, torch.uint8, torch.int64)


@on_ranks(1)
def test_whole_number_and_boolean_buffers_are_filled_or_named() -> None:
    """A causal mask made by the constructor must not become all false; zeros that were written are values."""
    sources = {
        "reset": None,
        "function": lambda module: module.reset_parameters(),
        "state": {"weight": torch.ones(4, 4)},
    }
    found = {}
    for dtype in (*INTEGERS, torch.float32):
        for num_rows in (0, 3, 4):
            for value in (0, 1) if dtype in INTEGERS else (0, float("nan")):
                for name, init in sources.items():
                    with torch.device("meta"):
                        model = Masked(dtype, num_rows, value)
                    case = f"{name} {dtype} {num_rows} {value}"
                    try:
                        sw.parallelize(model, init=init)
                    except sw.StateError as error:
                        found[case] = str(error)
                    else:
                        assert torch.equal(model.mask, torch.full((4, 4), value, dtype=dtype)) or value != value  # noqa: PLR0124
                        assert torch.equal(whole(model)["weight"], torch.ones(4, 4))
                        found[case] = "filled"
    assert len(found) == 4 * 3 * 2 * 3
    for case, what in found.items():
        if " 4 " in case:
            assert what == "filled", case
        else:
            assert "'mask' is on the meta device and would stay without values" in what, case


def test_init_for_a_model_that_has_values_is_refused():
    with pytest.raises(sw.StateError, match="it would do nothing"):
        sw.parallelize(nn.Linear(2, 2), init=fill_with_ones)


class Bare(nn.Module):
    """Parameters of its own and no ``reset_parameters``; beside it a module with a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("saved", torch.rand(6))
        self.noise = Noise()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.saved + self.noise.table


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.table, 3.0)


@on_ranks(2)
def test_a_complete_state_dict_suffices_for_modules_that_cannot_reset_their_parameters() -> None:
    torch.manual_seed(2)
    plain = nn.Sequential(Bare(), Bare(), nn.Linear(6, 2))
    with torch.device("meta"):
        model = nn.Sequential(Bare(), Bare(), nn.Linear(6, 2))
    state = plain.state_dict() if os.environ["RANK"] == "0" else {}
    model = sw.parallelize(model, sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_class({Bare})), init=state)
    found = whole(model)
    same = [torch.equal(found[name], value) for name, value in all_values(plain).items()]
    assert len(same) == 8
    assert all(same)


def build_bare() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(Bare(), Bare(), nn.Linear(6, 2))
    model[1].weight = model[0].weight
    return model


@on_ranks(2)
def test_a_model_on_meta_may_be_loaded_after_it_was_parallelized(tmp_path):
    path = str(tmp_path / "checkpoint")
    """``sw.parallelize`` of a model on meta, and then the state dict, or a checkpoint."""
    plain, rank, refused = build_bare(), int(os.environ["RANK"]), []
    x = torch.ones(3, 6)
    saved = sw.parallelize(build_bare())
    sw.save(path, saved)
    for way in ("state", "parts", "checkpoint"):
        with torch.device("meta"):
            model = build_bare()
        model = sw.parallelize(model, auto_wrap_policy=sw.wrap_by_class({Bare}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = plain.state_dict() if rank == 0 else {}
        if way == "parts":
            first = {name: value for name, value in state.items() if name.startswith("0.")}
            sw.load_full_state_dict(model, first, strict=False)
        for call in (
            lambda model=model: model(x),
            lambda model=model: sw.full_state_dict(model),
            lambda model=model: sw.save(f"{path}-2", model),
            lambda model=model: sw.full_parameters(model).__enter__(),
        ):
            with pytest.raises(sw.StateError) as error:
                call()
            refused.append(str(error.value))
        if way == "checkpoint":
            sw.load(path, model)
        else:
            sw.load_full_state_dict(model, state, strict=way == "state")
        other = build_bare()
        step = torch.optim.SGD(other.parameters(), lr=0.1)
        for trained, stepping in ((model, optimizer), (other, step)):
            trained(x).square().mean().backward()
            stepping.step()
        found, expected = whole(model), all_values(other)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), way
    assert len(refused) == 12
    calls = ("a forward", "sw.full_state_dict()", "sw.save()", "sw.full_parameters()")
    assert all(text.startswith(f"{calls[index % 4]}: ") for index, text in enumerate(refused))
    assert "5 tensors of the model" in refused[0]
    assert "since Bare has no reset_parameters() ('0.weight')" in refused[0]
    assert "3 tensors of the model" in refused[4]
    assert "'1.saved' among them" in refused[4]
