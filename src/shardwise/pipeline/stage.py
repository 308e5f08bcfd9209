"""One rank's stages: how the model's own forward runs for one of them.

Every element's call is replaced on the instance. In a pass of stage ``s`` the elements of ``s`` compute, with their
hooks. Elements of other stages return what this rank received of them, or zeros that nothing uses. After the stage's
last element the next call of an element ends the model's forward by an exception, inside the engine's hooks of the
model, for which the pass is an ordinary call. What a checkpoint around elements computes again in backward (our GPT
with ``activation_checkpointing=True``) is no call of a pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shardwise.comm.base import Comm, Handle
from shardwise.comm.control import check_same, digest_text, refuse_different
from shardwise.pipeline.element import Element, lend_zeros, own_forward, zeros
from shardwise.pipeline.split import StandIn
from shardwise.pipeline.trace import Call, Leaf, Source, StageFlow, Tracer, inside_of_blocks, shape_key
from shardwise.spec.errors import PlanError, StateError


class Agreement:
    """The ranks are about to do the same step.

    Collective:
        An all-gather of 16 bytes per rank; :meth:`wait` waits for it.
    """

    def __init__(self, comm: Comm, step: str, shown: str, trained: bytes) -> None:
        self._comm, self._shown = comm, shown
        told = torch.zeros(comm.size, 2, dtype=torch.int64)
        told[comm.rank] = torch.tensor([digest_text(step), digest_text(trained)])
        host = comm.host  # the host reads it, and would wait for the device
        self._under_way: tuple[torch.Tensor, Handle] | None = told, host.all_gather(told.view(-1), unit="step")
        self._all_trained = 0

    def wait(self) -> int:
        """Wait for what the others have told.

        Returns:
            A number for which parameters are trained on all of them.

        Collective:
            Two all-gathers of JSON where the ranks disagree.
        """
        if self._under_way is not None:
            told, handle = self._under_way
            self._under_way = None  # it has no memory for the rest of the step
            handle.wait()
            rows = told.tolist()
            refuse_different(
                self._comm,
                [step for step, _ in rows],
                "the ranks of a pipeline disagree about the step",
                "Call the same on every rank of a pipeline, with the same batch and number of microbatches: let data"
                " loaders go by the data-parallel coordinate, not by the rank.",
                show=lambda: self._shown,
            )
            self._all_trained = digest_text(repr([trained for _, trained in rows]))
        return self._all_trained


#: Kinds of batches that are remembered.
_MAX_FLOWS = 256


class Stages:
    """The stages of a model, of which this rank holds some."""

    def __init__(
        self,
        model: nn.Module,
        sketch: nn.Module,
        elements: Sequence[Element],
        num_stages: int,
        *,
        device: torch.device,
        comm: Comm | None,
    ) -> None:
        self.num_stages = num_stages
        self.device = device
        self.elements = elements
        self._comm = comm
        self._flows: OrderedDict[Hashable, StageFlow] = OrderedDict()
        self.keepers: dict[str, int] = {}  # the stage that has the state of an element that every stage holds
        self._tracer: Tracer | None = None
        self.traces_evaluation = False
        self._without_grad: list[tuple[str, Tensor]] = []  # outputs of elements that were called with grad off
        self._pass: _Pass | _Again | None = None
        self._sketch = sketch
        self._model = weakref.ref(model)
        self._root = own_forward(model)
        me: weakref.ref[Stages] = weakref.ref(self)
        for index, element in enumerate(elements):
            if not isinstance(element.module, StandIn):
                element.forward = own_forward(element.module)
                _replace_call(element.module, _ElementCall(me, index, element.module))
            assert element.sketch is not None
            element.sketched = own_forward(element.sketch)
            for module in (element.module, element.sketch):
                module.__dict__["forward"] = _ElementForward(me, index, module)
        ids = {id(element.sketch) for element in elements}
        for encoder in sketch.modules():
            if isinstance(encoder, nn.TransformerEncoder) and any(id(layer) in ids for layer in encoder.layers):
                encoder.register_forward_pre_hook(functools.partial(_refuse_nested, me), with_kwargs=True)
        lend_zeros(sketch, elements, device)
        model.__dict__["forward"] = _RootForward(self, model)
        _replace_call(model, _RootCall(me, model))

    def stage_state(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every buffer that each rank has and one stage alone computes: its name, itself, that stage."""
        modules = {element.name: element.module for element in self.elements}
        for name, stage in sorted(self.keepers.items()):
            yield from ((f"{name}.{key}", buffer, stage) for key, buffer in modules[name].named_buffers())

    @property
    def trains(self) -> bool:
        """The model is in training mode."""
        model = self._model()
        return model is not None and model.training

    def key(self, batch: Any) -> Hashable:
        """What batches of one flow have in common; its text is the same on every rank."""
        model = self._model()
        assert model is not None
        return shape_key(batch), model.training, torch.is_grad_enabled()

    def flow(
        self, batch: Any, call: Callable[[nn.Module, Any], Any], agreement: Agreement | None = None
    ) -> tuple[Hashable, StageFlow]:
        """What goes from stage to stage for batches of this shape.

        Collective:
            All-gather of one integer along ``pp`` for a shape that is new. All ranks must call.
        """
        model = self._model()
        assert model is not None
        key = self.key(batch)
        if key not in self._flows:
            if agreement is not None:
                agreement.wait()
            self._sketch.train(model.training)
            flow = self._trace(batch, call)
            if self._comm is not None:
                check_same(
                    self._comm,
                    flow.digest,
                    "the ranks of a pipeline disagree about what goes from stage to stage",
                    "Give the same batch to every rank of a pipeline, and build the same model.",
                    show=lambda: f"microbatches of {shown_shapes(batch)}",
                )
            self._flows[key] = flow
            if len(self._flows) > _MAX_FLOWS:  # on every rank alike
                self._flows.popitem(last=False)
            self.keepers.update(flow.keepers)
        self._flows.move_to_end(key)
        return key, self._flows[key]

    def _trace(self, batch: Any, call: Callable[[nn.Module, Any], Any]) -> StageFlow:
        self.traces_evaluation = not torch.is_grad_enabled()
        try:
            return self._traced(batch, call, writes_in_place=False)
        except RuntimeError:  # what takes no memory cannot be written to, which torch says in several ways
            try:
                return self._traced(batch, call, writes_in_place=True)
            except NotImplementedError as error:
                if "meta tensor" in str(error):
                    raise inside_of_blocks() from error
                raise

    def _traced(self, batch: Any, call: Callable[[nn.Module, Any], Any], *, writes_in_place: bool) -> StageFlow:
        devices = [] if self.device.type != "cuda" else [self.device]
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            self._tracer = Tracer(self.elements, self.device, writes_in_place=writes_in_place)
            try:
                flow = self._tracer.run(lambda: call(self._sketch, batch), self._sketch, self.num_stages)
                for name, tensor in self._without_grad:
                    if not tensor.is_leaf or not tensor.requires_grad:
                        raise _reentrant(name)
                return flow
            finally:
                self._tracer = None
                self._without_grad.clear()

    def _traced_call(self, tracer: Tracer, element: Element, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = tracer.call(element, args, kwargs)
        if not torch.is_grad_enabled():
            made = (leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor))
            self._without_grad += [(element.name, leaf) for leaf in made if leaf.is_leaf and leaf.requires_grad]
        return output

    def run(self, stage: int, flow: StageFlow, received: Mapping[Source, Tensor], forward: Callable[[], Any]) -> Any:
        """One pass of a stage.

        Returns:
            The tensors for the next stage, in the order of ``flow.crossing``; of the last stage what ``forward``
            returns.
        """
        self._pass = _Pass(stage, flow, received, is_last=stage == self.num_stages - 1)
        try:
            return forward()
        finally:
            self._pass = None

    @contextlib.contextmanager
    def again(self, stage: int, flow: StageFlow, received: Mapping[Source, Tensor]) -> Iterator[None]:
        """Around the backward of a pass, in which checkpoints of the model's own call elements once more."""
        self._pass = _Again(stage, flow, received)
        try:
            yield
        finally:
            self._pass = None

    @property
    def is_inner(self) -> bool:
        """Whether the running pass is of a stage that does not return the model's output."""
        return isinstance(self._pass, _Pass) and not self._pass.is_last

    def call_element(
        self, element: Element, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of an element, which ``compute`` computes."""
        if self._tracer is not None:
            return self._traced_call(self._tracer, element, args, kwargs)
        if self._pass is None:
            raise _not_whole(element.name)
        return self._pass.call(element, compute, args, kwargs, self.device)

    def call_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model."""
        if not isinstance(self._pass, _Pass):
            raise _not_whole("the model")
        self._pass.number = 0
        try:
            output = self._root(*args, **kwargs)
        except _StageEnd:
            output = None
        return output if self._pass.is_last else self._pass.handed_on()


class _StageEnd(Exception):  # noqa: N818 - no error; an Exception, because torch then still runs hooks that ask for it
    """Ends the model's forward: the stage has computed everything."""


class _Pass:
    """One pass of one stage."""

    def __init__(self, stage: int, flow: StageFlow, received: Mapping[Source, Tensor], *, is_last: bool) -> None:
        self.number = 0  # of the next call
        self.is_last = is_last
        self._stage = stage
        self._flow = flow
        self._received = received
        self._made: dict[Source, Tensor] = {}
        self._has_grad = torch.is_grad_enabled()
        self._without_grad: list[tuple[str, Tensor]] = []  # outputs that were computed with grad off
        self._computing: Element | None = None
        self._is_over = False

    def call(
        self,
        element: Element,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        """What the element returns."""
        if self._computing is element:  # its forward, by its own call
            return compute(*args, **kwargs)
        if self._is_over:
            raise _StageEnd
        number, self.number = self.number, self.number + 1
        flow = self._flow
        call = flow.calls[number] if number < len(flow.calls) else None
        if call is None or call.element is not element:
            expected = "nothing more" if call is None else repr(call.element.name)
            raise StateError(
                f"the model's forward called {element.name!r} where it had called {expected} for the first batch of"
                " this shape: pipeline stages need the same path every time.\n"
                "  Take out what chooses by value or at random (layer drop), or set pp=1."
            )
        if call.leaves is None:
            return self._computed(element, compute, args, kwargs)
        if call.stage != self._stage:
            return _given(call, number, self._received, (args, kwargs), device, is_copied=flow.writes_in_place)
        output = self._computed(element, compute, args, kwargs)
        if not self.is_last:
            self._keep(number, output)
            self._is_over = number == flow.last_call[self._stage]
        return output

    def _computed(
        self, element: Element, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._computing = element
        try:
            return compute(*args, **kwargs)
        finally:
            self._computing = None

    def _keep(self, number: int, output: Any) -> None:
        wanted = [source for source in self._flow.crossing[self._stage] if source[0] == number]
        if wanted:
            leaves = tree_flatten(output)[0]
            for source in wanted:
                leaf = leaves[source[1]]
                self._made[source] = leaf.clone() if self._flow.writes_in_place else leaf
                if self._has_grad and not torch.is_grad_enabled():
                    self._without_grad.append((self._flow.calls[number].element.name, leaf))

    def handed_on(self) -> tuple[Tensor, ...]:
        """The tensors for the next stage."""
        for name, leaf in self._without_grad:
            if leaf.requires_grad:  # by now
                raise _reentrant(name)
        every = {**self._received, **self._made}
        return tuple(every[source] for source in self._flow.crossing[self._stage])


class _Again:
    """The backward of a pass, which may compute elements again."""

    def __init__(self, stage: int, flow: StageFlow, received: Mapping[Source, Tensor]) -> None:
        self._stage = stage
        self._flow = flow
        self._received = received

    def call(
        self,
        element: Element,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        """What the element returned in the pass."""
        flow = self._flow
        calls = [(number, call) for number, call in enumerate(flow.calls) if call.element is element]
        if all(call.leaves is None or call.stage == self._stage for _, call in calls):
            return compute(*args, **kwargs)
        if len(calls) > 1:
            raise StateError(
                f"a checkpoint in the model's forward computes {element.name!r} again, which the forward calls"
                f" {len(calls)} times on several pipeline stages: which of them this is cannot be known.\n"
                '  Checkpoint inside of it, or let shardwise do it: activation_checkpointing="full".'
            )
        ((number, call),) = calls
        return _given(call, number, self._received, (args, kwargs), device, is_copied=flow.writes_in_place)


def _given(
    call: Call,
    number: int,
    received: Mapping[Source, Tensor],
    arguments: Any,
    device: torch.device,
    *,
    is_copied: bool,
) -> Any:
    """What a call on another stage returns here."""

    def give(place: int, leaf: Leaf) -> Any:
        assert leaf.dtype is not None
        given = received.get((number, place))
        if given is None:
            given = zeros(leaf.shape, leaf.dtype, device)
        return given.clone(memory_format=torch.contiguous_format) if is_copied else given

    return call.give(tree_flatten(arguments)[0], give)


class _ElementCall:
    """Replaces the call, hooks included, of an element that this rank has."""

    def __init__(self, stages: weakref.ref[Stages], index: int, module: nn.Module) -> None:
        self._stages = stages
        self._index = index
        self._call = _own_call(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages = self._stages()
        assert stages is not None
        return stages.call_element(stages.elements[self._index], self._call, args, kwargs)


class _ElementForward:
    """Replaces an element's ``forward``."""

    def __init__(self, stages: weakref.ref[Stages], index: int, module: nn.Module) -> None:
        self._stages = stages
        self._index = index
        if not isinstance(module, StandIn):
            self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages = self._stages()
        assert stages is not None
        element = stages.elements[self._index]
        return stages.call_element(element, element.forward, args, kwargs)


class _RootForward:
    """Replaces the model's ``forward``."""

    def __init__(self, stages: Stages, model: nn.Module) -> None:
        self._stages = stages
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stages.call_root(args, kwargs)


class _RootCall:
    """Replaces the call of the model: inner stages run only the engine's hooks."""

    def __init__(self, stages: weakref.ref[Stages], model: nn.Module) -> None:
        self._stages = stages
        self._model = weakref.ref(model)
        self._call = _own_call(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages, model = self._stages(), self._model()
        assert model is not None
        hides = stages is not None and stages.is_inner
        with _hidden_hooks(model) if hides else contextlib.nullcontext():
            return self._call(*args, **kwargs)


@contextlib.contextmanager
def _hidden_hooks(model: nn.Module) -> Iterator[None]:
    """Hides the user's hooks on what ``model`` returns: an inner stage returns activations."""
    held = {name: model.__dict__[name] for name in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")}
    for name, hooks in held.items():
        ours = ((key, hook) for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("shardwise."))
        model.__dict__[name] = OrderedDict(ours)
    try:
        yield
    finally:
        model.__dict__.update(held)


def _refuse_nested(reference: weakref.ref[Stages], encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an encoder's sketch: raise on every rank where the model would make a nested tensor."""
    stages = reference()
    given = inspect.signature(encoder.forward).bind(*args, **kwargs).arguments
    makes_them = encoder.enable_nested_tensor and encoder.use_nested_tensor and not encoder.training
    is_padded = given.get("src_key_padding_mask") is not None and given.get("mask") is None
    if stages is not None and stages.traces_evaluation and makes_them and is_padded:
        raise PlanError(
            "nn.TransformerEncoder makes a nested tensor, which pipeline stages cannot send each other.\n"
            "  It does so in evaluation with src_key_padding_mask: build it with enable_nested_tensor=False; or set"
            " pp=1."
        )


def _own_call(module: nn.Module) -> Callable[..., Any]:
    """A module's call, hooks included, by a weak reference to the module."""
    compiled = module._compiled_call_impl  # noqa: SLF001 - what torch's own __call__ asks
    if compiled is not None:
        return compiled
    reference, function = weakref.ref(module), type(module)._call_impl  # noqa: SLF001 - the same

    def call(*args: Any, **kwargs: Any) -> Any:
        held = reference()
        assert held is not None
        return function(held, *args, **kwargs)

    return call


def _replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let ``module(...)`` call ``call``: on the instance, as its class and ``forward`` may be read by others."""
    compiled = module._compiled_call_impl  # noqa: SLF001
    module.__dict__["_call_impl" if compiled is None else "_compiled_call_impl"] = call


def _not_whole(what: str) -> StateError:
    return StateError(
        f"{what} was called, but this rank holds some of its pipeline stages only.\n"
        "  Call sw.train_step(model, batch, ...) on every rank, or sw.eval_step where nothing is trained."
    )


def _reentrant(name: str) -> PlanError:
    return PlanError(
        f"the model's forward calls {name!r} in a checkpoint with use_reentrant=True, which cuts off the gradients of"
        " what pipeline stages send each other.\n"
        '  Checkpoint with use_reentrant=False, or let shardwise do it: activation_checkpointing="full".'
    )


def shown_shapes(batch: Any) -> str:
    """The shapes of a batch's tensors, for a message."""
    leaves = tree_flatten(batch)[0]
    return ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)) or "no tensors"
