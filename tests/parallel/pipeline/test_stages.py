"""All stages of a model, run one after the other in one process, give what the plain model gives, to the last bit."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.api.train_step import forward_loss
from shardwise.parallel.pipeline.pipelined import find_stages
from shardwise.parallel.pipeline.stage import Stages
from shardwise.parallel.pipeline.stage_module import Placeholder, drop_other_stages, make_meta_copy
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.schedule import PipelinePolicy


def split(model, num_stages, first_of_stage=()):
    """One model for each stage."""
    models = [copy.deepcopy(model) for _ in range(num_stages)]
    found = []
    for stage, part in enumerate(models):
        modules = find_stages(part, PipelinePolicy(first_of_stage=first_of_stage), num_stages)
        copied = make_meta_copy(part, modules)
        drop_other_stages(part, modules, {stage})
        found.append((part, Stages(part, copied, modules, num_stages, device=torch.device("cpu"), comm=None)))
    return found


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def train(parts, batch):
    """Forward and backward through all stages; returns the loss."""
    passes, received, flow = [], {}, None
    for stage, (model, stages) in enumerate(parts):
        flow = stages.flow(batch, call)
        forward = forward_loss if stage == len(parts) - 1 else call
        outputs = stages.run(stage, flow, received, functools.partial(forward, model, batch))
        passes.append((received, outputs))
        if stage < len(parts) - 1:
            received = {
                source: tensor.detach().requires_grad_(tensor.requires_grad)
                for source, tensor in zip(flow.boundary[stage], outputs, strict=True)
            }
    loss = passes[-1][1]
    loss.backward()
    for stage in reversed(range(len(parts) - 1)):
        pairs = [
            (out, torch.zeros_like(out) if (grad := passes[stage + 1][0][source].grad) is None else grad)
            for source, out in zip(flow.boundary[stage], passes[stage][1], strict=True)
            if out.requires_grad
        ]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    return loss.detach()


def check(model, batch, num_stages, first_of_stage=()):
    parts = split(model, num_stages, first_of_stage)
    plain = forward_loss(model, batch)
    plain.backward()
    assert torch.equal(train(parts, batch), plain.detach())
    grads = {}
    for part, _ in parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                grads.setdefault(name, []).append(parameter.grad)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name not in grads
        elif len(grads[name]) == 1:
            assert torch.equal(grads[name][0], parameter.grad), name
        else:  # tied over stages
            torch.testing.assert_close(sum(grads[name]), parameter.grad, rtol=1e-5, atol=1e-7)
    assert {n for part, _ in parts for n, _ in part.named_parameters()} == dict(model.named_parameters()).keys()
    return parts


def gpt(**options):
    torch.manual_seed(0)
    return sw.models.gpt("gpt-tiny", num_layers=5, hidden=24, num_heads=2, vocab_size=31, seq_len=6, **options)


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 31, (2, 6), generator=generator), torch.randint(0, 31, (2, 6), generator=generator)


@pytest.mark.cases(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_our_gpt(num_stages, tied):
    parts = check(gpt(tied=tied), tokens(), num_stages)
    assert sum(isinstance(module, Placeholder) for part, _ in parts for module in part.modules()) >= 8 * (
        num_stages - 1
    )


def families():
    import transformers as hf

    torch.manual_seed(0)
    ids = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(2))
    text = {"input_ids": ids, "labels": ids}
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2}
    small |= {"intermediate_size": 24}
    yield "gpt2", hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=5, n_head=2, n_positions=16)), text
    yield "llama", hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=1)), text
    yield "bert", hf.BertForMaskedLM(hf.BertConfig(**small)), text | {"attention_mask": torch.ones_like(ids)}
    vit = hf.ViTConfig(**{k: v for k, v in small.items() if k != "vocab_size"}, image_size=8, patch_size=4)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    yield "vit", hf.ViTForImageClassification(vit), {"pixel_values": images, "labels": torch.tensor([0, 1])}
    t5 = hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2, decoder_start_token_id=0)
    yield "t5", hf.T5ForConditionalGeneration(t5), text
    opt = {k: v for k, v in small.items() if k != "intermediate_size"} | {"ffn_dim": 24, "word_embed_proj_dim": 16}
    yield "opt", hf.OPTForCausalLM(hf.OPTConfig(**opt, max_position_embeddings=32)), text


@pytest.mark.cases(2)
@pytest.mark.parametrize("num_stages", [4, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5", "opt"])
def test_families(name, num_stages):
    model, batch = next((model, batch) for found, model, batch in families() if found == name)
    model.eval()  # without dropout
    check(model, batch, num_stages)


def test_stages_by_name():
    parts = check(gpt(), tokens(), 2, first_of_stage=("blocks.4",))
    assert isinstance(parts[0][0].blocks[4], Placeholder)
    assert not isinstance(parts[0][0].blocks[3], Placeholder)
    with pytest.raises(PlanError, match=r"no pipeline stage can begin at 'blocks\.9'"):
        split(gpt(), 2, ("blocks.9",))
    with pytest.raises(PlanError, match="do not begin the 3 - 1 stages"):
        split(gpt(), 3, ("blocks.2", "blocks.1"))


def test_placeholders_hold_nothing_and_answer_as_the_module():
    part, _ = split(gpt(), 2)[1]
    block = part.blocks[0]
    assert not list(block.parameters())
    assert block.attention.num_heads == 2
    assert "Block of another pipeline stage" in repr(block)


class Odd(nn.Module):
    """Blocks whose outputs skip stages, and a dropout and sums between the blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        first = self.dropout(self.blocks[0](x * self.scale))
        second = first + self.blocks[1](first)
        third = self.blocks[2](second)
        fourth = self.blocks[3](third)
        return (self.blocks[4](fourth + first) * self.scale).square().mean()


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_what_skips_stages_is_handed_on(num_stages):
    check(Odd().eval(), (torch.randn(3, 4),), num_stages)


