"""What is computed from one rank's part: parts, element by element; the rest is refused with what to call instead."""

from __future__ import annotations

import copy
import io

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.storage.part import Joined, Part, Shard
from shardwise.spec.errors import StateError

KEPT = {
    "arithmetic": lambda t: 2 * t.mul(3).add(t, alpha=0.5) / 4 - t,
    "by a tensor": lambda t: torch.tensor(2.0).__mul__(t) + torch.tensor(2.0) * t,
    "powers": lambda t: t.abs().sqrt() ** 2,
    "data": lambda t: t.data,
    "detached": lambda t: t.detach(),
    "cloned": lambda t: t.clone(),
    "copied": copy.deepcopy,
    "cast": lambda t: t.detach().to("cpu", torch.float64),
    "flattened": lambda t: t.flatten(),
    "viewed": lambda t: t.view(-1).unsqueeze(0).T.reshape(-1),
    "real": lambda t: t.real,
    "finite": torch.isfinite,
    "without nan": lambda t: torch.where(torch.isnan(t), torch.zeros_like(t), t),
    "masked": lambda t: t.masked_fill(t > 2, 0.0),
    "clamped": lambda t: torch.maximum(t.clamp(-1, 1), t),
    "noise": lambda t: t.detach().add_(torch.randn_like(t)),
    "in place": lambda t: t.data.mul_(0.5),
    "own average": lambda t: torch.zeros(1, 6).lerp_(t.detach(), 0.1),
    "list": lambda t: torch._foreach_mul([t], 2.0)[0],
    "joined": lambda t: torch.cat([t.view(-1), t.view(-1)]),
    "cut again": lambda t: torch.cat([t.view(-1), t.view(-1)])[2:8],
    "vector": lambda t: nn.utils.parameters_to_vector([t, t]),
}

REFUSED = {
    "norm": lambda t: t.norm(),
    "data norm": lambda t: t.data.norm(2),
    "detached norm": lambda t: t.detach().norm(),
    "norm of an average": lambda t: torch.zeros(1, 6).lerp_(t.detach(), 0.1).norm(),
    "norms": lambda t: torch.nn.utils.get_total_norm([t]),
    "vector norm": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "norm of joined": lambda t: torch.cat([t.view(-1), t.view(-1)]).norm(),
    "squares": lambda t: (t**2).sum(),
    "largest": lambda t: t.abs().max(),
    "mean": lambda t: t - t.mean(dim=1, keepdim=True),
    "all": lambda t: torch.isfinite(t).all(),
    "any": lambda t: torch.isnan(t).any(),
    "number": lambda t: float(t.view(-1).max()),
    "item": lambda t: t.detach().view(-1)[0].item(),
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().cpu().numpy(),
    "rows": lambda t: t.data[:1],
    "write by rows": lambda t: t.data.__setitem__(slice(0, 1), 0.0),
    "mask of elements": lambda t: t[t > 1],
    "product": lambda t: torch.ones(2, 6) @ t.T,
    "linear": lambda t: F.linear(torch.ones(2, 6), t),
    "embedding": lambda t: F.embedding(torch.tensor([0]), t),
    "broadcast": lambda t: torch.ones(4, 1) * t,
    "other shape": lambda t: t + torch.ones(7),
    "softmax": lambda t: t.softmax(1),
    "order": lambda t: t.topk(2),
    "loss": lambda t: F.mse_loss(t, torch.zeros_like(t)),
    "xavier": nn.init.xavier_uniform_,
    "normal": lambda t: nn.init.normal_(t, std=0.02),
    "trunc normal": nn.init.trunc_normal_,
}


def parts() -> list[Part]:
    """A gradient and a parameter of one rank."""
    values = torch.arange(1.0, 7.0).view(1, 6)
    shard = nn.Parameter(values.clone())
    shard.__class__ = Shard
    return [Part.of_gradient(values, None), shard]


