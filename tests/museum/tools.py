"""The tools that a user has, run on a program inside the ranks: each returns what it found."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import CheckpointError, CommError, RankDisagreement, ShardwiseError
from shardwise.testing import Location, streams
from tests.museum.catalogue import ORDER, STREAMS, Bug, Finding
from tests.museum.programs import PROGRAMS, Program
from tests.streams import plans
from tests.streams import planted as of_streams

#: Steps of the script, and the one before which it is stopped, inside the second epoch.
STEPS, STOP = 6, 4
_SEED = 3


class Refused(Exception):  # noqa: N818 - it ends a tool
    """A check has ended the script."""

    def __init__(self, tool: str, error: BaseException) -> None:
        super().__init__(str(error))
        self.finding = of_error(tool, error)


class Ended(Exception):  # noqa: N818 - it ends a run of the ranks
    """A tool has ended otherwise than by a check that is alike on all ranks."""

    def __init__(self, tool: str, error: Exception) -> None:
        super().__init__(str(error))
        self.tool, self.error = tool, error


def names(bug: Bug) -> tuple[str, ...]:
    """The tools that a bug's program is run with."""
    if bug.program.startswith(STREAMS):
        return ("streams",)
    return ("order",) if bug.program.startswith(ORDER) else PROGRAMS[bug.program].tools


def run(bug: Bug, folder: Path, but: Collection[str] = ()) -> Iterator[tuple[str, list[Finding]]]:
    """Run every tool, but for some, on a bug's program, with the bug in it or not; yields what each found.

    Raises:
        Ended: One raised an error.
    """
    for tool in names(bug):
        if tool in but:
            continue
        try:
            if tool == "streams":
                yield tool, by_streams(bug.program.removeprefix(STREAMS))
            elif tool == "order":
                yield tool, by_order(bug.program.removeprefix(ORDER))
            else:
                yield tool, TOOLS[tool](PROGRAMS[bug.program], folder)
        except Exception as error:
            raise Ended(tool, error) from error


# -- parity


def by_parity(program: Program, _folder: Path) -> list[Finding]:
    """``sw.parity`` with ``locate=True`` on two steps."""
    count = program.rows * program.world * program.microbatches
    batches = [program.collate([program.sample(step * count + i) for i in range(count)]) for step in range(2)]
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built[:] = [program.build(_SEED)]
        return built[0]

    loss = program.loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = _report(
            build,
            batches,
            None if loss is None else lambda output, batch: loss(output, batch, built[0]),
            program,
        )
    (row,) = report.rows
    if row.holds and not isinstance(row.location, Location):
        return []
    module = row.location.module if isinstance(row.location, Location) else None
    said = str(row.location).splitlines()[:2] if module is not None else [row.verdict]
    found = [Finding("parity", " ".join(line.strip() for line in said), module)]
    if row.stopped:
        found.append(of_error("guard", RankDisagreement(row.stopped)))
    return found


def _report(build: Any, batches: Any, loss: Any, program: Program) -> Any:
    how: dict[str, Any] = {
        "optimizer": program.optimizer,
        "parameters": program.parameters,
        "max_norm": program.max_norm,
        "microbatches": program.microbatches,
        "scaler": (lambda: sw.GradScaler("cpu")) if program.scales else None,
        "parallelize": lambda model, plan: program.parallelize(model, plan, _SEED),
    }
    return sw.parity(build, batches, loss, {"plan": program.make_plan()}, locate=True, **how)


# -- a script, with check_replicas in it, which is stopped and resumed


