"""Sketches of a step's values, module by module: under a plan, and in one process.

The step under the plan runs first, and keeps a sketch and the shape of each tensor. The step in one process has full
tensors, and keeps a sketch of each part with the shape that this rank had under the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.api.train_step import train_step
from shardwise.optim.clip import clip_grad_norm
from shardwise.parallel.experts.layer import RoutedMixture
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.parallel.pipeline.stage_module import Placeholder
from shardwise.parallel.tensor.agreement import GradientCheck
from shardwise.parallel.tensor.layer import Experts
from shardwise.spec.plan import ParallelPlan
from shardwise.testing.one_process import Job, OneProcess
from shardwise.testing.probe import Range, probe
from shardwise.testing.sketch import parts, sketch
from shardwise.testing.tap import GRADIENT, INPUT, INPUT_GRADIENT, LOSS, OUTPUT, OUTPUT_GRADIENT, VALUE, Point, Tap

Parallelize = Callable[[nn.Module, ParallelPlan], nn.Module]

#: The kind of point whose tensor has the same shape as a gradient.
_SHAPE_OF = {OUTPUT_GRADIENT: OUTPUT, INPUT_GRADIENT: INPUT}


def shape_point(point: Point) -> Point:
    """The point under which :attr:`Record.shapes` has the shape of ``point``."""
    return point._replace(kind=_SHAPE_OF.get(point.kind, point.kind))


@dataclass
class Record:
    """The record of a step. ``callers``, ``siblings``, ``fresh``, ``hooked`` and ``calls`` come from the ``Tap``.

    Attributes:
        shapes: Under a plan: shapes of this rank's tensors.
        ranges: Under a plan: the elements of each parameter on this rank.
        sketches: Sketches by point, then by the label of the part (under a plan: the empty label).
        axes: In one process: the axes that divide a part, by its label.
        ticks: In one process: time of each tensor, as a count of tensors in the step.
        terms: In one process: sketches of a parameter's gradient from each (reader, microbatch).
        callers: See :class:`~shardwise.testing.tap.Tap`.
        siblings: See :class:`~shardwise.testing.tap.Tap`.
        fresh: See :class:`~shardwise.testing.tap.Tap`.
        hooked: See :class:`~shardwise.testing.tap.Tap`.
        biases: In one process: the sketches of the biases that an output may have in every row.
        calls: Number of calls by path.
        spread: Under a plan: paths of modules in several stages of a pipeline.
        routed: Under a plan: paths of modules that compute the tokens of several ranks.
        captured: Full tensors of the requested points.
        tables: In one process: parameters with one or two dimensions of the captured points' modules, by name.
        at: In one process: size of each axis, and this rank's position on it.
        eps: The coarsest rounding among the parameters' dtypes.
    """

    shapes: dict[Point, torch.Size] = field(default_factory=dict)
    ranges: dict[Point, Range] = field(default_factory=dict)
    sketches: dict[Point, dict[str, Tensor]] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    ticks: dict[Point, int] = field(default_factory=dict)
    terms: dict[Point, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    callers: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    siblings: dict[Point, Point] = field(default_factory=dict)
    fresh: Collection[Point] = ()
    hooked: Collection[Point] = ()
    biases: dict[Point, list[list[float]]] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)
    spread: Collection[str] = ()
    routed: Collection[str] = ()
    captured: dict[Point, Tensor] = field(default_factory=dict)
    tables: dict[Point, list[tuple[str, Tensor]]] = field(default_factory=dict)
    at: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    eps: float = 0.0

    def add(self, point: Point, label: str, tensor: Tensor) -> None:
        """Add a tensor, or a term of it."""
        found = self.sketches.setdefault(point, {})
        found[label] = found[label] + sketch(tensor) if label in found else sketch(tensor)

    def capture(self, point: Point, tensor: Tensor) -> None:
        """Keep a tensor, or a term of it."""
        previous = self.captured.get(point)
        self.captured[point] = tensor.detach().clone() if previous is None else previous + tensor.detach()

    def keep_taps(self, tap: Tap) -> None:
        """Copy the tap's data on calls, and remove its hooks."""
        tap.remove()
        self.callers, self.siblings, self.calls = tap.callers, tap.siblings, tap.calls
        self.fresh, self.hooked = tap.fresh, tap.hooked