@pytest.mark.parametrize("call", KEPT)
def test_what_is_computed_element_by_element_is_a_part_with_the_numbers_of_plain_tensors(call):
    for part in parts():
        torch.manual_seed(0)
        expected = KEPT[call](part.to_local().clone().requires_grad_(part.requires_grad))
        torch.manual_seed(0)
        made = KEPT[call](part)
        assert isinstance(made, Part)
        assert torch.equal(made.to_local(), expected)
        with pytest.raises(StateError):
            made.sum()


@pytest.mark.parametrize("call", REFUSED)
def test_what_looks_beyond_single_elements_is_refused_and_changes_nothing(call):
    for part in parts():
        before = part.to_local().clone()
        with pytest.raises(StateError, match=r"sw\.(full_parameters|clip_grad_norm|register_fsdp_forward_method)"):
            REFUSED[call](part)
        assert torch.equal(part.to_local(), before)


def test_what_holds_a_part_is_one_from_then_on():
    gradient, shard = parts()
    averages = [torch.zeros(1, 6), torch.zeros(1, 6)]
    torch._foreach_lerp_(averages, [gradient, shard.detach()], 0.5)
    averages[0].copy_(gradient)
    for average in averages:
        with pytest.raises(StateError):
            average.norm()
    made = torch.zeros_like(shard)  # of its shape, but nothing of it
    assert type(made) is Tensor
    assert made.norm() == 0


WRITES = {
    "assigned": lambda flat, t: flat.__setitem__(slice(0, 6), t.view(-1)),
    "copied": lambda flat, t: flat[:6].copy_(t.view(-1)),
    "viewed": lambda flat, t: flat[:6].view(1, 6).copy_(t),
    "listed": lambda flat, t: torch._foreach_copy_([flat[:6]], [t.view(-1)]),
    "added": lambda flat, t: flat.narrow(0, 0, 6).zero_().add_(t.view(-1)),
    "computed": lambda flat, t: torch.mul(t.view(-1), 1.0, out=flat[:6]),
    "concatenated": lambda flat, t: torch.cat([t.view(-1), torch.zeros(3)], out=flat),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_flat_tensor_that_a_part_is_written_into_may_be_cut_and_is_refused_as_a_part_is(write):
    for part in parts():
        flat = torch.zeros(9)
        for _ in range(2):
            WRITES[write](flat, part.detach())
            assert flat.to_local().tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0]
            for number in (flat.norm, flat[:6].sum, flat.tolist):
                with pytest.raises(StateError):
                    number()


def test_a_parameter_that_a_part_is_written_into_is_a_shard_from_then_on():
    for part in parts():
        for write in (nn.Parameter.copy_, nn.Parameter.add_, lambda average, t: average[:1].copy_(t)):
            average = nn.Parameter(torch.zeros(1, 6), requires_grad=False)
            write(average, part.detach())
            assert isinstance(average, Shard)
            assert average.to_local().tolist() == part.to_local().tolist()


def test_a_mask_from_a_part_does_not_decide_about_a_plain_tensor():
    for part in parts():
        plain = torch.zeros(1, 6)
        for index, value in ((part > 2, 1.0), (torch.ones(1, 6) > 0, part.view(-1))):
            with pytest.raises(StateError):
                plain[index] = value


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_what_is_compiled_is_refused_as_what_is_not():
    refused = (
        lambda t: t.norm(),
        lambda t: 2 * (t.detach() * 2).sum(),
        lambda t: t[:1] + 1,
        lambda t: torch.ones(2, 6) @ t.T,
    )
    for part in parts():
        for call in refused:
            with pytest.raises(StateError):
                torch.compile(call, backend="eager")(part)
        for backend in ("eager", "aot_eager"):
            made = torch.compile(lambda t: t.detach() * 2 + 1, backend=backend)(part)
            assert isinstance(made, Part)
            assert made.to_local().tolist() == [[3, 5, 7, 9, 11, 13]]


def test_lists_of_parts_that_share_their_memory_keep_their_shapes():
    values = torch.arange(1.0, 9.0)
    gradients = [Part.of_gradient(values[:6].view(1, 6), None), Part.of_gradient(values[6:], None)]
    torch._foreach_mul_(gradients, 2.0)
    torch._foreach_clamp_max_(gradients, 14.0)
    assert [each.to_local().tolist() for each in gradients] == [[[2, 4, 6, 8, 10, 12]], [14, 14]]
    assert [each.shape for each in torch._foreach_add(gradients, gradients)] == [(1, 6), (2,)]