def test_another_path_is_refused():
    parts = split(Odd().eval(), 2)
    train(parts, (torch.randn(3, 4),))
    model, stages = parts[1]
    flow = stages.flow((torch.randn(3, 4),), call)
    flow.calls[3], flow.calls[4] = flow.calls[4], flow.calls[3]
    with pytest.raises(StateError, match="need the same path every time"):
        stages.run(1, flow, {}, lambda: call(model, (torch.randn(3, 4),)))


def test_an_order_that_stages_cannot_follow_is_refused():
    for _part, stages in split(Backwards(), 2):
        with pytest.raises(PlanError, match="does not run its modules in the order in which they are registered"):
            stages.flow((torch.randn(3, 4),), call)


class NormFirst(Odd):
    """Registers its norm before its blocks, as OPT."""

    def __init__(self):
        super().__init__()
        blocks, self.norm = self.blocks, nn.LayerNorm(4)
        del self.blocks
        self.blocks = blocks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().sum()


def test_what_is_registered_before_it_is_called():
    batch = (torch.randn(3, 4),)
    for _part, stages in split(NormFirst(), 2):
        with pytest.raises(PlanError, match=r"Register 'blocks\.4' before 'norm'\. A module that is deleted and set"):
            stages.flow(batch, call)
    model = NormFirst()
    norm = model.norm
    del model.norm
    model.norm = norm
    check(model, batch, 2)


class Forwards(Odd):
    """Calls the forwards of its blocks, not the blocks."""

    def forward(self, x):
        for block in self.blocks:
            x = block.forward(x)
        return x.sum()


class Again(Odd):
    """Calls its first block behind the last, by another name."""

    def __init__(self):
        super().__init__()
        self.again = self.blocks[0]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.again(x).square().sum()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Forwards, r"'blocks\.0\.0\.bias' .*\n.*call 'blocks\.0' instead"),
        (Again, r"forward calls 'blocks\.0' more than once, with 'blocks\.4' in between\.\n  Let both be on one stage"),
    ],
)
def test_blocks_called_by_another_way_or_on_another_stage_are_refused(kind, says):
    for _, stages in split(kind(), 2):
        with pytest.raises(PlanError, match=says):
            stages.flow((torch.randn(3, 4),), call)