def record_plan(
    job: Job,
    plan: ParallelPlan,
    step: int,
    reader: int,
    *,
    parallelize: Parallelize,
    capture: Collection[Point],
) -> Record:
    """Train up to ``step`` under a plan, and record this step.

    Collective:
        Those of training. All ranks must call.
    """
    # The engine's comparison of copies is switched off: it would end a run that the record can explain.
    with mock.patch.object(GradientCheck, "install"), _same_random_numbers():
        model = parallelize(job.build_model(), plan)
        optimizer = job.make_optimizer(model)
        for readers in job.parts[:step]:
            train_step(model, iter(readers[reader]), job.loss_fn, len(readers[reader]), forward=job.forward)
            clip_grad_norm(model, job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        record = Record(spread=_of_several_stages(model))

        def note(point: Point, tensor: Tensor) -> None:
            if point.kind not in _SHAPE_OF:
                record.shapes[point] = tensor.shape
            record.add(point, "", tensor)
            if point in capture:
                record.capture(point, tensor)

        for name, buffer in _buffers(model, step):
            note(_point(name, VALUE), buffer)
        for shard in probe(model).shards:
            note(_point(shard.name, VALUE), shard.values)
            record.ranges[_point(shard.name, GRADIENT)] = shard.range
        microbatches = job.parts[step][reader]
        record.routed = {*_of_routed_tokens(model)}
        tap = Tap(model, note, unseen={*_around_stages(model)} | record.routed)
        try:
            train_step(model, iter(microbatches), job.loss_fn, len(microbatches), forward=job.forward)
        finally:
            record.keep_taps(tap)
        for shard in probe(model).shards:
            if shard.parameter.requires_grad and not shard.waits:
                note(_point(shard.name, GRADIENT), torch.zeros_like(shard.values) if shard.grad is None else shard.grad)
    return record


def _buffers(model: nn.Module, step: int) -> Iterable[tuple[str, Tensor]]:
    """The buffers to compare: all before step 0, and none later, because running statistics then differ by rank."""
    return () if step else model.named_buffers()


def _of_several_stages(model: nn.Module) -> set[str]:
    pipelined = pipelined_of(model)
    modules = [] if pipelined is None else pipelined.layout()[0].modules
    spread = [path for module in modules if module.stage is None for path in module.paths]
    return {path for path, _ in model.named_modules() if any(f"{path}.".startswith(f"{each}.") for each in spread)}


def _around_stages(model: nn.Module) -> Iterator[str]:
    """Paths of modules whose calls have no meaning: those that enclose a pipeline's stage modules, and placeholders."""
    pipelined = pipelined_of(model)
    modules = [] if pipelined is None else pipelined.layout()[0].modules
    paths = [path for module in modules for path in module.paths]
    for path, module in model.named_modules():
        is_around = any(each.startswith(f"{path}." if path else "") and each != path for each in paths)
        if is_around or isinstance(module, Placeholder):
            yield path


def _of_routed_tokens(model: nn.Module) -> Iterator[str]:
    """Paths of modules that compute the tokens of several ranks."""
    for path, module in model.named_modules():
        layer = module.__dict__.get("forward")
        layer = layer.inner if isinstance(layer, Experts) else layer
        if isinstance(layer, RoutedMixture) and layer.comm is not None:
            experts = getattr(module, "experts", module)
            inside = {id(each) for each in experts.modules()} - {id(module)}
            yield from (f"{path}.{name}" for name, each in module.named_modules() if id(each) in inside)


def record_one_process(
    job: Job,
    plan: Record,
    step: int,
    reader: int,
    *,
    group_size: int,
    at: Mapping[str, tuple[int, int]],
    capture: Collection[Point],
    dtype: torch.dtype | None,
) -> Record:
    """Train up to ``step`` in one process, and record the tensors that this rank should have computed under the plan.

    Args:
        job: The training.
        plan: This rank's record of the same step under the plan.
        step: The step.
        reader: This rank's reader.
        group_size: See :class:`~shardwise.testing.one_process.OneProcess`.
        at: Size of each axis, and this rank's position on it.
        capture: Points whose full tensors are kept.
        dtype: Dtype to which the model and floating-point tensors of the batches are converted; ``None``: unchanged.
    """
    with _same_random_numbers():
        model = job.build_model()
        if dtype is not None:
            model = model.to(dtype)
            job = dataclasses.replace(job, parts=tree_map(lambda leaf: _converted(leaf, dtype), job.parts))
        reference = OneProcess(job, group_size, model)
        for readers in job.parts[:step]:
            reference.backward(readers)
            reference.update()
        return _Recording(reference, plan, reader, at, capture).run(job.parts[step], step)


def _converted(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


class _Recording:
    """Records a step in one process."""

    def __init__(
        self,
        reference: OneProcess,
        plan: Record,
        reader: int,
        at: Mapping[str, tuple[int, int]],
        capture: Collection[Point],
    ) -> None:
        floats = [p.dtype for p in reference.model.parameters() if p.is_floating_point()]
        self.record = Record(at=at, eps=max((torch.finfo(dtype).eps for dtype in floats), default=0.0))
        self._reference, self._plan, self._reader, self._at, self._capture = reference, plan, reader, at, capture
        self._tap: Tap | None = None
        self._time = self._count = 0
        named = reference.model.named_parameters(remove_duplicate=False)
        self._parameters = {_point(name, GRADIENT): parameter for name, parameter in named}
        self._handles: list[Any] = []
        self._sums: dict[Point, Tensor] = {}

    def run(self, readers: Any, step: int) -> Record:
        record, ranges = self.record, self._plan.ranges
        for name, buffer in _buffers(self._reference.model, step):
            self._note(_point(name, VALUE), buffer)
        for point, own in ranges.items():
            if point in self._parameters:
                at = point._replace(kind=VALUE)
                self._keep(at, own.part_of(self._parameters[point]))
        self._time, self._count = 1, len(readers[self._reader])
        self._reference.backward(readers, self._begins)
        for point, own in ranges.items():
            parameter = self._parameters.get(point)
            if parameter is not None and parameter.grad is not None:
                self._keep(point, own.part_of(parameter.grad))
                record.terms[point] = {at: term / len(readers) for at, term in record.terms[point].items()}
        for point in self._capture:
            owner = self._reference.model.get_submodule(point.path) if point.path != LOSS else nn.Module()
            record.tables[point] = [(name, p.detach()) for name, p in owner.named_parameters() if p.dim() in {1, 2}]
        return record

    def _keep(self, point: Point, part: Tensor) -> None:
        self.record.add(point, "", part)
        self.record.ticks.setdefault(point, self._time if point.kind == GRADIENT else 0)
        if point in self._capture:
            self.record.capture(point, part)

    def _note(self, point: Point, tensor: Tensor) -> None:
        self._time += 1
        self.record.ticks[point] = self._time if point.kind != VALUE else 0
        shape = self._plan.shapes.get(shape_point(point))
        if shape is None:
            return
        for part in parts(tensor.shape, shape, self._at):
            self.record.axes[part.label] = part.axis
            self.record.add(point, part.label, part.take(tensor))
        if point.kind == OUTPUT:
            vectors = (
                p for p in self._reference.model.get_submodule(point.path).parameters(recurse=False) if p.dim() == 1
            )
            found = [sketch(vector.expand(shape)).tolist() for vector in vectors if vector.shape == shape[-1:]]
            self.record.biases[point] = found
        if point in self._capture:
            self.record.capture(point, tensor)

    def _begins(self, reader: int, microbatch: int) -> None:
        if microbatch:
            self._add_terms(reader, microbatch - 1)
        else:
            self._sums = {}
        if reader == self._reader and microbatch == 0:
            self._tap = Tap(self._reference.model, self._note)
            trained = [(point, p) for point, p in self._parameters.items() if p.requires_grad]
            self._handles = [p.register_hook(functools.partial(self._arrived, point)) for point, p in trained]
        elif reader == self._reader and microbatch == self._count and self._tap is not None:
            self.record.keep_taps(self._tap)
            for handle in self._handles:
                handle.remove()

    def _arrived(self, point: Point, _gradient: Tensor) -> None:
        self._time += 1
        self.record.ticks[point] = self._time

    def _add_terms(self, reader: int, microbatch: int) -> None:
        for point, own in self._plan.ranges.items():
            parameter = self._parameters.get(point)
            if parameter is None or parameter.grad is None:
                continue
            total = sketch(own.part_of(parameter.grad))
            before = self._sums.get(point)
            self._sums[point] = total
            terms = self.record.terms.setdefault(point, {})
            terms[reader, microbatch] = total if before is None else total - before


def _point(name: str, kind: str) -> Point:
    path, _, attribute = name.rpartition(".")
    return Point(path, kind, 0, attribute)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Seed the random state for a block, and restore the process's state afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield
