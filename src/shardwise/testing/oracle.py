"""Comparison of a parallelized model with one plain process, bitwise, or within a tolerance if sums are split.

Every rank trains the parallelized model on its own data, and also one plain copy of the model for each reader, on that
reader's data. The copies' gradients are added up in rank order (with ``dp_replicate`` inside each group first), divided
by the number of readers and applied once: that is "one process". After every backward and every step, values,
gradients, parameters and optimizer state are compared. At the end ``sw.full_state_dict`` is compared too, every element
must have exactly one owner, and ranks with the same elements must have the same bits.

::

    def script(model, reader, step):  # on a plain copy and on the parallelized model alike
        return model(sample(reader, step)).square().mean()


    def on_a_rank():
        plan = sw.ParallelPlan(strategy="zero3")
        compare_with_one_process(build, script, lambda model: sw.parallelize(model, plan))


    run_on_ranks(on_a_rank, 2)

A *script* runs one step. ``script(model, reader, step)`` returns the loss, whose backward is then called. Or it is a
generator that runs backwards itself, and after each of them yields the values to compare: a tensor, a list of tensors,
:class:`Waiting` or :class:`Mean`. Ranks of one reader (along ``tp``, ``pp``, ``cp``) have the same data.

If a layout splits a sum that one process computes at once (``tp``, ``cp``, ``ep``, parameters shared by stages), pass a
``tolerance`` (``shardwise.spec.tolerances.tolerance``). Values and norms are then compared relatively, parameters
absolutely, and gradients and optimizer state not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.api import model as calls
from shardwise.api import train_step as whole_step
from shardwise.comm.dtype import as_real, memory_order
from shardwise.engine.storage.attachment import attachment_of
from shardwise.engine.storage.optimizer import needed_by
from shardwise.optim.clip import clip_grad_norm
from shardwise.optim.in_backward import optimizer_in_backward
from shardwise.parallel.pipeline.batch import LossFn, forward_loss, split_batch
from shardwise.spec.extent import Extent
from shardwise.spec.granularity import row_numel
from shardwise.spec.tolerances import Tolerance
from shardwise.testing.probe import Probe, Shard, checks, optimizer_state, part_of, probe
from shardwise.weights.state.model import full_state_dict

Script = Callable[[nn.Module, int, int], Any]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]

#: Integer dtypes by bytes of an element.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Waiting(list):
    """Values to compare when no gradients exist yet: after a backward that does not synchronize, or after none."""


class Mean(list):
    """Values for which a rank has the mean over all readers, as ``sw.train_step`` returns it."""


@dataclass
class Comparison:
    """The state after :func:`compare_with_one_process`, for further checks.

    Attributes:
        model: The parallelized model, after training.
        plain: The plain copy of this rank's reader.
        optimizer: The optimizer of ``model``.
        probe: The probe of ``model``.
        norms: Norms of the gradients in each step, before clipping; empty without ``max_norm``.
    """

    model: nn.Module
    plain: nn.Module
    optimizer: torch.optim.Optimizer
    probe: Probe
    norms: list[float]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shapes, dtypes and all bits are equal: -0.0 differs from 0.0, and a NaN equals the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def train_step(
    model: nn.Module, batch: Any, loss_fn: LossFn | None = None, num_microbatches: int | None = None
) -> Mean:
    """``sw.train_step`` for scripts, which yield its result. It also works on a plain copy.

    On a plain copy microbatches are added up before readers, as with ``pp`` and ``accumulation="unsharded"``.
    """
    if attachment_of(model) is not None:
        return Mean([whole_step.train_step(model, batch, loss_fn, num_microbatches)])
    parts = split_batch(batch, num_microbatches or 1)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        loss = forward_loss(model, part, loss_fn)
        (loss / len(parts) if len(parts) > 1 else loss).backward()
        total += loss.detach().double()
    return Mean([total / len(parts)])


@contextlib.contextmanager
def gradient_sync(model: nn.Module, is_enabled: bool) -> Iterator[None]:  # noqa: FBT001 - as sw.gradient_sync
    """``sw.gradient_sync`` for scripts; no effect on a plain copy. Inside, if disabled, scripts yield ``Waiting``."""
    is_plain = attachment_of(model) is None
    with contextlib.nullcontext() if is_plain else calls.gradient_sync(model, is_enabled):
        yield


def compare_with_one_process(
    build: Callable[..., nn.Module],
    script: Script,
    parallelize: Callable[[nn.Module], object],
    *,
    where: str = "comparison",
    **options: Any,
) -> Comparison:
    """Train a parallelized model and plain copies of it, and compare everything; to be called inside ``run_on_ranks``.

    Args:
        build: Builds the model, with the same weights each time.
        script: Runs a step.
        parallelize: Parallelizes the model, in place.
        where: Name of the comparison in messages.
        **options: See :func:`compare_each_with_one_process`: ``steps``, ``optimizer``, ``tolerance``, ...

    Returns:
        The models and the optimizer after training.

    Collective:
        Those of training and of ``sw.full_state_dict``, and an all-gather of the ranks' extents. All ranks must call.

    Raises:
        AssertionError: A value differs; the message names the value and the step.
    """
    return compare_each_with_one_process(build, script, {where: parallelize}, **options)[where]


def compare_each_with_one_process(
    build: Callable[..., nn.Module],
    script: Script,
    parallelize: Mapping[str, Callable[[nn.Module], object]],
    *,
    steps: int = 4,
    optimizer: OptimizerFactory | None = None,
    parameters: Callable[[nn.Module], Any] = nn.Module.parameters,
    given: Callable[[nn.Module], Any] | Mapping[str, Callable[[nn.Module], Any]] | None = None,
    between: Callable[[nn.Module, int], None] | None = None,
    prepare_plain: Callable[[nn.Module], object] | None = None,
    max_norm: float | None = None,
    in_backward: bool = False,
    tolerance: Tolerance | None = None,
    is_checked: bool = True,
    heals: bool = False,
    shares_buffers: bool = True,
    builds_by_rank: bool = False,
) -> dict[str, Comparison]:
    """Compare several parallelized models with the same plain copies, step by step, so that copies are trained once.

    Models with a different "one process" get separate copies: different readers, groups or ignored parameters, or a
    different ``accumulation`` if the script is a generator. Scripts are called for each model in turn and must not keep
    state between calls. Parameters that the plan ignores are separate on each rank: a rank's copy steps with its own
    gradients of them.

    Args:
        build: Builds the model, with the same weights each time.
        script: Runs a step.
        parallelize: Functions that parallelize the model in place, by the name of the comparison in messages.
        steps: Optimizer steps.
        optimizer: Makes an optimizer from parameters; by default AdamW with lr 1e-2.
        parameters: Returns the parameters of the plain model for its optimizer.
        given: The same for the parallelized models, or for each by name; by default ``parameters``.
        between: Called with the model and the number of the step after each step, for all models and copies.
        prepare_plain: Called with each plain copy before training, to apply changes of the plan other than distribution
            (such as the capacity of experts).
        max_norm: Norm to which gradients are clipped before the step; norms are compared (``math.inf``: only compared).
        in_backward: The parallelized model's optimizer steps inside backward (``sw.optimizer_in_backward``), so that no
            gradient may exist afterwards.
        tolerance: Tolerance of the comparison, if sums are split; ``None``: bitwise.
        is_checked: Fill released buffers with NaN and check saved tensors (``checks``).
        heals: Saved tensors may lose their data and be restored; if false, none may.
        shares_buffers: All copies use the first copy's buffers, as the plan keeps buffers equal.
        builds_by_rank: ``build`` takes the rank, because ranks have different ignored parameters.

    Returns:
        The models and optimizers after training, by name of the comparison.
    """
    make = optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2))
    rank = torch.distributed.get_rank()
    sides: dict[Hashable, list[_Side]] = {}
    for where, apply in parallelize.items():
        model = build(*([rank] if builds_by_rank else []))
        apply(model)
        gets = (given.get(where) if isinstance(given, Mapping) else given) or parameters
        side = _Side(where, model, make(gets(model)), probe(model))
        if in_backward:
            optimizer_in_backward(model, side.ours)
        sides.setdefault(side.one_process(script), []).append(side)
    found: dict[str, Comparison] = {}
    for group in sides.values():
        num_readers = group[0].inside.reader[1]
        copies = _copies(build, prepare_plain, num_readers, builds_by_rank=builds_by_rank)
        shares = _share_buffers(copies) if shares_buffers else []
        reference = make(parameters(copies[0]))
        judges = [_Judge(copies, reference, side, tolerance, in_backward) for side in group]
        ignored = _IgnoredParameters(copies, judges, make)
        with checks(is_enabled=is_checked):
            for step in range(steps):
                _one_step(judges, script, step=step)
                if max_norm is not None:
                    _clip(judges, max_norm, step)
                ignored.step(step)
                reference.step()
                for judge in judges:
                    judge.step(step)
                ignored.compare(reference, step)
                reference.zero_grad()
                _spread(copies, but=group[0].inside.ignored)
                if between is not None:
                    for model in (*copies, *(side.model for side in group)):
                        between(model, step)
        for share in shares:
            share()
        found |= {judge.side.where: judge.finish(heals=heals) for judge in judges}
    return {where: found[where] for where in parallelize}


@dataclass
class _Side:
    """A parallelized model in a comparison.

    Attributes:
        where: Name of the comparison in messages.
        model: The model.
        ours: The model's optimizer.
        inside: The model's probe.
    """

    where: str
    model: nn.Module
    ours: torch.optim.Optimizer
    inside: Probe

    def one_process(self, script: Script) -> Hashable:
        """A key of the "one process": sides with equal keys are compared with the same copies."""
        inside = self.inside
        accumulation = inside.accumulation if inspect.isgeneratorfunction(script) else None
        return inside.reader, inside.axes["dp_shard"], tuple(inside.ignored), accumulation

    def at(self, step: int, more: str = "") -> str:
        """The name and the step, for messages."""
        return f"{self.where}, step {step}{more}"


@dataclass
class _Judge:
    """Compares a parallelized model with the copies, and raises at a difference.

    Attributes:
        copies: Plain copies, one for each reader; the first one is "one process".
        reference: The optimizer of the first copy.
        side: The parallelized model.
        tolerance: Tolerance of the comparison; ``None``: bitwise.
        in_backward: ``side.ours`` steps inside backward.
    """

    copies: Sequence[nn.Module]
    reference: torch.optim.Optimizer
    side: _Side
    tolerance: Tolerance | None
    in_backward: bool

    def __post_init__(self) -> None:
        self.named = dict(self.copies[0].named_parameters(remove_duplicate=False))
        self.inside = self.side.inside
        self.norms: list[float] = []

    def step(self, step: int) -> None:
        """Step the optimizer, and compare parameters and its state with the reference's."""
        self.side.ours.step()
        self.parameters(self.side.at(step, ", after the optimizer"))
        self.optimizers(self.side.at(step))
        self.side.ours.zero_grad()

    def finish(self, *, heals: bool) -> Comparison:
        """Compare ownership and the full state dict, and return the result."""
        self.ownership()
        self.full_state()
        num_healed = self.inside.num_healed
        assert heals or not num_healed, f"{self.side.where}: {num_healed} saved tensors had lost their data"
        plain = self.copies[self.inside.reader[0]]
        return Comparison(self.side.model, plain, self.side.ours, self.inside, self.norms)

    def values(self, expected: Sequence[Any], got: Any, where: str) -> None:
        """Compare the values that the copies' scripts have yielded with this rank's."""
        if isinstance(got, Mean):
            means = zip(*expected, strict=True)
            for index, (all_of_it, value) in enumerate(zip(means, got, strict=True)):
                total = torch.stack([each.double() for each in all_of_it]).sum(0)
                mean = (total / len(expected)).to(value.dtype)
                self.value(mean, value, f"{where}: mean {index}")
            return
        mine = expected[self.inside.reader[0]]
        for index, (a, b) in enumerate(zip(_listed(mine), _listed(got), strict=True)):
            self.value(a.detach(), b.detach(), f"{where}: value {index}")

    def value(self, expected: Tensor, got: Tensor, where: str) -> None:
        """Compare a value of one process with this rank's."""
        if self.tolerance is None or not expected.any():
            assert same_bits(expected, got), f"{where} is {got}, not {expected}"
            return
        expected, got = as_real(expected).double(), as_real(got).double()
        difference = ((got - expected).abs().max() / expected.abs().max()).item()
        assert difference <= self.tolerance.relative, f"{where} is {got}, not {expected}: {difference:.1e} apart"

    def gradients(self, total: dict[str, Tensor], where: str) -> None:
        """Check that every ``.grad`` is the right part of ``total``, or ``None`` if no reader used the parameter."""
        difference: dict[str, float] = {}
        for shard in self.inside.shards:
            grad = shard.grad
            if self.in_backward:
                assert grad is None, f"{where}: {shard.name} still has a gradient, though its update was in backward"
                continue
            if shard.name not in total:
                assert grad is None, f"{where}: {shard.name} has a gradient, but no rank used it"
                continue
            if grad is None:
                assert shard.numel == 0 or shard.waits, f"{where}: {shard.name} has no gradient"
                continue
            if self.tolerance is not None:
                continue
            expected = shard.part_of(total[shard.name].expand(self.named[shard.name].shape))
            if not same_bits(grad, expected):
                difference[shard.name] = (grad - expected).abs().max().item()
        assert not difference, f"{where}: gradients are off by: {difference}"

    def parameters(self, where: str) -> None:
        """Check that every parameter of this rank is the right part of the plain parameter."""
        for shard in self.inside.shards:
            self._state(shard.part_of(self.named[shard.name]), shard.values, f"{where}: {shard.name}")

    def optimizers(self, where: str) -> None:
        """Check that the optimizer's state of every parameter is the right part of the reference's state."""
        if self.tolerance is not None:
            return
        states = optimizer_state(self.side.ours)
        for shard in self.inside.shards:
            if shard.numel == 0:
                continue  # the optimizer may or may not have state for an empty piece
            plain = self.named[shard.name]
            expected, got = self.reference.state.get(plain, {}), states.get(shard.parameter, {})
            assert expected.keys() == got.keys(), f"{where}: optimizer state of {shard.name} has {list(got)}"
            for key, value in expected.items():
                what = f"{where}: {key} of {shard.name}"
                if not isinstance(value, Tensor) or value.dim() == 0:
                    assert value == got[key], what
                elif value.shape != plain.shape or torch_private.wrapped_tensors(value):
                    for part, here in _parts(value, got[key]):
                        assert same_bits(here.flatten(), self._share_of_state(part, here, shard)), what
                else:
                    assert same_bits(memory_order(got[key]), shard.part_of(value)), what

    def ownership(self) -> None:
        """Check that every element has exactly one owner, and that ranks with the same elements have the same bits."""
        where = self.side.where
        owned = [extent for extent, _ in self.inside.owned_extents(self.side.ours)]
        extents = self.inside.extents()
        # Buffers are left out: they depend on this rank's last forward.
        digests = {extent: _digest(values) for extent, values in extents if not extent.name.startswith("buffer/")}
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, (owned, digests))
        owners: dict[str, Tensor] = {}
        for extent in itertools.chain.from_iterable(owned for owned, _ in everyone):
            _count(extent, owners.setdefault(extent.name, torch.zeros(extent.logical_numel, dtype=torch.int32)))
        for name, parameter in self.copies[0].named_parameters():
            if name not in self.inside.ignored and parameter.numel():
                assert name in owners, f"{where}: {name} is on no rank"
                for key, value in self.reference.state.get(parameter, {}).items():
                    if not isinstance(value, Tensor) or torch_private.wrapped_tensors(value):
                        continue  # a number, or several tensors with separate names
                    if value.shape == parameter.shape != ():
                        assert f"optimizer/{name}/{key}" in owners, f"{where}: {key} of {name} is on no rank"
        for name, count in owners.items():
            assert bool((count == 1).all()), f"{where}: an element of {name} has no owner, or two"
        for rank, (_, theirs) in enumerate(everyone):
            for extent in digests.keys() & theirs.keys():
                assert digests[extent] == theirs[extent], f"{where}: rank {rank} has other values of {extent.name}"

    def full_state(self) -> None:
        """Check that ``sw.full_state_dict`` on rank 0 equals the plain model's state dict."""
        plain = self.copies[0].state_dict()
        for name, got in full_state_dict(self.side.model).items():
            self._state(plain[name], got, f"{self.side.where}: {name} of the full state dict")

    def _state(self, expected: Tensor, got: Tensor, where: str) -> None:
        if self.tolerance is None:
            assert same_bits(got, expected), f"{where} is off by {(got - expected).abs().max()}"
        elif got.numel():
            difference = (as_real(got).double() - as_real(expected).double()).abs().max().item()
            assert difference <= self.tolerance.absolute, f"{where} is off by {difference:.1e}"

    def _share_of_state(self, whole: Tensor, here: Tensor, shard: Shard) -> Tensor:
        """This rank's part of a state with one value per element, per row or block, or of another shape."""
        if whole.shape == shard.shape:
            return shard.part_of(whole)
        if here.numel() == whole.numel():
            return whole.flatten()
        needed = needed_by(self.reference)
        assert needed is not None
        part = needed.numel if needed.kind == "block" else row_numel(shard.shape)
        return whole.flatten()[shard.start // part : -(-shard.stop // part)]


def _count(extent: Extent, owners: Tensor) -> None:
    """Add 1 to ``owners`` for each element of ``extent``, in memory order of the logical tensor."""
    if extent.cuts:
        owners[part_of(extent, torch.arange(owners.numel()).view(extent.shape))] += 1
    else:
        owners[extent.start : extent.stop] += 1


def _parts(value: Tensor, got: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The plain tensors of two states, as pairs."""
    wrapped, theirs = torch_private.wrapped_tensors(value), torch_private.wrapped_tensors(got)
    assert (wrapped is None) == (theirs is None)
    if wrapped is None or theirs is None:
        return iter([(value, got)])
    return iter([(tensor, theirs[name]) for name, tensor in wrapped.items()])


# -- one step


def _one_step(judges: Sequence[_Judge], script: Script, *, step: int) -> None:
    copies, inside = judges[0].copies, judges[0].inside
    runs = [_Run(script, each, index, step) for index, each in enumerate(copies)]
    mine = [_Run(script, judge.side.model, inside.reader[0], step) for judge in judges]
    sums = _Sums(copies, inside)
    for index in itertools.count():
        expected = [run.advance() for run in runs]
        got = [run.advance() for run in mine]
        at = [judge.side.at(step, f", backward {index}") for judge in judges]
        if any(value is _END for value in got):
            for value, label in zip([*got, expected[inside.reader[0]]], [*at, at[0]], strict=True):
                assert value is _END, f"{label}: the script ended early"
            break
        for judge, value, label in zip(judges, got, at, strict=True):
            judge.values(expected, value, label)
        sums.take(is_waiting=isinstance(got[0], Waiting))
        for judge, label in zip(judges, at, strict=True):
            judge.gradients(sums.total, label)
    for name, parameter in copies[0].named_parameters():
        if name not in inside.ignored:
            parameter.grad = sums.total.get(name)


class _Sums:
    """Sums of the copies' gradients in a step: in rank order, inside each group first, then divided."""

    def __init__(self, copies: Sequence[nn.Module], inside: Probe) -> None:
        size = inside.axes["dp_shard"]
        self.groups = [copies[first : first + size] for first in range(0, len(copies), size)]
        self.inside, self.num_copies = inside, len(copies)
        self.total: dict[str, Tensor] = {}
        self.waiting: list[dict[str, Tensor]] = [{} for _ in self.groups]  # sums that are not divided yet

    def take(self, *, is_waiting: bool) -> None:
        """Add the gradients of a backward of all copies."""
        if not is_waiting or self.inside.accumulation != "unsharded":
            for summed, group in zip(self.waiting, self.groups, strict=True):
                _add(summed, _summed(group, but=self.inside.ignored))
        if not is_waiting or self.inside.accumulation == "sharded":
            quotient: dict[str, Tensor] = {}
            for summed in self.waiting:
                _add(quotient, summed)
                summed.clear()
            _add(self.total, {name: grad / self.num_copies for name, grad in quotient.items()})


def _clip(judges: Sequence[_Judge], max_norm: float, step: int) -> None:
    """Clip gradients of copies and models, and compare the norms."""
    got = [clip_grad_norm(judge.side.model, max_norm) for judge in judges]
    grads = [as_real(p.grad) for p in judges[0].copies[0].parameters() if p.grad is not None]
    wide = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    norm = wide.to(got[0].dtype)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(coefficient)
    for judge, value in zip(judges, got, strict=True):
        judge.value(norm, value, judge.side.at(step, ": norm"))
        judge.norms.append(norm.item())


_END = object()


class _Run:
    """A running script, with a separate state of random numbers."""

    def __init__(self, script: Script, model: nn.Module, reader: int, step: int) -> None:
        is_generator = inspect.isgeneratorfunction(script)
        run = script(model, reader, step) if is_generator else _by_loss(script, model, reader, step)
        self._iterator: Iterator[Any] = run
        self._random = torch.Generator().manual_seed(31 * step + reader).get_state()

    def advance(self) -> Any:
        """Run to the next value, and return it; ``_END`` if there is none."""
        torch.set_rng_state(self._random)
        value = next(self._iterator, _END)
        self._random = torch.get_rng_state()
        return value


def _by_loss(script: Script, model: nn.Module, reader: int, step: int) -> Iterator[Any]:
    loss = script(model, reader, step)
    loss.backward()
    yield loss


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(_bits(tensor).cpu().numpy().tobytes()).digest()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.itemsize])


