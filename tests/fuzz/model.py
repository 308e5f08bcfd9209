"""The model of a program, and the script that runs one of its steps on any copy of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.storage.attachment import attachment_of
from tests.common.oracle import Waiting, sample
from tests.fuzz.program import Node, Op, Program

DIM = 8


class Stop(Exception):  # noqa: N818 - it ends a forward or a backward, on purpose
    """What a program raises on purpose."""


class _Breaks(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> Tensor:
        raise Stop


class Inner(nn.Module):
    """What a node says. Beside its tensor it may give a second one, packed in several ways."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.up = nn.Linear(DIM, node.wide)
        self.down = nn.Linear(node.wide, DIM)
        self.inner = nn.ModuleList(_block(each) for each in node.inner)
        self.fails = ""  # "forward" or "backward" while it is to raise
        if node.frozen != "no":
            (self if node.frozen == "all" else self.up).requires_grad_(False)

    def forward(self, x: Tensor, side: Tensor | None = None) -> Any:
        node = self.node
        if self.fails == "forward":
            raise Stop
        if node.takes_side and side is not None:
            x = x + 0.1 * side.mean()
        for block in self.inner:
            x, side, _ = unpack(call(block, x, side))
        h = _recomputed(self._hidden, node.inside, x)
        out = x + self.down(_Breaks.apply(h) if self.fails == "backward" else h)
        if node.gives == "plain":
            return out
        if node.gives == "through":
            return out, x if side is None else side
        if node.gives in ("weight", "view"):
            return out, self.down.weight if node.gives == "weight" else self.up.bias[1:]
        other = torch.sin(h).mean(-1)
        return (out, other) if node.gives == "side" else {"out": out, "more": [other]}

    def _hidden(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return F.dropout(h, 0.1, self.training) if self.node.dropout else h


class Unit(Inner):
    """A block that is a unit."""


def _block(node: Node) -> Inner:
    return (Unit if node.is_unit else Inner)(node)


def unpack(out: Any) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The value of a block, what the next one gets beside it, and what it has given beside it."""
    if isinstance(out, Tensor):
        return out, None, []
    value, other = (out["out"], out["more"][0]) if isinstance(out, dict) else out
    return value, other, [other]


def call(block: Inner, x: Tensor, side: Tensor | None) -> Any:
    how = block.node.recompute
    if how == "reentrant" and (block.node.gives == "mapping" or _gives_parameters(block)):
        how = "plain"  # torch's reentrant one cuts off what is not a tuple of tensors, and ties itself to parameters
    return _recomputed(block, how, x, side)


def _gives_parameters(module: nn.Module) -> bool:
    return any(isinstance(each, Inner) and each.node.gives in ("weight", "view") for each in module.modules())


def _recomputed(fn: Any, how: str, *args: Any) -> Any:
    return fn(*args) if how == "no" else checkpoint(fn, *args, use_reentrant=how == "reentrant")


class Model(nn.Module):
    """A stem, the blocks of a program, a head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(_block(node) for node in program.nodes)
        self.head = nn.Linear(DIM, DIM)
        if program.is_stem_frozen:
            self.stem.requires_grad_(False)
        if program.tied == "head":
            self.head.weight = self.stem.weight
        if program.tied == "blocks":
            first, last = self.blocks[0], self.blocks[-1]
            if first.node.wide == last.node.wide and first.node.frozen == last.node.frozen:
                last.up.weight = first.up.weight

    def forward(self, x: Tensor, turn: int, rank: int) -> Any:
        """The value ``y`` and what blocks have given beside theirs, from the samples of one forward.

        Args:
            x: The samples.
            turn: Number of the forward, which says what is left out.
            rank: Whose samples they are, for blocks that are not left out on all ranks together.
        """
        chosen = [
            block
            for place, block in enumerate(self.blocks)
            if not block.node.skips or (turn + place + rank * block.node.skips_alone) % block.node.skips
        ]
        chosen += [block for block in chosen if block.node.again]
        x = self.stem(x)
        segment = self.program.segment
        if segment is None:
            x, sides = self._run(chosen, x, None)
        else:
            start, stop, how = segment
            how = "plain" if _gives_parameters(self) else how
            x, sides = self._run(chosen[:start], x, None)
            held = sides[-1] if sides else None
            x, *more = _recomputed(lambda a, b: _flat(self._run(chosen[start:stop], a, b)), how, x, held)
            sides += more
            x, more = self._run(chosen[stop:], x, sides[-1] if sides else None)
            sides += more
        y = self.head(x)
        return {"y": y, "sides": sides} if self.program.output == "mapping" else (y, *sides)

    def _run(self, blocks: list[Inner], x: Tensor, side: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        sides = []
        for block in blocks:
            x, other, more = unpack(call(block, x, side))
            side = side if other is None else other
            sides += more
        return x, sides


def _flat(values: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, ...]:
    return values[0], *values[1]


# -- a step


def script(program: Program) -> Any:
    """What ``tests.common.oracle.compare`` runs on each copy."""

    def run(model: Model, rank: int, step: int) -> Iterator[Any]:
        under_way = _Step(program, model, rank)
        for turn, op in enumerate(_effective(program.steps[step]), 10 * step):
            values = getattr(under_way, op.kind)(op, turn)
            if values is not None:
                yield values

    return run


class _Step:
    """One step under way; each kind of op is a method, which returns the values to compare."""

    def __init__(self, program: Program, model: Model, rank: int) -> None:
        self.program, self.model, self.rank = program, model, rank
        self.graphs: dict[int, tuple[Any, Tensor]] = {}  # what each forward gave, and its input
        self.has_gradients = False
        self.waits = False  # gradients have not been reduced yet

    def forward(self, op: Op, turn: int) -> None:
        x = sample(self.rank, turn)
        if self.program.is_stem_frozen:
            x.requires_grad_()
        before = 0.0 if op.other is None else _values(self.graphs[op.other][0])[0]
        self.graphs[op.graph] = self.model(x + before, turn, self.rank), x

    def turn(self, op: Op, _turn: int) -> None:
        block = self.model.blocks[op.place % len(self.model.blocks)]
        block.requires_grad_(not block.up.bias.requires_grad)

    def evaluate(self, _op: Op, turn: int) -> Any:
        with torch.no_grad():  # all ranks take one path
            y, _ = _values(self.model.eval()(sample(self.rank, turn), turn, 0))
        self.model.train()
        return Waiting([y])

    def fail(self, op: Op, turn: int) -> None:
        if self.program.is_symmetric:
            with self._failing(op, "forward"):
                self.model(sample(self.rank, turn), turn, self.rank)

    def stop(self, op: Op, turn: int) -> None:
        if self.program.is_symmetric and not self.has_gradients:  # else sums would be lost, and it would say so
            with self._failing(op, "backward"):
                loss(self.model(sample(self.rank, turn), turn, self.rank), "y", self.program).backward()
            for parameter in self.model.parameters():
                parameter.grad = None

    @contextlib.contextmanager
    def _failing(self, op: Op, when: str) -> Iterator[None]:
        block = self.model.blocks[op.place % len(self.model.blocks)]
        block.fails = when
        with contextlib.suppress(Stop):
            yield
        block.fails = ""

    def _loss_of(self, op: Op) -> Tensor:
        total = loss(self.graphs[op.graph][0], op.loss, self.program)
        return total if op.other is None else total + loss(self.graphs[op.other][0], op.loss, self.program)

    def input(self, op: Op, _turn: int) -> Any:
        x = self.graphs[op.graph][1]
        if not x.requires_grad or self.waits or "reentrant" in self.program.recomputations:
            return None
        loss = self._loss_of(op)
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
        return Waiting([loss] if grad is None else [loss, grad])

    def backward(self, op: Op, _turn: int) -> Any:
        loss = self._loss_of(op)
        with _sync(self.model, is_on=op.syncs):
            loss.backward(retain_graph=op.retains)
        self.has_gradients, self.waits = True, not op.syncs
        return [loss] if op.syncs else Waiting([loss])


def _effective(ops: tuple[Op, ...]) -> Iterator[Op]:
    """The ops that can be run; the last backward synchronises."""
    found: list[Op] = []
    alive: set[int] = set()
    behind: dict[int, set[int]] = {}  # the graphs that backward goes through
    for given in ops:
        if given.kind in ("backward", "input") and given.graph not in alive:
            continue
        is_whole = given.other in alive and given.other != given.graph
        op = given if is_whole else dataclasses.replace(given, other=None)
        reached = {op.graph} if op.kind == "forward" else set(behind.get(op.graph, ()))
        if op.other is not None:
            reached |= behind[op.other]
        if op.kind == "forward":
            behind[op.graph] = reached
            alive.add(op.graph)
        elif op.kind == "backward" and not op.retains:
            alive -= {graph for graph in alive if behind[graph] & reached}
        found.append(op)
    last = max((place for place, op in enumerate(found) if op.kind == "backward"), default=-1)
    for place, op in enumerate(found):
        yield dataclasses.replace(op, syncs=op.syncs or place == last)


def _values(out: Any) -> tuple[Tensor, list[Tensor]]:
    return (out["y"], out["sides"]) if isinstance(out, dict) else (out[0], list(out[1:]))


def loss(out: Any, kind: str, program: Program) -> Tensor:
    """The loss of what a model gives: of ``y``, of the values beside it, or of both."""
    y, sides = _values(out)
    total = y.square().mean()
    if kind == "y" or not sides:
        return total
    beside = sum(side.cos().mean() for side in (sides[:1] if kind == "first" else sides))
    assert isinstance(beside, Tensor)
    if kind != "both" and beside.requires_grad and program.is_symmetric:
        return beside
    return total + beside


def _sync(model: Model, *, is_on: bool) -> contextlib.AbstractContextManager[None]:
    if attachment_of(model) is not None:
        return sw.gradient_sync(model, is_on)
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(is_on)
    return contextlib.nullcontext()
