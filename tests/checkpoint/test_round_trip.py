"""What is saved is what is loaded: any dtype, any shape, from any number of ranks to any other."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint import plain
from shardwise.checkpoint.reader import describe_summary, open_checkpoint
from shardwise.checkpoint.writer import write
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.spec.errors import CheckpointError
from shardwise.spec.extent import Extent
from shardwise.spec.precision import ITEM_BYTES
from tests.checkpoint.threads import alone, cut, even, run_in_threads, sample, whole

DATA = {
    "scores": {3: 0.1, -1: (2,)},
    "strategy": "zero3",
    "lr": 1e-4,
    "betas": (0.9, 0.95),
    "worst": math.inf,
    "rng": b"\x00\xff",
    "list": [None, True],
}


def save(path: Path, tensors, size: int, cuts=None, *, step: int = 20, run_id: str = "run", **kwargs) -> Path:
    cuts = cuts or even(tensors, size)
    kwargs.setdefault("allow_non_finite", True)  # any bits
    outcome = run_in_threads(
        lambda comm: write(path, comm, cut(tensors, cuts, comm.rank), DATA, step=step, run_id=run_id, **kwargs), size
    )
    assert outcome == [path] * size
    return path


def load(path: Path, tensors, size: int, cuts=None) -> dict[str, torch.Tensor]:
    """Load with another cut and put the pieces together."""
    cuts = cuts or even(tensors, size)

    def body(comm):
        pairs = [(e, torch.full_like(t, 1)) for e, t in cut(tensors, cuts, comm.rank)]
        open_checkpoint(path).read_into(pairs, comm=comm)
        return pairs

    ranks = run_in_threads(body, size)
    for outcome in ranks:
        assert not isinstance(outcome, BaseException), outcome
    return {
        name: torch.cat([t for pairs in ranks for e, t in pairs if e.name == name]).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in b)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_cuts_load_into_any_other_cuts(tmp_path_factory, data):
    shapes = st.lists(st.integers(0, 6), max_size=3)
    dtypes = st.sampled_from(sorted(ITEM_BYTES))
    tensors = {}
    for i in range(data.draw(st.integers(1, 4), label="tensors")):
        shape, dtype = data.draw(shapes), data.draw(dtypes)
        raw = torch.randint(0, 256, (math.prod(shape) * ITEM_BYTES[dtype],), dtype=torch.uint8)
        raw = raw % 2 if dtype == "bool" else raw
        tensors[f"t{i}"] = raw.view(torch_dtype(dtype)).reshape(shape)

    def some_cuts(size):
        return {
            name: [0, *sorted(data.draw(st.integers(0, t.numel())) for _ in range(size - 1)), t.numel()]
            for name, t in tensors.items()
        }

    saved_by, loaded_by = (
        data.draw(st.integers(1, 4), label="saved by"),
        data.draw(st.integers(1, 4), label="loaded by"),
    )
    path = tmp_path_factory.mktemp("any") / "step-00000020"
    save(path, tensors, saved_by, some_cuts(saved_by))
    open_checkpoint(path).verify()
    found = load(path, tensors, loaded_by, some_cuts(loaded_by))
    for name, tensor in tensors.items():  # as bytes: random bits make NaNs, and fp8 has no equality
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_state_comes_back_with_its_types(tmp_path):
    tensors = sample()

    def body(comm):
        pieces = cut(tensors, even(tensors, 2), comm.rank)
        return write(tmp_path / "s", comm, pieces, DATA, step=3, run_id="r")

    run_in_threads(body, 2)
    found = open_checkpoint(tmp_path / "s")
    assert found.data == DATA
    assert isinstance(found.data["betas"], tuple)
    assert (found.step, found.world_size, found.manifest.run_id) == (3, 2, "r")
    assert found.tensors["layer.weight"] == Extent("layer.weight", (7, 5), "fp32", 0, 35)


def test_tensors_in_state_come_back(tmp_path):
    generator = torch.Generator().get_state()
    stored = {"generator": generator, "scale": torch.tensor(0.5, dtype=torch.bfloat16), "none": torch.zeros(2, 0)}
    write(tmp_path / "s", alone(), [], stored, step=0, run_id="r")
    found = open_checkpoint(tmp_path / "s").data
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in stored.items()
    }
    assert all(torch.equal(found[name], each) for name, each in stored.items())


@pytest.mark.parametrize(
    "stored", [["fp32", [2], "AAAA"], ["fp32", "x", ""], ["none", [0], ""], [], "x", ["fp32", [0], "?"], {"a": 1}]
)
def test_a_damaged_tensor_in_state_is_refused(stored):
    with pytest.raises(ValueError, match="'__tensor__' is malformed"):
        plain.unpack({"__tensor__": stored})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": {"b": object()}}, "data.a.b is a object"),
        ({"a": torch.zeros(1, dtype=torch.uint16)}, "unknown dtype 'torch.uint16'"),
        ({"a": torch.zeros(1 << 23)}, "data.a is a tensor of 33.6 MB; at most 16.8 MB are kept"),
        ({"a": [{"__bytes__": "x"}]}, r"data.a\[0\] has the key '__bytes__', which is reserved"),
        ({"a": 1 << 5000}, "data.a is an integer of 5001 bits"),
    ],
)
def test_state_that_is_not_plain_is_refused_by_its_place(tmp_path, data, message):
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "s", alone(), [], data, step=0, run_id="r")
    assert list(tmp_path.iterdir()) == []


def test_state_nested_too_deeply_is_refused_when_saving_not_when_loading(tmp_path):
    deep: object = 1
    for _ in range(60):
        deep = [deep]
    write(tmp_path / "ok", alone(), [], {"a": deep}, step=0, run_id="r")
    assert open_checkpoint(tmp_path / "ok").data == {"a": deep}
    deeper = ((((deep,),),),)
    with pytest.raises(CheckpointError, match="is nested deeper than 64 levels"):
        write(tmp_path / "no", alone(), [], {"a": deeper}, step=0, run_id="r")


def test_files_are_ordinary_safetensors(tmp_path):
    tensors = sample()
    path = save(tmp_path / "s", tensors, 2)
    names = sorted(p.name for p in path.iterdir())
    assert len(names) == 3
    assert names[0] == "manifest.json"
    found = safetensors.torch.load_file(path / names[2])
    start, stop = 35 // 2, 35
    assert torch.equal(found[f"layer.weight[{start}:{stop}]"], tensors["layer.weight"].reshape(-1)[start:stop])
    assert found["half[5:11]"].dtype == torch.bfloat16


def test_content_is_aligned_to_its_elements(tmp_path):
    save(tmp_path / "s", sample(), 1)
    manifest = open_checkpoint(tmp_path / "s").manifest
    for piece, offset in manifest.layout_of(0).offsets.items():
        assert offset % ITEM_BYTES[piece.dtype] == 0


def test_a_part_of_one_tensor_can_be_read_alone(tmp_path):
    tensors = sample()
    path = save(tmp_path / "s", tensors, 3)
    target = torch.zeros(4)
    found = open_checkpoint(path)
    extent = Extent("layer.weight", (7, 5), "fp32", 10, 14)
    files = found.read_into([(extent, target)], ignored=found.tensors)
    assert torch.equal(target, tensors["layer.weight"].reshape(-1)[10:14])
    assert len(files) == 2


def test_loading_tells_autograd_that_the_tensor_changed(tmp_path):
    tensors = {"a": torch.randn(4)}
    path = save(tmp_path / "s", tensors, 1)
    target = torch.zeros(4, requires_grad=True)
    before = target._version
    open_checkpoint(path).read_into([(whole("a", tensors["a"]), target)])
    assert target._version > before
    assert torch.equal(target.detach(), tensors["a"])


def test_stride_is_part_of_what_must_fit(tmp_path):
    extent = Extent("a", (2, 3), "fp32", 0, 6, stride=(1, 2))
    write(tmp_path / "s", alone(), [(extent, torch.arange(6.0))], {}, step=0, run_id="r")
    target = torch.zeros(6)
    open_checkpoint(tmp_path / "s").read_into([(extent, target)])
    assert target.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CheckpointError, match=r"a\s+\(2, 3\) fp32 stride \(1, 2\)\s+\(2, 3\) fp32\n"):
        open_checkpoint(tmp_path / "s").read_into([(Extent("a", (2, 3), "fp32", 0, 6), target)])


def test_everything_that_does_not_fit_is_in_one_table(tmp_path):
    path = save(tmp_path / "s", {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)}, 2)
    wanted = [
        (Extent("a", (3, 3), "fp32", 0, 9), torch.ones(9)),
        (Extent("b", (4,), "bf16", 0, 4), torch.ones(4).bfloat16()),
        (Extent("new", (2,), "fp32", 0, 2), torch.ones(2)),
    ]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).read_into(wanted)
    assert str(caught.value) == (
        f"checkpoint {path} (step 20) does not fit: 4 tensors differ.\n"
        "  tensor  saved        expected\n"
        "  a       (2, 3) fp32  (3, 3) fp32\n"
        "  b       (4,) fp32    (4,) bf16\n"
        "  new     not there    (2,) fp32\n"
        "  c       (1,) fp32    not there\n"
        "  Build the model and the optimizer that were saved, or choose another checkpoint."
    )
    assert caught.value.exit_code == 65
    assert all(bool((t == 1).all()) for _, t in wanted)


def test_names_can_be_ignored_by_their_beginning(tmp_path):
    tensors = {"a": torch.ones(2), "optimizer/a/exp_avg": torch.zeros(2)}
    path = save(tmp_path / "s", tensors, 1)
    target = torch.zeros(2)
    open_checkpoint(path).read_into([(whole("a", target), target)], ignored=("optimizer/",))
    assert target.tolist() == [1, 1]


def test_what_one_rank_asks_for_is_not_unexpected_on_another(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    path = save(tmp_path / "s", tensors, 1)

    def body(comm):
        name = "ab"[comm.rank]
        target = torch.zeros_like(tensors[name])
        open_checkpoint(path).read_into([(whole(name, target), target)], comm=comm)
        return target.sum().item()

    assert run_in_threads(body, 2) == [2, 3]


def test_a_target_that_is_wrong_on_one_rank_stops_all(tmp_path):
    tensors = {"a": torch.ones(4)}
    path = save(tmp_path / "s", tensors, 1)

    def body(comm):
        target = torch.zeros(4 + comm.rank)
        open_checkpoint(path).read_into([(Extent("a", (4,), "fp32", 0, 4), target)], comm=comm)

    outcome = run_in_threads(body, 2)
    assert all(isinstance(error, CheckpointError) for error in outcome)
    assert str(outcome[0]) == str(outcome[1])
    assert "rank 1: a: the target has shape (5,), stride (1,) and dtype fp32" in str(outcome[0])


def test_summary_says_what_is_in_it(tmp_path):
    path = save(tmp_path / "s", sample() | {"average/a": torch.ones(3)}, 2)
    found = open_checkpoint(path).summary()
    json.dumps(found)
    assert (found["step"], found["run_id"], found["world_size"], found["strategy"]) == (20, "run", 2, "zero3")
    assert found["tensors"]["optimizer"] == {"number": 1, "numel": 35, "bytes": 280}
    assert found["tensors"]["average"] == {"number": 1, "numel": 3, "bytes": 12}
    assert found["bytes"] == sum(p.stat().st_size for p in path.glob("*.safetensors"))
    assert describe_summary(found).splitlines()[1:5] == [
        "step        20",
        "run         run",
        "saved by    2 ranks, 'zero3'",
        f"files       2, {found['bytes'] / 1000:.1f} kB",
    ]


def test_non_contiguous_pieces_are_saved_as_they_read(tmp_path):
    tensor = torch.arange(10.0)[::2]
    write(tmp_path / "s", alone(), [(whole("a", tensor), tensor)], {}, step=0, run_id="r")
    target = torch.zeros(5)
    open_checkpoint(tmp_path / "s").read_into([(whole("a", target), target)])
    assert target.tolist() == [0, 2, 4, 6, 8]


def test_every_dtype_has_a_place_in_the_files(tmp_path):
    tensors = {
        name: torch.zeros(6, dtype=torch.uint8).repeat(ITEM_BYTES[name]).view(torch_dtype(name)) for name in ITEM_BYTES
    }
    path = save(tmp_path / "s", tensors, 2)
    for file in path.glob("*.safetensors"):
        safetensors.torch.load_file(file)
    found = load(path, tensors, 3)
    assert {name: dtype_name(t.dtype) for name, t in found.items()} == {name: name for name in ITEM_BYTES}