# -- the copies


def _copies(
    build: Callable[..., nn.Module],
    prepare: Callable[[nn.Module], object] | None,
    num_readers: int,
    *,
    builds_by_rank: bool,
) -> list[nn.Module]:
    """One prepared plain copy for each reader."""
    copies = [build(*([reader] if builds_by_rank else [])) for reader in range(num_readers)]
    if prepare is not None:
        for each in copies:
            prepare(each)
    return copies


def _summed(group: Sequence[nn.Module], *, but: Collection[str]) -> dict[str, Tensor]:
    """Sum the copies' gradients in rank order, and remove them from the copies."""
    summed: dict[str, Tensor] = {}
    for each in group:
        with_grad = {name: p for name, p in each.named_parameters() if name not in but and p.grad is not None}
        _add(summed, {name: p.grad for name, p in with_grad.items() if p.grad is not None})
        for parameter in with_grad.values():
            parameter.grad = None
    return summed


def _add(total: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, grad in more.items():
        total[name] = total[name] + grad if name in total else grad


def _spread(copies: Sequence[nn.Module], *, but: Collection[str]) -> None:
    """Copy the first copy's parameters to all other copies."""
    with torch.no_grad():
        for each in copies[1:]:
            for (name, target), source in zip(each.named_parameters(), copies[0].parameters(), strict=True):
                if name not in but:
                    target.copy_(source)


def _share_buffers(copies: Sequence[nn.Module]) -> list[Callable[[], None]]:
    """Set each copy's saved buffers, before each of its forwards, to those of the first copy before that forward.

    Returns functions that do so once more and remove the hooks.
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


class _IgnoredParameters:
    """Trains and compares the ignored parameters of every copy, whose gradients are not reduced."""

    def __init__(self, copies: Sequence[nn.Module], judges: Sequence[_Judge], optimizer: OptimizerFactory) -> None:
        self.sides, self.reader = [judge.side for judge in judges], judges[0].inside.reader[0]
        ignored = judges[0].inside.ignored
        self.copies = [{name: dict(each.named_parameters())[name] for name in ignored} for each in copies]
        # The reference optimizer has the first copy's parameters.
        self.optimizers = [optimizer(list(each.values())) for each in self.copies[1:]] if ignored else []

    def _each(self) -> Iterator[tuple[_Side, str, nn.Parameter, nn.Parameter]]:
        for side in self.sides:
            for name, expected in self.copies[self.reader].items():
                yield side, name, expected, side.inside.ignored[name]

    def step(self, step: int) -> None:
        """Compare the gradients, and step the optimizers."""
        for side, name, expected, mine in self._each():
            label = side.at(step, f": gradient of {name}, which is ignored")
            assert (mine.grad is None) == (expected.grad is None), label
            if mine.grad is not None and expected.grad is not None:
                assert same_bits(mine.grad, expected.grad), label
        for each in self.optimizers:
            each.step()

    def compare(self, reference: torch.optim.Optimizer, step: int) -> None:
        """Compare parameters and optimizer state, after the optimizers have stepped."""
        for side, name, expected, mine in self._each():
            label = side.at(step, f", after the optimizer: {name}, which is ignored")
            assert same_bits(mine, expected), label
            states = (self.optimizers[self.reader - 1] if self.reader else reference).state.get(expected, {})
            got = side.ours.state.get(mine, {})
            assert states.keys() == got.keys(), f"{label}: state"
            for key, value in states.items():
                assert same_bits(value, got[key]), f"{label}: {key}"
        for each in self.optimizers:
            each.zero_grad()
