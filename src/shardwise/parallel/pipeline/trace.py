"""Tracing: finds the tensors that stages exchange, for one shape of batch, without computing the stage modules.

Every stage module returns zeros without memory, of the shapes that its meta copy returns. Operations between stage
modules really run on these zeros, and marks (``marks``) say from which modules' outputs a value was computed. All ranks
trace the same model, and find the same tensors.

A stage has the weights of its own modules, runs the model's forward up to its last module, and sees zeros in place of
other stages' results. So these are refused (docs/adr/0013-what-a-pipeline-follows.md): reading values of activations in
Python, using the weight of a stage module without calling the module, writing to buffers outside of all stage modules,
and using tensors from inside stage modules.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardwise import torch_private
from shardwise.comm.control import digest_text
from shardwise.nested import tensors_in
from shardwise.parallel.pipeline.marks import FlowMarks
from shardwise.parallel.pipeline.stage_module import StageModule, zeros
from shardwise.spec.errors import PlanError

#: An output of a stage module: the number of the call, and the index among the leaves of its result.
Source = tuple[int, int]
#: The mark of a parameter or buffer of a stage module: its name in the model, and the first module that has it.
Weight = tuple[str, str]


class Argument(NamedTuple):
    """A leaf of a call's result that is one of its arguments: the index among their leaves."""

    index: int


@dataclass
class Call:
    """One call of a stage module.

    Attributes:
        module: The stage module.
        inputs: Outputs of earlier calls from which its arguments were computed.
        leaves: The leaves of its result: a tensor on ``meta`` for a new tensor, an :class:`Argument`, or a constant.
            ``None`` for a call that runs on every stage, because it depends only on the batch.
        spec: The tree structure of the result.
        stage: The stage that computes it.
    """

    module: StageModule
    inputs: frozenset[Source]
    leaves: list[Any] | None = None
    spec: TreeSpec | None = None
    stage: int = 0

    def make_result(self, arguments: Sequence[Any], make: Callable[[int, Tensor], Any]) -> Any:
        """Return the result of the call, with new tensors from ``make``."""
        assert self.leaves is not None
        assert self.spec is not None
        values = []
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Argument):
                values.append(arguments[leaf.index])
            else:
                values.append(make(index, leaf) if isinstance(leaf, Tensor) else leaf)
        return tree_unflatten(values, self.spec)


@dataclass
class StageFlow:
    """The result of a trace.

    Attributes:
        calls: Calls of stage modules, in order.
        boundary: For each stage but the last, the tensors that it sends to the next one, in order: its own results, and
            received tensors that later stages need.
        last_call: The number of each stage's last call.
        writes_in_place: Whether the model writes to arguments or results of stage modules, as torchvision's VGG does
            (``nn.ReLU(inplace=True)``), so that placeholders need memory.
        announced: The shapes and dtypes that stages have announced in steps of this kind.
    """

    calls: list[Call]
    boundary: list[tuple[Source, ...]] = field(default_factory=list)
    last_call: list[int] = field(default_factory=list)
    writes_in_place: bool = False
    announced: dict[Hashable, Any] = field(default_factory=dict)

    def leaf(self, source: Source) -> Tensor:
        """Return a boundary tensor of the trace, on ``meta``."""
        leaves = self.calls[source[0]].leaves
        assert leaves is not None
        return leaves[source[1]]

    @property
    def digest(self) -> int:
        """A number that differs between different flows."""
        shown = [(call.module.name, call.stage, sorted(call.inputs)) for call in self.calls]
        boundary = [[(source, self.leaf(source).shape) for source in sources] for sources in self.boundary]
        return digest_text(repr((shown, boundary)))


