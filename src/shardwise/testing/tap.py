"""Hooks that report every input and output of a module, and the gradients of both.

Nothing is added to the model's graph. The gradient of an output comes from a hook on the tensor. Outputs with other
uses, such as a parameter that a module returns, are left out: units return different tensors with the same values, and
only their outer uses have gradients. The gradient of an input is the part that *this* module contributes: the terms
that the nodes of its call pass to the input's node, found by a walk from the outputs. The total gradient of the input
tensor may have further terms, for example from a residual connection.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise import torch_private
from shardwise.nested import tensors_in

#: Kinds of points. The first four belong to calls, the others to parameters and buffers.
INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "input", "output", "gradient of the output", "gradient of the input"
VALUE, GRADIENT = "value", "gradient"
#: Kinds of points of backward.
GRADIENTS = (INPUT_GRADIENT, OUTPUT_GRADIENT, GRADIENT)

#: Path of the code that calls the model, and computes the loss from its output.
LOSS = "(loss)"


class Point(NamedTuple):
    """The identity of a tensor in a step.

    Attributes:
        path: Path of the module.
        kind: Kind of the tensor: ``INPUT``, ``OUTPUT``, ...
        call: Number of the module's call in this step, from 0.
        name: Number of the input or output, or the attribute of a parameter.
    """

    path: str
    kind: str
    call: int = 0
    name: str = "0"


@dataclass
class _Frame:
    """An unfinished call of a module."""

    path: str
    call: int
    since: int
    inputs: list[Tensor]
    inputs_inside: list[tuple[weakref.ref[Tensor], Point]] = field(default_factory=list)


class Tap:
    """Calls ``note`` with the tensors of a model's steps until :meth:`remove`.

    Attributes:
        callers: For each call, the call whose forward made it, as (path, number).
        siblings: For the input gradient of each call, that of the first call by the same caller with the same tensor.
            If several layers read one tensor, a plan may add up their gradients before any of them returns.
        hooked: Gradients of outputs that are reported if they exist.
        fresh: Inputs that the caller has computed: they are not its own inputs, nor inputs of an earlier call.
        calls: Number of calls, by path.
    """

    def __init__(
        self, model: nn.Module, note: Callable[[Point, Tensor], None], *, unseen: Collection[str] = ()
    ) -> None:
        self.callers: dict[tuple[str, int], tuple[str, int]] = {}
        self.siblings: dict[Point, Point] = {}
        self.fresh: set[Point] = set()
        self.hooked: set[Point] = set()
        self.calls: Counter[str] = Counter()
        self._note = note
        self._frames: list[_Frame] = [_Frame(LOSS, 0, 0, [])]
        self._again: dict[str, _Frame] = {}
        self._without_graph: dict[str, list[int]] = {}
        self._handles: list[RemovableHandle] = []
        for path, module in model.named_modules():
            if path not in unseen:
                before, after = functools.partial(self._enter, path), functools.partial(self._leave, path)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        since, inputs = torch_private.next_sequence_number(), [*_floats((args, dict(kwargs)))]
        if torch_private.current_backward() != -1:  # a recomputation, which may end early
            if self._without_graph.get(path):
                self._again[path] = _Frame(path, self._without_graph[path].pop(0), since, inputs)
            return
        call, around = self.calls[path], self._frames[-1]
        self.calls[path] += 1
        self.callers[path, call] = around.path, around.call
        for index, tensor in enumerate(inputs):
            point = Point(path, INPUT_GRADIENT, call, str(index))
            known = (first for reference, first in around.inputs_inside if reference() is tensor)
            self.siblings[point] = first = next(known, point)
            if first is point:
                around.inputs_inside.append((weakref.ref(tensor), point))
                if not any(tensor is each for each in around.inputs):
                    self.fresh.add(point._replace(kind=INPUT))
            self._note(Point(path, INPUT, call, str(index)), tensor.detach())
        self._frames.append(_Frame(path, call, since, inputs))

    def _leave(self, path: str, _module: nn.Module, _args: object, output: object) -> None:
        made = [*_floats(output)]
        if torch_private.current_backward() != -1:
            frame = self._again.pop(path, None)
            if frame is not None:
                self._watch(frame, made)
            return
        while len(self._frames) > 1 and self._frames[-1].path != path:
            self._frames.pop()  # this call raised
        frame = self._frames.pop()
        for index, tensor in enumerate(made):
            self._note(Point(path, OUTPUT, frame.call, str(index)), tensor.detach())
        if any(tensor.requires_grad for tensor in made):
            self._watch(frame, made)
        else:
            self._without_graph.setdefault(path, []).append(frame.call)

    def _watch(self, frame: _Frame, made: list[Tensor]) -> None:
        """Register hooks that report the gradients of a call."""
        note = self._note
        for index, tensor in enumerate(made):
            if tensor.requires_grad and not _has_other_uses(tensor, frame, made):
                point = Point(frame.path, OUTPUT_GRADIENT, frame.call, str(index))
                tensor.register_hook(functools.partial(note, point))
                self.hooked.add(point)
        edges = {}
        for index, tensor in enumerate(frame.inputs):
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):  # a parameter may have other uses inside
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                edges.setdefault((edge.node, edge.output_nr), str(index))
        for node, places in _nodes_before(made, edges, frame.since):
            points = {index: Point(frame.path, INPUT_GRADIENT, frame.call, name) for index, name in places.items()}
            node.register_hook(functools.partial(_show, note, points))


def _has_other_uses(tensor: Tensor, frame: _Frame, made: list[Tensor]) -> bool:
    """Whether the gradient of an output has other terms too, because it is, for example, a parameter or an input."""
    inputs = [*frame.inputs, *(reference() for reference, _ in frame.inputs_inside)]
    return tensor.is_leaf or any(tensor is each for each in inputs) or sum(tensor is each for each in made) > 1


def _show(note: Callable[[Point, Tensor], None], points: Mapping[int, Point], gradients: Any, _taken: object) -> None:
    """Hook of a node of the graph; ``gradients`` are those that the node passes on."""
    for index, point in points.items():
        if gradients[index] is not None:
            note(point, gradients[index].detach())


def _nodes_before(
    made: list[Tensor], edges: Mapping[tuple[Any, int], str], since: int
) -> Iterator[tuple[Any, dict[int, str]]]:
    """The nodes made since ``since`` that pass gradients to ``edges``, with names by index of the gradient."""
    nodes: list[Any] = [tensor.grad_fn for tensor in made]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if torch_private.sequence_number(node) < since:
            continue
        places = {}
        for index, edge in enumerate(node.next_functions):
            if edge in edges:
                places[index] = edges[edge]
            else:
                nodes.append(edge[0])
        if places:
            yield node, places


def _floats(value: object) -> Iterator[Tensor]:
    """The floating-point and complex tensors in nested arguments or outputs."""
    return (each for each in tensors_in(value) if each.is_floating_point() or each.is_complex())
