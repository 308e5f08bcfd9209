"""One plain process beside the ranks: what every test of the engine compares with, to the last bit.

Each rank trains the parallelized model on its own data and, beside it, one plain copy per rank on everybody's data. The
copies' gradients are added up in rank order (inside each group first where there is ``dp_replicate``), divided by the
number of ranks and applied once: that is "one process".
After every backward and every step losses, gradients, parameters and optimizer state must be equal to the last bit.

A *script* is what a rank does in one step: ``script(model, rank, step)`` returns the loss, or is a generator that runs
its backwards itself and yields what is to be compared after each of them (``Waiting``: and no gradients are due).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.fsdp import attach, debug, torch_private
from shardwise.fsdp.flat import states_by_name
from shardwise.fsdp.group import Group
from shardwise.fsdp.optimizer import needed_by
from shardwise.fsdp.runtime import Runtime
from shardwise.fsdp.view import memory_order
from shardwise.spec.granularity import row_numel
from tests.bits import same_bits

PRESETS = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
SHARDED = ("shard_grad_op", "zero3")


def presets() -> tuple[str, ...]:
    """Every preset on two ranks; on other worlds one with replicas and one without."""
    if _only is not None:
        return _only
    return PRESETS if dist.get_world_size() == 2 else ("zero1", "zero3")


_only: tuple[str, ...] | None = None
_options: dict[str, Any] = {}


@contextlib.contextmanager
def planned(*, only: tuple[str, ...] | None = None, **options: Any) -> Iterator[None]:
    """Inside, scenarios run with these fields of the plan, and under the presets of ``only``."""
    global _only, _options
    before = _only, _options
    _only, _options = only, options
    try:
        yield
    finally:
        _only, _options = before


Script = Callable[[nn.Module, int, int], Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass
class Trained:
    """What is left after a comparison, for further looks."""

    model: nn.Module
    plain: nn.Module
    optimizer: torch.optim.Optimizer
    runtime: Runtime

    @property
    def num_healed(self) -> int:
        return self.runtime.saved.num_healed


def compare(
    build: Callable[..., nn.Module],
    script: Script,
    strategy: str = "zero3",
    *,
    steps: int = 4,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    parameters: Callable[[nn.Module], Any] = nn.Module.parameters,
    given: Callable[[nn.Module], Any] | None = None,
    between: Callable[[nn.Module, int], None] | None = None,
    parallelize: Callable[[nn.Module], nn.Module] | None = None,
    is_checked: bool = True,
    heals: bool = False,
    **options: Any,
) -> Trained:
    """Train under ``strategy`` and as one process.

    Ignored parameters are each rank's own: a rank's copy steps on its own gradients of them.

    Args:
        build: Builds the model, with the same weights each time; for the rank that is given, where some are ignored.
        script: What a rank does in a step.
        strategy: Name of a preset.
        steps: Optimizer steps.
        optimizer: From parameters to an optimizer.
        parameters: From the plain model to what its optimizer gets.
        given: The same for the parallelized model; by default as for the plain one.
        between: Called with the model and the number of the step after each step, on either side.
        parallelize: Instead of ``sw.parallelize`` with ``strategy``.
        is_checked: Fill released slots with NaN and check saved tensors.
        heals: Saved tensors may have to be brought back; else none may.
        **options: Further fields of the plan.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    of_rank = [(other,) if "ignored" in options else () for other in range(world)]
    copies = [build(*other) for other in of_rank]
    shares = _share_buffers(copies) if parallelize is None else []
    reference = optimizer(parameters(copies[0]))
    model = build(*of_rank[rank])
    if parallelize is None:
        sw.parallelize(model, sw.ParallelPlan(strategy=strategy, **_options | options))
    else:
        parallelize(model)
    runtime = attach.runtime_of(model, "test")
    group_size = runtime.comms.gather.size
    alone = _Alone(copies, runtime, optimizer)
    ours = optimizer((given or parameters)(model))
    where = f"{strategy} on {world} ranks"
    with debug.checks(is_enabled=is_checked):
        for step in range(steps):
            place = f"{where}, step {step}"
            groups = [copies[first : first + group_size] for first in range(0, world, group_size)]
            _one_step(groups, model, runtime, script, step=step, place=place)
            alone.step(place)
            reference.step()
            ours.step()
            _compare_parameters(copies[0], runtime, f"{place}, after the optimizer")
            _compare_optimizers(copies[0], reference, ours, runtime, place)
            alone.compare(reference, ours, f"{place}, after the optimizer")
            reference.zero_grad()
            ours.zero_grad()
            _spread(copies, but=runtime.ignored.parameters)
            if between is not None:
                for each in copies:
                    between(each, step)
                between(model, step)
    for share in shares:
        share()
    if not heals:
        assert runtime.saved.num_healed == 0, f"{where}: {runtime.saved.num_healed} saved tensors had lost their data"
    return Trained(model, copies[rank], ours, runtime)