def test_lists_of_parts_and_of_whole_tensors_keep_which_is_which():
    """Under ``tp`` a rank has some parameters in full, in the memory of its parts."""
    values = torch.arange(1.0, 9.0)
    mixed = [Part.of_gradient(values[:6].view(1, 6), None), values[6:]]
    torch._foreach_mul_(mixed, 2.0)
    averages = [torch.zeros(1, 6), torch.zeros(2)]
    torch._foreach_lerp_(averages, mixed, 0.5)
    made = torch._foreach_add(mixed, averages)
    assert values.tolist() == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [each.tolist() for each in (averages[1], made[1])] == [[7, 8], [21, 24]]
    for each in (mixed, averages, made):
        assert isinstance(each[0], Part)
        assert type(each[1]) is Tensor
        with pytest.raises(StateError):
            torch._foreach_norm(each)


@pytest.mark.parametrize("write", [Tensor.add_, Tensor.__iadd__, lambda a, part: torch._foreach_add_([a], [part])])
def test_a_tensor_that_a_part_would_be_broadcast_into_is_refused_before_it_is_written(write):
    for part in parts():
        average = torch.zeros(4, 6)
        with pytest.raises(StateError, match="broadcasting"):
            write(average, part.detach())
        assert type(average) is Tensor
        assert not average.any()


def test_an_embedding_whose_shape_of_the_part_torch_refuses_is_refused_as_a_part():
    with pytest.raises(StateError, match=r"num_embeddings: .* is this rank's part"):
        torch.nn.functional.embedding(torch.tensor([0]), parts()[0], padding_idx=4)


def test_what_goes_wrong_for_other_reasons_than_shapes_stays_what_it_was(monkeypatch):
    gradient, _ = parts()
    with pytest.raises(RuntimeError, match="can't be cast") as found:
        torch.zeros(1, 6, dtype=torch.int64).add_(gradient)
    assert found.type is RuntimeError

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("a size of 1 GiB")

    monkeypatch.setattr("shardwise.engine.storage.part._handler_of", lambda _: fail)
    with pytest.raises(torch.OutOfMemoryError):
        gradient.add(1)


def test_the_real_and_the_imaginary_half_of_a_part_are_parts():
    made = Part.of_gradient(torch.ones(1, 6, dtype=torch.complex64), None)
    for half in (made.real, made.imag):
        with pytest.raises(StateError):
            half.norm()


def test_a_mask_of_the_parts_own_shape_is_element_wise():
    gradient, _ = parts()
    gradient[gradient > 4] = 0.0
    assert gradient.to_local().tolist() == [[1, 2, 3, 4, 0, 0]]


def test_joined_parts_can_be_cut_to_their_shapes_again():
    _, shard = parts()
    vector = nn.utils.parameters_to_vector([shard, shard]) * 2
    assert type(vector) is Joined
    others = [copy.deepcopy(shard), copy.deepcopy(shard)]
    nn.utils.vector_to_parameters(vector, others)
    assert all(torch.equal(other, shard.detach() * 2) for other in others)


def test_a_shard_stays_a_parameter_and_files_hold_its_part_on_request_alone():
    gradient, shard = parts()
    assert isinstance(shard, nn.Parameter)
    shard.grad = gradient
    assert shard.grad is gradient
    for part in (gradient, shard):
        with pytest.raises(StateError, match=r"pickling .*\n  Call state = sw\.full_state_dict\(model"):
            torch.save({"weight": part}, io.BytesIO())
        with pytest.raises(StateError, match=r"pickling .*safetensors"):
            safetensors.torch.save({"weight": part.detach().cpu().clone()})
        assert part.layout is torch.strided
        stored = io.BytesIO()
        torch.save(part.to_local(), stored)
        stored.seek(0)
        assert torch.equal(torch.load(stored), part.to_local())
        assert str(part).startswith(("tensor", "Part", "Parameter"))
