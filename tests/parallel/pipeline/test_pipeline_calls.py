"""What users put around the calls of a pipeline's modules: hooks, checkpoints; and nested tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import run_on_ranks
from tests.parallel.pipeline.test_stages import call, check, split

WIDTH, STEPS, NUM_MICROBATCHES = 4, 2, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.inner(input=x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.run(self.first(x))).square().mean()

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Checkpointed(Net):
    def run(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class InOne(Net):
    """A checkpoint that begins on one stage and goes on on the next, and computes besides."""

    def run(self, x):
        x = checkpoint(self.begin, x, use_reentrant=False)
        return checkpoint(lambda y: self.blocks[3](y).tanh() + y, x, use_reentrant=False)

    def begin(self, x):
        for block in self.blocks[:3]:
            x = block(x).tanh() * x
        return x


class Hooked(Net):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(scaled_inputs)
            block.register_full_backward_pre_hook(scaled_outputs)
            block.register_forward_hook(scaled)
        self.register_forward_hook(scaled)
        self.register_forward_hook(asked_with_kwargs, with_kwargs=True, always_call=True)
        self.register_full_backward_pre_hook(scaled_outputs)


def scaled_inputs(_module, grad_inputs, _grad_outputs):
    return tuple(grad * 1.25 for grad in grad_inputs)


def scaled_outputs(_module, grad_outputs):
    return tuple(grad * 0.75 for grad in grad_outputs)


def scaled(_module, _args, output):
    return output * 1.5


def asked_with_kwargs(_module, _args, _kwargs, output):
    assert output.dim() == 0, "what the model returns, not what a stage hands on"
    return output + 1


def batch(step=0):
    return (torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)),)


KINDS = (Net, Hooked, Checkpointed, InOne)
PLANS = ({}, {"pipeline": "zb-h1"}, {"pipeline": "zb-v", "activation_checkpointing": "full"})


def train_all():
    return [train(sw.parallelize(kind().double(), sw.ParallelPlan(pp=2, **plan))) for kind in KINDS for plan in PLANS]


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(STEPS):
        found.append(sw.train_step(model, batch(step), None, NUM_MICROBATCHES).item())
        parts = (model, model.first, model.blocks[0].inner, [model.blocks[3], model.last])  # some on one stage only
        found += [sw.clip_grad_norm(part, 0.1).item() for part in parts]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, sw.eval_step(model.eval(), batch(), None, NUM_MICROBATCHES).item()]


def one_process(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(STEPS):
        losses = [
            model(*part) / NUM_MICROBATCHES
            for part in zip(*(each.chunk(NUM_MICROBATCHES) for each in batch(step)), strict=True)
        ]
        for loss in losses:
            loss.backward()
        found.append(sum(loss.item() for loss in losses))
        parts = (model, model.first, model.blocks[0].inner, nn.ModuleList([model.blocks[3], model.last]))
        found += [nn.utils.clip_grad_norm_(part.parameters(), 0.1).item() for part in parts]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [
            *found,
            sum(model(*part).item() for part in zip(*(each.chunk(NUM_MICROBATCHES) for each in batch()), strict=True))
            / NUM_MICROBATCHES,
        ]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_checkpoints_and_clipping_of_parts_are_those_of_one_process():
    expected = [one_process(kind().double()) for kind in KINDS]
    assert len({found[1] for found in expected}) == 3, "hooks and what is checkpointed change the gradients"
    for results in run_on_ranks(train_all, 2, timeout_s=100):
        cases = [(kind, plan) for kind in range(len(KINDS)) for plan in PLANS]
        for (kind, plan), found in zip(cases, results, strict=True):
            assert found == pytest.approx(expected[kind], rel=1e-12), (KINDS[kind].__name__, plan)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_loss_function_that_reads_weights_is_refused(strategy):
    """On the last stage ``model.parameters()`` are its own, so that a penalty missed the others."""
    built, kept = [], []

    def build():
        built[:] = [Net()]
        built[0].scale = nn.Parameter(torch.ones(()))
        built[0].blocks[3].register_forward_hook(lambda _module, _args, output: kept.append(output))
        return built[0]

    def dry_run(read):
        def loss(output, _batch):
            return output * built[0].scale + sum(
                each.square().sum() for each in read(built[0])
            )  # each stage has a scale

        sw.dry_run(build, sw.ParallelPlan(strategy, pp=2), world_size=4, batch=batch(), loss_fn=loss, rank=3)

    dry_run(lambda _model: kept[-1:])  # an activation, with the weights that computed it
    for read in (nn.Module.parameters, lambda model: [model.last.bias]):
        with pytest.raises(StateError, match=r"the loss function reads '(blocks|last)"):
            dry_run(read)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("hook", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hooks_of_every_block_run(hook, num_stages):
    model = Net()
    for block in model.blocks:
        getattr(block, f"register_{hook}")(scaled_inputs if hook == "full_backward_hook" else scaled_outputs)
    check(model, (torch.randn(3, WIDTH),), num_stages)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("computes", [False, True])
def test_a_reentrant_checkpoint_around_blocks_is_refused(computes, num_stages):
    class Reentrant(Net):
        def run(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
                x = x * 2 if computes else x
            return x

    for _, stages in split(Reentrant(), num_stages):
        with pytest.raises(PlanError, match=r"'blocks\.0' in a checkpoint with use_reentrant=True"):
            stages.flow((torch.randn(3, WIDTH),), call)


def test_a_reentrant_checkpoint_is_refused_where_its_output_is_written_to():
    """Shapes were found with copies, which do not tell."""

    class Reentrant(Net):
        def run(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True) + 0
                x += 1
            return x

        def forward(self, x):
            y = self.last(self.run(self.first(x)))
            y += 1
            return y.square().mean()

    for _, stages in split(Reentrant(), 2):
        with pytest.raises(PlanError, match="use_reentrant=True"):
            stages.flow((torch.randn(3, WIDTH),), call)


class Frozen(Net):
    """Its first blocks run without grad, and need none."""

    def run(self, x):
        with torch.no_grad():
            for block in self.blocks[:2]:
                x = block(x)
        return self.blocks[3](self.blocks[2](x))

    def forward(self, x):
        return self.last(self.run(x)).square().mean()


def test_blocks_without_grad_whose_inputs_need_none_are_those_of_one_process():
    check(Frozen(), (torch.randn(3, WIDTH),), 3)


class Padded(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 4, **options)

    def forward(self, x):
        return self.encoder(self.first(x), src_key_padding_mask=x[..., 0] > 1).square().mean()


def test_an_encoder_that_would_make_nested_tensors_is_refused():
    x = (torch.zeros(3, 5, WIDTH),)
    with pytest.raises(PlanError, match=r"'encoder' may make nested.*\n.*with enable_nested_tensor=False"):
        split(Padded(), 2)
    for _, stages in split(Padded(enable_nested_tensor=False).eval(), 2):
        with torch.no_grad():
            stages.flow(x, call)