class Tracer:
    """Traces one forward of a model's meta copy, whose stage modules redirect their calls to :meth:`call`."""

    def __init__(self, modules: Sequence[StageModule], device: torch.device, *, writes_in_place: bool = False) -> None:
        self._device = device
        self._writes_in_place = writes_in_place
        self._calls: list[Call] = []
        self._inside = tuple(f"{module.name}." for module in modules)
        self._marks = FlowMarks(self._read_error, None if device.type == "meta" else inner_tensor_error)
        for module in modules:
            for name, tensor in module.copied_tensors() if module.has_parameters else ():
                if not self._marks.of([tensor]):  # otherwise it is tied to an earlier one
                    self._marks.add(tensor, {(f"{module.name}.{name}", module.name)})

    def run(self, forward: Callable[[], Any], meta_copy: nn.Module, num_stages: int) -> StageFlow:
        """Trace ``forward``, which calls ``meta_copy``."""
        buffers = [
            (name, buffer, buffer._version)  # noqa: SLF001 - there is no public name
            for name, buffer in meta_copy.named_buffers()
            if not name.startswith(self._inside)
        ]
        with self._marks.propagate():
            output = forward()
        now = dict(meta_copy.named_buffers())
        for name, buffer, version in buffers:
            if now.get(name) is not buffer or buffer._version != version:  # noqa: SLF001 - the same
                raise _written_buffer_error(name)
        outside = [m for path, m in meta_copy.named_modules() if not f"{path}.".startswith(self._inside)]
        final = self._sources_of([*tensors_in(output), *tensors_in([v for m in outside for v in vars(m).values()], 4)])
        _assign_stages(self._calls, num_stages)
        boundary, last_call = _boundaries(self._calls, final, num_stages)
        return StageFlow(self._calls, boundary, last_call, self._writes_in_place)

    def call(
        self, module: StageModule, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Record a call of the meta copy of ``module``; returns a placeholder for its result."""
        if self._marks.is_paused:  # a nested call while shapes are computed
            return compute(*args, **kwargs)
        arguments, spec = tree_flatten((args, dict(kwargs)))
        number, call = len(self._calls), Call(module, self._sources_of(arguments))
        self._calls.append(call)
        if module.has_parameters:
            if not torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
                raise _no_grad_error(module.name)
            with self._marks.paused():
                output = self._compute_shapes(module, arguments, spec)
        else:
            versions, saved = _versions(arguments), module.saved_state()
            states = _versions(saved)
            output = compute(*args, **kwargs)
            found = self._sources_of(tree_leaves(output))
            # Unsaved buffers may change with the batch, as those of transformers' rotary embeddings do.
            if _versions(module.saved_state()) != states or self._sources_of(t for _, t in module.copied_tensors()):
                raise _state_error(module.name)
            # It depends only on the batch, or writes to its arguments: every stage runs it.
            if _versions(arguments) != versions or not found:
                return output
            call.inputs |= found
        leaves, call.spec = tree_flatten(output)
        argument_of = {id(each): Argument(index) for index, each in enumerate(arguments) if not _is_constant(each)}
        with self._marks.paused():  # detached: the flow is kept, and a graph would keep the traced batch's tensors
            detached = [leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call.leaves = [argument_of.get(id(leaf), meta) for leaf, meta in zip(leaves, detached, strict=True)]
        return call.make_result(arguments, lambda index, leaf: self._placeholder((number, index), leaf))

    def _compute_shapes(self, module: StageModule, arguments: Sequence[Any], spec: TreeSpec) -> Any:
        """Call the meta copy; arguments in its result are replaced by the given ones."""
        copies = [a if isinstance(a, Tensor) else _copied(a) for a in arguments]
        try:
            copied, versions, output = _attempt(module, arguments, spec, torch.device("meta"))
        except Exception as error:  # noqa: BLE001 - the module may need values, as Mixtral's experts do
            try:
                copied, versions, output = _attempt(module, copies, spec, self._device)
            except Exception as second:
                raise PlanError(
                    f"the shapes of what {module.name!r} returns could not be found, neither on the meta device"
                    f" ({type(error).__name__}: {error}) nor with zeros for weights and activations"
                    f" ({type(second).__name__}: {second}).\n"
                    "  Let it return tensors whose shapes follow from those that it takes, or set pp=1."
                ) from second
        written = {key for key, _ in {*_versions(copied)} - {*versions}}
        if written and not self._writes_in_place:
            raise WritesInPlaceError
        own = {
            id(a): b for a, b in zip(copied, arguments, strict=True) if isinstance(a, Tensor) and id(a) not in written
        }
        leaves, out_spec = tree_flatten(output)
        return tree_unflatten([own.get(id(leaf), leaf) for leaf in leaves], out_spec)

    def _placeholder(self, source: Source, leaf: Tensor) -> Tensor:
        made = zeros(leaf, self._device)
        if made.dtype.is_floating_point or made.dtype.is_complex:
            made.requires_grad_(torch.is_grad_enabled())
        self._marks.add(made, {source})
        return made.clone(memory_format=torch.contiguous_format) if self._writes_in_place else made

    def _sources_of(self, values: Iterable[Any]) -> frozenset[Source]:
        """Return the outputs of stage modules from which ``values`` were computed."""
        marks = self._marks.of(values)
        _refuse_weights(marks)
        return frozenset(marks)

    def _read_error(self, marks: set[Any]) -> PlanError:
        _refuse_weights(marks)
        return PlanError(
            f"the model's own forward reads values of what {self._calls[min(marks)[0]].module.name!r} returns"
            " (x.item(), x.tolist(), if x.any()), but only one pipeline stage has these values: others would take"
            " another path.\n  Read them inside of a block, use torch.where, or set pp=1."
        )


def _refuse_weights(marks: Iterable[Source | Weight]) -> None:
    weights = sorted(mark for mark in marks if isinstance(mark[0], str))
    if weights:
        several = f" (and {len(weights) - 1} more weights)" if len(weights) > 1 else ""
        raise PlanError(
            f"the model's own forward computes with {weights[0][0]!r}{several}, but a pipeline stage has only the"
            f" weights of its own modules.\n  Have forward call {weights[0][1]!r} instead of taking its weight;"
            " compute with it in a block; leave a penalty over weights to the optimizer (weight_decay); or set pp=1."
        )


def inner_tensor_error() -> PlanError:
    """Make the error for a model that uses a tensor from inside a block of another stage."""
    return PlanError(
        "the model's forward uses or returns tensors from inside its blocks that the blocks do not return, such as"
        " router logits or attention weights: a pipeline stage has only those of its own blocks.\n"
        "  Switch that off (output_router_logits=False, output_attentions=False), or set pp=1."
    )


def _written_buffer_error(name: str) -> PlanError:
    return PlanError(
        f"the model's own forward writes to the buffer {name!r} (self.{name.rpartition('.')[2]}.add_(...)), which every"
        " pipeline stage would do with other values.\n"
        "  Keep the buffer in the block that computes what is written to it, or set pp=1."
    )


def _state_error(name: str) -> PlanError:
    return PlanError(
        f"{name!r} has no parameters, so that every pipeline stage has it, but writes to its buffers, which would"
        " differ from stage to stage.\n"
        "  Move it into the block before it, give it parameters (nn.BatchNorm1d(affine=True)), or set pp=1."
    )


def _no_grad_error(name: str) -> PlanError:
    return PlanError(
        f"the model's forward calls {name!r} in a checkpoint with use_reentrant=True, or in torch.no_grad(), which"
        " cuts off the gradients of what pipeline stages send each other.\n"
        '  Checkpoint with use_reentrant=False, or let shardwise do it: activation_checkpointing="full".'
    )


class WritesInPlaceError(RuntimeError):
    """Raised when a placeholder without memory would be written to."""


def _attempt(
    module: StageModule, arguments: Sequence[Any], spec: TreeSpec, device: torch.device
) -> tuple[list[Any], list[tuple[int, int]], Any]:
    """Call the meta copy with copies of the arguments; returns the copies, their versions before, and the result."""
    copied = [a.detach().to(device, copy=True) if isinstance(a, Tensor) else a for a in arguments]
    versions = _versions(copied)
    args, kwargs = tree_unflatten(copied, spec)
    with torch_private.GroupedProducts():
        return copied, versions, module.compute_copy(args, kwargs, device)


def _copied(value: Any) -> Any:
    """Copy an argument to which the block may write, such as a cache; returned unchanged if it cannot be copied."""
    try:
        return value if _is_constant(value) else copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - an object's copy method may raise anything
        return value


def _versions(values: Iterable[Any]) -> list[tuple[int, int]]:
    """Return ``id`` and version counter of each tensor among ``values``."""
    return [(id(value), value._version) for value in values if isinstance(value, Tensor)]  # noqa: SLF001


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _assign_stages(calls: Sequence[Call], num_stages: int) -> None:
    """Set the stage of every call; modules without parameters run on the stage that makes their latest input."""
    for call in calls:
        latest = max(call.inputs, key=lambda source: calls[source[0]].stage, default=None)
        stage = 0 if latest is None else calls[latest[0]].stage
        call.stage = stage if call.module.stage is None else call.module.stage
        if latest is not None and stage > call.stage and call.leaves is not None:
            name, source = call.module.name, calls[latest[0]].module.name
            one_stage = "both be on one stage: PipelinePolicy(first_of_stage=...)."
            if any(other is not call and other.module is call.module for other in calls):
                why, advice = f"forward calls {name!r} more than once, with {source!r} in between", f"Let {one_stage}"
            else:
                why = "forward does not run its modules in the order in which they are registered, that of the stages"
                advice = (
                    f"Register {source!r} before {name!r}. A module that is deleted and set again comes last: norm ="
                    f" model.norm; del model.norm; model.norm = norm before sw.parallelize. Or let {one_stage}"
                )
            raise PlanError(
                f"{name!r} on pipeline stage {call.stage} takes what {source!r} on stage {stage} of {num_stages} gives:"
                f" the model's {why}.\n  {advice}"
            )


def _boundaries(
    calls: Sequence[Call], final: frozenset[Source], num_stages: int
) -> tuple[list[tuple[Source, ...]], list[int]]:
    needed_until: dict[Source, int] = dict.fromkeys(final, num_stages - 1)
    last_call = [-1] * num_stages
    for number, call in enumerate(calls):
        if call.leaves is None:
            continue
        last_call[call.stage] = number
        for source in call.inputs:
            needed_until[source] = max(needed_until.get(source, 0), call.stage)
    boundary = [
        tuple(sorted(source for source, last in needed_until.items() if calls[source[0]].stage <= stage < last))
        for stage in range(num_stages - 1)
    ]
    return boundary, last_call


def shape_key(batch: Any) -> Hashable:
    """Return the key that batches of the same shapes share."""
    leaves, spec = tree_flatten(batch)
    return str(spec), tuple(_kind(leaf) for leaf in leaves)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{list(leaf.shape)} {leaf.dtype}"
    if _is_constant(leaf) or isinstance(leaf, (torch.dtype, torch.device, enum.Enum)):
        return repr(leaf)
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"  # its repr may contain its address