class Backwards(Odd):
    def forward(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return x.sum()


def test_the_model_cannot_be_called_directly():
    for part, _ in split(gpt(), 2):
        with pytest.raises(StateError, match=r"Call sw\.train_step"):
            part(*tokens())


def test_a_model_without_blocks_is_refused():
    with pytest.raises(PlanError, match="no chain of blocks"):
        split(nn.ModuleDict({"only": nn.Linear(2, 2)}), 2)
    with pytest.raises(PlanError, match="no pipeline stage can begin at '7'"):
        split(layers(), 2, ("7",))


def layers():
    torch.manual_seed(4)
    return nn.Sequential(*(module for _ in range(3) for module in (nn.Linear(4, 4), nn.ReLU(inplace=True))), Mean())


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


@pytest.mark.parametrize(("num_stages", "first"), [(2, ()), (3, ()), (2, ("2",)), (2, ("4",))])
def test_a_sequential_of_layers_is_a_chain(num_stages, first):
    check(layers(), (torch.randn(3, 4),), num_stages, first)


class InPlace(Odd):
    """Sums and activations written to what the blocks return, and a block that writes to what it takes."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) for _ in range(5))
        self.blocks[3] = Adds()

    def forward(self, x):
        first = self.blocks[0](x)
        first += self.scale
        second = self.blocks[1](first)
        second *= 2
        third = self.relu(self.blocks[3](self.blocks[2](second)))
        return self.blocks[4](third + first).square().mean()


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = x.mul_(2)
        x += self.layer(torch.ones_like(x))
        return x


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_what_is_written_in_place_is_what_it_is_in_one_process(num_stages):
    check(InPlace(), (torch.randn(3, 4),), num_stages)


class Counts(nn.Module):
    """Running statistics without parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.count(x)
        return x - self.mean

    def count(self, x):
        self.mean.lerp_(x.mean(0), 0.25)


class Assigns(Counts):
    def count(self, x):
        self.mean = 0.75 * self.mean + 0.25 * x.mean(0)


class Rotates(Counts):
    """Its buffer is no part of checkpoints, as in transformers' rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def count(self, x):
        self.mean.copy_(x.mean(0))


class Stateful(Odd):
    """Keeps statistics of the batch alone, or of what the blocks give."""

    def __init__(self, kind, *, last):
        super().__init__()
        self.dropout.p = 0.0
        self.norm, self.is_last = kind(), last

    def forward(self, x):
        x = x if self.is_last else self.norm(x)
        for block in self.blocks:
            x = block(x)
        return (self.norm(x) if self.is_last else x).square().mean()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [Counts, Assigns, Rotates])
def test_a_module_without_parameters_that_keeps_state_is_refused(kind, last):
    batch = (torch.randn(3, 4),)
    if kind is Rotates and not last:  # every stage finds the same
        check(Stateful(kind, last=last), batch, 3)
        return
    for _, stages in split(Stateful(kind, last=last), 3):
        with pytest.raises(PlanError, match=r"'norm' has no parameters.*\n  Move it into the block before it, give it"):
            stages.flow(batch, call)
    check(Stateful(kind, last=last).eval(), batch, 3)


def test_state_in_a_block_is_kept_and_finding_shapes_leaves_it_alone():
    """What the refusal advises."""
    model = Odd()
    model.dropout.p = 0.0
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Counts()) for _ in range(5))
    parts = check(copy.deepcopy(model), (batch := torch.randn(3, 4),), 3)
    model(batch)
    for part, _ in parts:
        for ours, plain in zip(part.blocks, model.blocks, strict=True):
            assert isinstance(ours, Placeholder) or torch.equal(ours[1].mean, plain[1].mean)
        assert sum(not isinstance(block, Placeholder) for block in part.blocks)


def test_a_buffer_that_the_models_own_forward_writes_is_refused():
    class Mean(Odd):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            self.mean.lerp_(x.detach().mean(0), 0.5)
            return x.sum()

    class Assigned(Mean):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            self.mean = 0.5 * self.mean + x.detach().mean(0)
            return x.sum()

    class CountsCalls(Mean):
        """Of the batch alone."""

        def forward(self, x):
            self.mean += 1
            for block in self.blocks:
                x = block(x)
            return x.sum()

    for kind in (Mean, Assigned, CountsCalls):
        for _, stages in split(kind(), 2):
            with pytest.raises(PlanError, match=r"writes to the buffer 'mean' \(self.*\n  Keep the buffer in"):
                stages.flow((torch.randn(3, 4),), call)


class Shows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.inside = self.layer(x)
        return self.inside.tanh()


class Routed(nn.Module):
    """Looks at values, of which there are none on the meta device."""

    def __init__(self):
        super().__init__()
        self.router, self.expert = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x):
        rows = (self.router(x)[:, 0] >= 0).nonzero().flatten()
        return x.index_add(0, rows, self.expert(x[rows]))


def test_what_blocks_do_not_return_is_refused():
    class Collects(Odd):
        def __init__(self, adds):
            super().__init__()
            self.adds = adds
            self.blocks = nn.ModuleList(Shows() for _ in range(5))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            inside = torch.stack([block.inside for block in self.blocks])
            return x.sum() + inside.sum().to("cpu") if self.adds else {"loss": x.sum(), "inside": inside}

    for adds in (True, False):
        for _, stages in split(Collects(adds), 2):
            with pytest.raises(
                PlanError, match=r"tensors from inside its blocks[^\n]*\n  Switch that off \(output_router_logits=False"
            ):
                stages.flow((torch.randn(3, 4),), call)


def test_blocks_that_look_at_values():
    model = Odd()
    model.blocks = nn.ModuleList(Routed() for _ in range(5))
    check(model.eval(), (torch.randn(3, 4),), 3)