def compare_local_sums(
    model: nn.Module,
    build: Callable[[], nn.Module],
    syncs: Callable[[bool], contextlib.AbstractContextManager[None]],
    where: str,
) -> None:
    """Accumulate unsharded: rank r's microbatches are added, then the sums over the ranks, then divided.

    Args:
        model: Parallelized.
        build: Builds the plain model.
        syncs: Says in which microbatch gradients are sent: the last one.
        where: For messages.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    copies = [build() for _ in range(world)]
    for step in range(3):
        for other, plain in enumerate(copies):
            plain.zero_grad()
            for micro in range(3):
                plain_loss(plain, other, 10 * step + micro).backward()
        for micro in range(3):
            with syncs(micro == 2), sw.record_collectives(model) as events:
                plain_loss(model, rank, 10 * step + micro).backward()
            kinds = {event.kind for event in events if "reduce" in event.kind}
            assert bool(kinds) == (micro == 2), f"{where}: {kinds} in microbatch {micro}"
            if micro < 2:
                assert all(p.grad is None for p in model.parameters())
        for name, group, index in shards_of(attach.runtime_of(model, "test")):
            total = None
            for plain in copies:
                grad = dict(plain.named_parameters())[name].grad
                total = grad if total is None else total + grad
            grad = group.shards[index].grad
            if grad is not None:
                assert torch.equal(grad.flatten(), held_part(group, index, total / world)), f"{where}: {name}"
        model.zero_grad()


def _share_buffers(copies: list[nn.Module]) -> list[Callable[[], None]]:
    """Before each forward every copy takes over the saved buffers that the first one had before that forward.

    Returns what ends that, after a last time.
    """
    names = [name for name in copies[0].state_dict() if name in dict(copies[0].named_buffers())]
    if not names:
        return []
    history: list[dict[str, Tensor]] = []

    def share(each: nn.Module) -> Callable[[], None]:
        turns = itertools.count()

        def before(*_: object) -> None:
            turn, buffers = next(turns), dict(each.named_buffers())
            if each is copies[0]:
                history.append({name: buffers[name].clone() for name in names})
            for name in names:
                buffers[name].data.copy_(history[turn][name])

        handle = each.register_forward_pre_hook(before)

        def end() -> None:
            before()
            handle.remove()

        return end

    return [share(each) for each in copies]


def _one_step(
    groups: list[list[nn.Module]], model: nn.Module, runtime: Runtime, script: Script, *, step: int, place: str
) -> None:
    rank = dist.get_rank()
    copies = [each for group in groups for each in group]
    runs = [_Run(script, each, index, step) for index, each in enumerate(copies)]
    mine = _Run(script, model, rank, step)
    total: dict[str, Tensor] = {}
    index = 0
    while True:
        expected = [run.advance() for run in runs]
        got = mine.advance()
        if got is _END:
            assert expected[rank] is _END
            break
        at = f"{place}, backward {index}"
        _compare_values(expected[rank], got, at)
        is_waiting = isinstance(got, Waiting) and runtime.accumulation == "unsharded"
        for name, grad in {} if is_waiting else _summed(groups, but=runtime.ignored.parameters).items():
            total[name] = total[name] + grad if name in total else grad
        _compare_gradients(copies[0], runtime, total, at)
        index += 1
    for name, parameter in copies[0].named_parameters():
        if name not in runtime.ignored.parameters:
            parameter.grad = total.get(name)


_END = object()


class Waiting(list):
    """Values to compare after a backward that does not synchronise, or after none."""


class _Run:
    """A script under way, with a stream of random numbers of its own."""

    def __init__(self, script: Script, model: nn.Module, rank: int, step: int) -> None:
        run = script if inspect.isgeneratorfunction(script) else _by_loss
        args = (model, rank, step) if run is script else (script, model, rank, step)
        self._iterator: Iterator[Any] = run(*args)
        self._random = torch.Generator().manual_seed(31 * step + rank).get_state()

    def advance(self) -> Any:
        """Run to the next value; ``_END`` where there is none."""
        torch.set_rng_state(self._random)
        value = next(self._iterator, _END)
        self._random = torch.get_rng_state()
        return value


def _by_loss(script: Script, model: nn.Module, rank: int, step: int) -> Iterator[Any]:
    loss = script(model, rank, step)
    loss.backward()
    yield loss


def _summed(groups: list[list[nn.Module]], *, but: Collection[str]) -> dict[str, Tensor]:
    """The copies' gradients, added in rank order, group by group, and divided; they are taken from the copies."""
    total: dict[str, Tensor] = {}
    for group in groups:
        summed: dict[str, Tensor] = {}
        for each in group:
            for name, parameter in each.named_parameters():
                if name in but:
                    continue
                grad, parameter.grad = parameter.grad, None
                if grad is not None:
                    summed[name] = summed[name] + grad if name in summed else grad.clone()
        for name, grad in summed.items():
            total[name] = total[name] + grad if name in total else grad
    return {name: grad / sum(map(len, groups)) for name, grad in total.items()}


