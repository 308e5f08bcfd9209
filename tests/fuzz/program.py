"""Random programs: a model of blocks and what is done with it in each step, as plain data that can be printed and cut.

Every program is valid: what makes no sense (a backward through a graph that is gone) is left out when it runs, so that
the shrinker may remove anything.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """A block, as a rule a unit.

    Attributes:
        wide: Width inside.
        gives: What forward returns: ``plain`` a tensor, ``side`` a tuple with a second value, ``mapping`` a dict with a
            list in it, ``through`` a tuple with its second input unchanged, ``weight`` a tuple with one of its
            parameters, ``view`` with a part of one.
        takes_side: It computes with the newest second value of a block before.
        recompute: How the caller recomputes it: ``no``, ``reentrant`` or ``plain`` (not reentrant).
        inside: The same of a part of its forward.
        frozen: ``no``, ``all``, or ``up``: the first layer only.
        skips: Every so many forwards it is left out (0: never), ...
        skips_alone: ... and not on all ranks in the same ones.
        again: It is called once more behind the last block.
        dropout: There is some.
        inner: Blocks that it calls.
        is_unit: Otherwise its parameters belong to what encloses it.
    """

    wide: int = 12
    gives: str = "plain"
    takes_side: bool = False
    recompute: str = "no"
    inside: str = "no"
    frozen: str = "no"
    skips: int = 0
    skips_alone: bool = False
    again: bool = False
    dropout: bool = False
    inner: tuple[Node, ...] = ()
    is_unit: bool = True


@dataclass(frozen=True)
class Op:
    """A part of a step.

    Attributes:
        kind: ``forward``, ``backward``, ``evaluate``, ``fail`` (a forward that raises), ``stop`` (a backward that
            raises), ``input`` (the gradient of the input alone), ``turn`` (a block is frozen, or trained again).
        graph: Name of what a forward gives and a backward goes through.
        other: A second graph, if it is there: of a backward, whose loss is added; of a forward, whose ``y`` goes in.
        loss: Of a backward: ``y``, ``first`` (of the values beside it the first), ``side`` (all of them), ``both``.
        retains: The graph can be run backward again.
        syncs: Gradients are reduced.
        place: The block that fails, or that is frozen from now on if it is not, and trained if it is (``turn``).
    """

    kind: str = "forward"
    graph: int = 0
    other: int | None = None
    loss: str = "y"
    retains: bool = False
    syncs: bool = True
    place: int = 0


@dataclass(frozen=True)
class Program:
    """A model, how it is parallelized, and its steps."""

    seed: int = 0
    world: int = 2
    strategy: str = "zero3"
    route: str = "parallelize"
    reshard: str | bool = "auto"
    accumulation: str = "auto"
    num_buffers: int = 2
    merge: bool = False
    recompute: str = "none"
    is_checked: bool = False
    delays: bool = False
    nodes: tuple[Node, ...] = (Node(),) * 4
    segment: tuple[int, int, str] | None = None
    tied: str = "no"
    output: str = "tuple"
    is_stem_frozen: bool = False
    steps: tuple[tuple[Op, ...], ...] = ()

    def __str__(self) -> str:
        """What differs from the defaults, as Python that makes it."""
        return _text(self)

    @property
    def is_symmetric(self) -> bool:
        """All ranks run the same blocks."""
        return not any(node.skips_alone for node in self.nodes)

    @property
    def is_exact(self) -> bool:
        """Gradients are added in one order only.

        A reentrant recomputation adds a part of a gradient at a time, as does a unit that is reduced twice in one
        backward, because a part of the graph had been run backward before. A parameter that a block returns has one sum
        for each call of the block that a backward reaches.
        """
        ops = [op for step in self.steps for op in step]
        is_over_two = any(op.other is not None for op in ops)
        is_joint = is_over_two and any(op.retains for op in ops)
        returns = any(node.gives in ("weight", "view") for node in self._every_node())
        is_summed_by_call = returns and (is_over_two or any(node.again for node in self.nodes))
        return not (is_joint or is_summed_by_call or "reentrant" in self.recomputations)

    @property
    def recomputations(self) -> set[str]:
        """How anything is recomputed."""
        own = {self.segment[2]} if self.segment is not None else set()
        return own.union(*({node.recompute, node.inside} for node in self._every_node()))

    def _every_node(self) -> list[Node]:
        held = list(self.nodes)
        for node in held:
            held += node.inner
        return held


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    shown = ", ".join(f"{name}={_text(held)}" for name, held, default in fields if held != default)
    return f"{type(value).__name__}({shown})"


# -- from a seed


def generate(seed: int, world: int | None = None, *, may_differ: bool = False) -> Program:
    """The program of a seed; ``may_differ``: ranks may leave out different blocks, which the engine may refuse."""
    draw = random.Random(seed)
    chance = lambda p: draw.random() < p  # noqa: E731
    route = draw.choice(["parallelize"] * 4 + ["fully_shard"])
    strategy = (
        "zero3" if route == "fully_shard" else draw.choice(["zero3"] * 4 + ["shard_grad_op", "zero2", "zero1", "ddp"])
    )
    alike = chance(0.5)  # blocks of one size share slots
    wide = draw.choice([6, 12, 20])
    recompute_all = draw.choice(["no"] * 5 + ["reentrant", "plain"])
    skips_alone = chance(0.15) and route == "parallelize" and may_differ
    nodes = tuple(
        _node(draw, wide if alike else None, recompute_all, skips_alone=skips_alone) for _ in range(draw.randint(2, 7))
    )
    if sum(node.is_unit for node in nodes) < 2:  # nothing tells a rank that there might be more blocks
        nodes = tuple(dataclasses.replace(node, skips_alone=False) for node in nodes)
    nests = any(node.inner for node in nodes)
    recompute = "full" if route == "parallelize" and recompute_all == "no" and not nests and chance(0.12) else "none"
    segment = None
    if recompute_all == "no" and recompute == "none" and not skips_alone and chance(0.2):
        start = draw.randrange(len(nodes))
        segment = start, draw.randint(start + 1, len(nodes)), draw.choice(["reentrant", "plain"])
    return Program(
        seed=seed,
        world=world or draw.choice([2] * 5 + [3, 1]),
        strategy=strategy,
        route=route,
        reshard=draw.choice(["auto"] * 4 + [True, False]),
        accumulation=draw.choice(["auto", "auto", "sharded", "unsharded"]) if route == "parallelize" else "auto",
        num_buffers=draw.choice([1, 2]),
        merge=route == "parallelize" and chance(0.15),
        recompute=recompute,
        is_checked=chance(0.4),
        delays=chance(0.6),
        nodes=nodes,
        segment=segment,
        tied=draw.choice(["no"] * 4 + (["head", "blocks"] if route == "parallelize" else [])),
        output=draw.choice(["tuple", "mapping"]),
        is_stem_frozen=chance(0.15),
        steps=tuple(_step(draw, len(nodes)) for _ in range(draw.randint(2, 4))),
    )


def _node(draw: random.Random, wide: int | None, recompute: str, *, skips_alone: bool, depth: int = 0) -> Node:
    chance = lambda p: draw.random() < p  # noqa: E731
    inner = ()
    if depth == 0 and chance(0.15):
        inner = tuple(_node(draw, wide, "no", skips_alone=False, depth=1) for _ in range(draw.randint(1, 3)))
    skips = draw.choice([2, 3]) if depth == 0 and chance(0.15) else 0
    return Node(
        wide=wide or draw.choice([4, 9, 12, 20, 33]),
        gives=draw.choice(["plain"] * 4 + ["side", "side", "mapping", "through", draw.choice(["weight", "view"])]),
        takes_side=chance(0.3),
        recompute=recompute if recompute != "no" else draw.choice(["no"] * 7 + ["reentrant", "plain", "plain"]),
        inside=draw.choice(["no"] * 9 + ["reentrant", "plain"]),
        frozen=draw.choice(["no"] * 6 + ["all", "up"]),
        skips=skips,
        skips_alone=bool(skips) and skips_alone,
        again=depth == 0 and chance(0.1),
        dropout=chance(0.15),
        inner=inner,
        is_unit=chance(0.9),
    )


def _step(draw: random.Random, num_nodes: int) -> tuple[Op, ...]:
    """One step: its backwards come after their forwards, in any order."""
    chance = lambda p: draw.random() < p  # noqa: E731
    ops: list[Op] = []
    graphs: list[int] = []
    if chance(0.1):
        ops.append(Op("turn", place=draw.randrange(num_nodes)))
    for number in range(draw.choice([1, 1, 1, 2, 2, 3])):
        if chance(0.1):
            ops.append(Op("evaluate", place=number))
        if chance(0.06):
            ops.append(Op("fail", place=draw.randrange(num_nodes)))
        if chance(0.05):
            ops.append(Op("stop", place=draw.randrange(num_nodes)))
        ops.append(Op("forward", number, draw.choice(graphs) if graphs and chance(0.2) else None))
        graphs.append(number)
        if chance(0.6):
            ops += _backwards(draw, graphs)
    while graphs:
        ops += _backwards(draw, graphs)
    if chance(0.1):
        ops.append(Op("evaluate", place=9))
    return tuple(ops)


def _backwards(draw: random.Random, graphs: list[int]) -> Iterator[Op]:
    graph = graphs.pop(draw.randrange(len(graphs)))
    while True:
        retains = draw.random() < 0.25
        other = graphs.pop() if graphs and draw.random() < 0.2 else None
        if draw.random() < 0.05:
            yield Op("input", graph)
        yield Op(
            "backward",
            graph,
            other,
            loss=draw.choice(["y", "y", "both", "side", "first"]),
            retains=retains or draw.random() < 0.05,
            syncs=draw.random() < 0.75,
        )
        if not retains:
            return


# -- smaller ones


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest cuts first."""
    change = dataclasses.replace
    yield from (change(program, steps=steps) for steps in _shorter(program.steps))
    if len(program.nodes) > 1:
        yield from (change(program, nodes=nodes) for nodes in _shorter(program.nodes))
    for at, step in enumerate(program.steps):
        yield from (change(program, steps=_with(program.steps, at, ops)) for ops in _shorter(step))
    yield from _plainer(program, {"seed", "nodes", "steps"})
    for at, node in enumerate(program.nodes):
        yield from (change(program, nodes=_with(program.nodes, at, less)) for less in _smaller_node(node))
    for at, step in enumerate(program.steps):
        for index, op in enumerate(step):
            for less in _plainer(op, {"kind", "graph", "place"}):
                yield change(program, steps=_with(program.steps, at, _with(step, index, less)))


def _smaller_node(node: Node) -> Iterator[Node]:
    yield from _plainer(node, set())
    for index, inner in enumerate(node.inner):
        yield dataclasses.replace(node, inner=(*node.inner[:index], *node.inner[index + 1 :]))
        for less in _smaller_node(inner):
            yield dataclasses.replace(node, inner=_with(node.inner, index, less))


def _plainer(value: Any, kept: set[str]) -> Iterator[Any]:
    for field in dataclasses.fields(value):
        if field.name not in kept and getattr(value, field.name) != field.default:
            yield dataclasses.replace(value, **{field.name: field.default})


def _shorter(items: tuple) -> Iterator[tuple]:
    return (items[:index] + items[index + 1 :] for index in range(len(items)))


def _with(items: tuple, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