class Script:
    """A training script."""

    def __init__(self, program: Program, seed: int, *, other: bool = False, resumes: bool = False) -> None:
        self.program = program
        self.num_samples = 6 * program.rows * program.microbatches  # three steps of two readers
        build = program.resumed if resumes and program.resumed is not None else program.build
        plan = program.make_plan(strategy="zero2") if other else program.make_plan()
        self.model = program.parallelize(build(seed), plan, seed)
        self.optimizer = program.optimizer(program.parameters(self.model))
        self.average = sw.ExponentialMovingAverage(self.model, decay=0.9)
        self.sampler = sw.DistributedSampler(self.num_samples, model=self.model, seed=1)
        self.scaler = sw.GradScaler("cpu") if program.scales else None
        self._indices: Iterator[int] | None = None
        self.losses: list[float] = []
        self.norms: list[float] = []
        torch.manual_seed(5 if program.seed_of is None else program.seed_of(sw.data_parallel_rank(self.model)))

    def train(self, steps: range) -> None:
        """Train some steps; the sampler gives each epoch's samples from where it stands."""
        size = self.program.rows * self.program.microbatches
        per_epoch = self.num_samples // (size * sw.data_parallel_size(self.model))
        for step in steps:
            if self._indices is None or step % per_epoch == 0:
                self.sampler.set_epoch(step // per_epoch)
                self._indices = iter(self.sampler)
            self.step([self.program.sample(index) for index in itertools.islice(self._indices, size)])

    def step(self, samples: list[Any]) -> None:
        program, loss = self.program, self.program.loss
        batch = program.collate(samples)
        count = None if "pp" in program.plan else program.microbatches
        mean = sw.train_step(
            self.model,
            batch,
            None if loss is None else lambda output, part: loss(output, part, self.model),
            count,
            scaler=self.scaler,
        )
        with self._named("check_replicas"):
            sw.check_replicas(self.model, self.optimizer, after_backward=True)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = sw.clip_grad_norm(self.model, program.max_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update()
        self.losses.append(mean.item())
        self.norms.append(norm.item())

    def evaluate(self) -> float:
        """The loss in evaluation, which uses what training has left in buffers.

        All ranks get the same samples: without gradients they must go through the same units.
        """
        batch = self.program.collate([self.program.sample(i) for i in range(self.program.rows)])
        loss = self.program.loss
        self.model.eval()
        mean = sw.eval_step(
            self.model, batch, None if loss is None else lambda output, part: loss(output, part, self.model)
        )
        self.model.train()
        return mean.item()

    def save(self, folder: Path, step: int) -> Path:
        """Save what it needs to go on."""
        path = folder / f"step-{step:08d}"
        state = {"sampler": self.sampler.state_dict()}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        save = sw.save_async if self.program.is_async else sw.save
        with self._named("checkpoint", CheckpointError):
            save(
                path,
                self.model,
                self.optimizer,
                state=state,
                average=self.average,
                rank_state={"torch": torch.get_rng_state().numpy().tobytes()},
            )
            if self.program.is_async:
                sw.finish_save(self.model)
        return path

    def load(self, path: Path) -> None:
        with self._named("checkpoint", CheckpointError):
            state = sw.load(path, self.model, self.optimizer, average=self.average)
        self.sampler.load_state_dict(state["sampler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if "rank_state" in state:
            torch.set_rng_state(torch.frombuffer(bytearray(state["rank_state"]["torch"]), dtype=torch.uint8))

    def weights(self) -> dict[str, Any]:
        """Whole weights on rank 0, and whole averages."""
        found = {name: _copy(value) for name, value in sw.full_state_dict(self.model).items()}
        with self.average.swapped_in():
            averaged = sw.full_state_dict(self.model)
        return found | {f"average of {name}": _copy(value) for name, value in averaged.items()}

    @contextlib.contextmanager
    def _named(self, tool: str, kind: type[ShardwiseError] = RankDisagreement) -> Iterator[None]:
        try:
            yield
        except kind as error:
            raise Refused(tool, error) from error


def by_script(program: Program, folder: Path) -> list[Finding]:
    """Train, saving on the way; begin anew from the checkpoint, and compare bit for bit what a user sees of both."""
    folder = folder / str(time.monotonic_ns() if dist.get_rank() == 0 else 0)
    folder = Path(_of_rank_0(str(folder)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _script(program, folder)
        except Refused as refused:
            return [refused.finding]


def _script(program: Program, folder: Path) -> list[Finding]:
    straight = Script(program, _SEED)
    straight.train(range(STOP - 1))
    straight.save(folder, STOP - 1)
    straight.train(range(STOP - 1, STOP))
    path = straight.save(folder, STOP)
    saved = straight.weights()
    straight.train(range(STOP, STEPS))
    elsewhere = Script(program, _SEED + 1, other=True, resumes=True)
    elsewhere.load(path)
    found = _apart("under another plan", saved, elsewhere.weights())
    resumed = Script(program, _SEED + 1, resumes=True)
    resumed.load(path)
    resumed.train(range(STOP, STEPS))
    for name in ("losses", "norms"):
        before, after = getattr(straight, name)[STOP:], getattr(resumed, name)
        pairs = enumerate(zip(before, after, strict=True), STOP)
        found += [f"{name} of step {step}: {a} and {b}" for step, (a, b) in pairs if repr(a) != repr(b)]
    before, after = straight.evaluate(), resumed.evaluate()
    found += [f"loss in evaluation: {before} and {after}"] if repr(before) != repr(after) else []
    found += _apart("after the last step", straight.weights(), resumed.weights())
    return [Finding("resume", found[0])] if (found := _of_rank_0(found)) else []


def _apart(when: str, left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """The first thing in which two states differ, by bits."""
    for name in left.keys() | right.keys():
        a, b = left.get(name), right.get(name)
        same = torch.equal(_bits(a), _bits(b)) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        if not same:
            return [f"{name} {when}"]
    return []


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _of_rank_0(value: Any) -> Any:
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def of_error(tool: str, error: BaseException) -> Finding:
    """A finding of an error; its module is that of the first parameter in the text."""
    text = first_line(error)
    named = re.search(r"([A-Za-z_][\w.]*)\.(?:weight|bias)\b", text)
    return Finding(tool, text, named and named[1])


def first_line(error: BaseException) -> str:
    """The kind of an error, and its first words."""
    text = re.sub(r"/\S*/(step-\d+)", r"\1", str(error))  # not where the checkpoint was
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return f"{type(error).__name__}: {first}" + (f" {lines[1]}" if first.endswith(":") and len(lines) > 1 else "")


# -- streams and orders


def by_streams(name: str) -> list[Finding]:
    """Train on the pretended device. The bug is planted by the caller."""
    seen, _ = of_streams.look(of_streams.BUGS[name].case)
    return [Finding("streams", str(seen.findings[0]).splitlines()[0])] if seen.findings else []


def by_order(case: str) -> list[Finding]:
    """Record the collectives of all ranks on the pretended device, and look for an interleaving that cannot end."""
    with contextlib.suppress(CommError):
        seen, _, _ = plans.run(case, {})
    own = [dataclasses.replace(each, where=()) for each in seen.collectives]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    try:
        streams.refuse_deadlocks(told)
    except streams.DeadlockError as error:
        return [Finding("order", first_line(error))]
    return []


TOOLS: dict[str, Callable[[Program, Path], list[Finding]]] = {"parity": by_parity, "script": by_script}