def _spread(copies: list[nn.Module], *, but: Collection[str]) -> None:
    with torch.no_grad():
        for each in copies[1:]:
            for (name, target), source in zip(each.named_parameters(), copies[0].parameters(), strict=True):
                if name not in but:
                    target.copy_(source)


class _Alone:
    """The ignored parameters of every copy, which no other rank's gradients reach."""

    def __init__(
        self, copies: list[nn.Module], runtime: Runtime, optimizer: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        self.held = runtime.ignored.parameters
        self.copies = [{name: dict(each.named_parameters())[name] for name in self.held} for each in copies]
        # Those of the first copy are in the reference optimizer.
        self.optimizers = [optimizer(list(each.values())) for each in self.copies[1:]] if self.held else []

    def step(self, place: str) -> None:
        """Compare the gradients, and step on them."""
        for name, expected in self.copies[dist.get_rank()].items():
            got = self.held[name].grad
            assert (got is None) == (expected.grad is None), f"{place}: gradient of {name}, which is ignored"
            if got is not None:
                assert same_bits(got, expected.grad), f"{place}: gradient of {name}, which is ignored"
        for each in self.optimizers:
            each.step()

    def compare(self, reference: torch.optim.Optimizer, ours: torch.optim.Optimizer, place: str) -> None:
        """Compare parameters and optimizer state."""
        rank = dist.get_rank()
        for name, expected in self.copies[rank].items():
            assert same_bits(self.held[name], expected), f"{place}: {name}, which is ignored"
            states = (self.optimizers[rank - 1] if rank else reference).state.get(expected, {})
            got = ours.state.get(self.held[name], {})
            assert states.keys() == got.keys(), f"{place}: state of {name}, which is ignored"
            for key, value in states.items():
                assert same_bits(value, got[key]), f"{place}: {key} of {name}, which is ignored"
        for each in self.optimizers:
            each.zero_grad()


def _compare_values(expected: Any, got: Any, where: str) -> None:
    for index, (a, b) in enumerate(zip(_listed(expected), _listed(got), strict=True)):
        assert same_bits(a.detach(), b.detach()), f"{where}: value {index} is {b.detach()}, not {a.detach()}"


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def shards_of(runtime: Runtime) -> Iterator[tuple[str, Group, int]]:
    """Every parameter's name, its group and its place in it."""
    for group in runtime.groups:
        for index, spec in enumerate(group.layout.params):
            yield spec.name, group, index


def held_part(group: Group, index: int, whole: Tensor) -> Tensor:
    """The elements of a parameter's ``whole`` tensor that this rank holds, in the order of memory."""
    spec, piece = group.layout.params[index], group.held[index]
    if spec.stride is not None:
        whole = torch.empty_strided(spec.shape, spec.stride, dtype=whole.dtype).copy_(whole)
    return memory_order(whole.detach().contiguous() if spec.stride is None else whole)[piece.start : piece.stop]


def _compare_gradients(plain: nn.Module, runtime: Runtime, total: dict[str, Tensor], where: str) -> None:
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    for name, group, index in shards_of(runtime):
        grad = group.shards[index].grad
        if name not in total:
            assert grad is None, f"{where}: {name} has a gradient, but no rank used it"
            continue
        expected = held_part(group, index, total[name].expand(shapes[name]))
        if grad is None:
            assert expected.numel() == 0, f"{where}: {name} has no gradient"
            continue
        assert same_bits(memory_order(grad), expected), (
            f"{where}: gradient of {name} is off by {(memory_order(grad) - expected).abs().max()}"
        )


def _compare_parameters(plain: nn.Module, runtime: Runtime, where: str) -> None:
    parameters = dict(plain.named_parameters())
    for name, group, index in shards_of(runtime):
        expected = held_part(group, index, parameters[name])
        got = memory_order(group.shards[index])
        assert same_bits(got, expected), f"{where}: {name} is off by {(got - expected).abs().max()}"


def _compare_optimizers(
    plain: nn.Module, reference: torch.optim.Optimizer, ours: torch.optim.Optimizer, runtime: Runtime, where: str
) -> None:
    parameters, states = dict(plain.named_parameters()), states_by_name(ours)
    for name, group, index in shards_of(runtime):
        expected, got = reference.state.get(parameters[name], {}), states.get(group.shards[index], {})
        if group.held[index].numel == 0:
            continue  # the optimizer may or may not keep something of an empty piece
        assert expected.keys() == got.keys(), f"{where}: optimizer state of {name} has {list(got)}"
        for key, value in expected.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                assert value == got[key], f"{where}: {key} of {name}"
            elif value.shape != parameters[name].shape or torch_private.wrapped_tensors(value):
                for part, here in _parts(value, got[key]):
                    expected_here = _share(part, here, group, index, reference)
                    assert same_bits(here.flatten(), expected_here), f"{where}: {key} of {name}"
            else:
                assert same_bits(memory_order(got[key]), held_part(group, index, value)), f"{where}: {key} of {name}"


def _parts(value: Tensor, got: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The plain tensors of two states, side by side."""
    wrapped, theirs = torch_private.wrapped_tensors(value), torch_private.wrapped_tensors(got)
    assert (wrapped is None) == (theirs is None)
    if wrapped is None or theirs is None:
        return iter([(value, got)])
    return iter([(tensor, theirs[name]) for name, tensor in wrapped.items()])


def _share(whole: Tensor, here: Tensor, group: Group, index: int, reference: torch.optim.Optimizer) -> Tensor:
    """What a rank must hold of a state with one value per element, per row or block, or of another shape."""
    spec, piece = group.layout.params[index], group.held[index]
    if whole.shape == spec.shape:
        return held_part(group, index, whole)
    if here.numel() == whole.numel():
        return whole.flatten()
    needed = needed_by(reference)
    assert needed is not None
    part = needed.numel if needed.kind == "block" else row_numel(spec.shape)
    return whole.flatten()[piece.start // part : -(-piece.stop // part)]


# -- models and data


def seeded(*key: int) -> torch.Generator:
    """A generator that depends on ``key`` alone."""
    seed = 17
    for part in key:
        seed = seed * 1009 + part
    return torch.Generator().manual_seed(seed)


def sample(rank: int, step: int, *shape: int, salt: int = 0) -> Tensor:
    """A rank's data of a step."""
    return torch.randn(*(shape or (3, 8)), generator=seeded(rank, step, salt))


class Block(nn.Module):
    """Two linears and a residual."""

    def __init__(self, dim: int = 8, wide: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(dim, wide)
        self.down = nn.Linear(wide, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Chain(nn.Module):
    """A stem, blocks one after the other, a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 5, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.stem = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of a model from (3, 8) samples to anything."""
    return model(sample(rank, step)).square().mean()
