"""One rank's stages: how the model's own forward is run for one of them.

Every element's ``forward`` is replaced on the instance. In a pass of stage ``s`` the elements of ``s`` compute. Those
of other stages give what this rank received of them, or zeros where nobody needs it. After the stage's last element an
exception ends the model's forward, inside the hooks of the model, for which the pass is an ordinary call.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shardwise.comm.base import Comm
from shardwise.comm.control import agree, all_gather_json
from shardwise.pipeline.agreement import Agreement
from shardwise.pipeline.element import Element, own_forward
from shardwise.pipeline.split import StandIn
from shardwise.pipeline.trace import Flow, Leaf, Source, Tracer, inside_of_blocks, shape_key, zeros
from shardwise.spec.errors import RankDisagreement, StateError

#: Kinds of batches that are remembered.
_MAX_FLOWS = 256


class Stages:
    """The stages of a model, of which this rank holds some.

    Args:
        model: What :func:`~shardwise.pipeline.split.drop_foreign` has left of it.
        sketch: Its sketch, whole.
        elements: Its elements, with their stages.
        num_stages: Of all ranks.
        device: Where activations are.
        comm: Over the ranks of the pipeline, which must agree on what goes from stage to stage; ``None``: nobody.
    """

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
        self._flows: OrderedDict[Hashable, Flow] = OrderedDict()
        self.keepers: dict[str, int] = {}  # which stage has the state of an element that every stage holds
        self._tracer: Tracer | None = None
        self._pass: _Pass | None = None
        self._sketch = sketch
        self._model = weakref.ref(model)
        self._root = own_forward(model)
        me: weakref.ref[Stages] = weakref.ref(self)
        for index, element in enumerate(elements):
            if not isinstance(element.module, StandIn):
                element.forward = own_forward(element.module)
                element.module.register_forward_hook(_AfterElement(me))
            assert element.sketch is not None
            element.sketched = own_forward(element.sketch)
            for module in (element.module, element.sketch):
                module.__dict__["forward"] = _ElementForward(me, index, module)
        model.__dict__["forward"] = _RootForward(self, model)

    @property
    def trains(self) -> bool:
        """The model is in training mode."""
        model = self._model()
        return model is not None and model.training

    def key(self, batch: Any) -> Hashable:
        """What batches of one flow have in common, in the model's mode: its text is the same on every rank."""
        model = self._model()
        assert model is not None
        return shape_key(batch), model.training, torch.is_grad_enabled()

    def flow(
        self, batch: Any, call: Callable[[nn.Module, Any], Any], agreement: Agreement | None = None
    ) -> tuple[Hashable, Flow]:
        """What goes from stage to stage for batches of this shape.

        Args:
            batch: A microbatch.
            call: Calls the model with it.
            agreement: That the other ranks have a batch of this shape; waited for where the shape is new.

        Collective:
            All-gather of one integer along ``pp`` for a shape that is new. All ranks must call.

        Raises:
            PlanError: The model cannot be run stage by stage.
            RankDisagreement: The stages would not understand each other.
        """
        model = self._model()
        assert model is not None
        key = self.key(batch)
        if key not in self._flows:
            if agreement is not None:
                agreement.wait()
            self._sketch.train(model.training)
            flow = self._trace(batch, call)
            if self._comm is not None and len(set(found := agree(self._comm, flow.digest))) > 1:
                odd = next(rank for rank, digest in enumerate(found) if digest != found[0])
                shapes = all_gather_json(self._comm, shown_shapes(batch))
                raise RankDisagreement(
                    "the ranks of a pipeline disagree about what goes from stage to stage: rank 0 along pp has"
                    f" microbatches of {shapes[0]}, rank {odd} of {shapes[odd]}.\n"
                    "  Give the same batch to every rank of a pipeline, and build the same model."
                )
            self._flows[key] = flow
            if len(self._flows) > _MAX_FLOWS:  # on every rank alike
                self._flows.popitem(last=False)
            self.keepers.update(flow.keepers)
        self._flows.move_to_end(key)
        return key, self._flows[key]

    def _trace(self, batch: Any, call: Callable[[nn.Module, Any], Any]) -> Flow:
        try:
            return self._traced(batch, call, writes_in_place=False)
        except RuntimeError:  # what takes no memory cannot be written to, which torch says in several ways
            try:
                return self._traced(batch, call, writes_in_place=True)
            except NotImplementedError as error:
                if "meta tensor" in str(error):
                    raise inside_of_blocks() from error
                raise

    def _traced(self, batch: Any, call: Callable[[nn.Module, Any], Any], *, writes_in_place: bool) -> Flow:
        devices = [] if self.device.type != "cuda" else [self.device]
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            self._tracer = Tracer(self.device, writes_in_place=writes_in_place)
            try:
                output = call(self._sketch, batch)
                return self._tracer.finish(output, self.num_stages)
            finally:
                self._tracer = None

    def run(self, stage: int, flow: Flow, received: Mapping[Source, Tensor], forward: Callable[[], Any]) -> Any:
        """One pass of a stage.

        Args:
            stage: Which of this rank's.
            flow: Of batches of this shape.
            received: What the stage before has handed on.
            forward: Calls the model with the microbatch.

        Returns:
            What the stage hands to the next one, in the order of ``flow.crossing``; of the last stage what ``forward``
            returns.
        """
        self._pass = _Pass(stage, flow, received, is_last=stage == self.num_stages - 1)
        try:
            return forward()
        finally:
            self._pass = None

    def call_element(self, element: Element, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An element was called."""
        if self._tracer is not None:
            return self._tracer.call(element, args, kwargs)
        if self._pass is None:
            raise _not_whole(element.name)
        return self._pass.call(element, args, kwargs, self.device)

    def after_element(self, output: Any) -> None:
        """An element has returned ``output``."""
        if self._pass is not None:
            self._pass.after_call(output)

    def call_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model was called."""
        if self._pass is None:
            raise _not_whole("the model")
        self._pass.number = 0
        try:
            return self._root(*args, **kwargs)
        except _StageEnd:
            return self._pass.handed_on()


class _StageEnd(Exception):  # noqa: N818 - no error; an Exception, because torch then still runs hooks that ask for it
    """The stage has computed everything."""


class _Pass:
    """One pass of one stage."""

    def __init__(self, stage: int, flow: Flow, received: Mapping[Source, Tensor], *, is_last: bool) -> None:
        self.number = 0  # of the next call
        self._stage = stage
        self._flow = flow
        self._received = received
        self._is_last = is_last
        self._made: dict[Source, Tensor] = {}

    def call(self, element: Element, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
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
            return element.forward(*args, **kwargs)
        if call.stage == self._stage:
            return element.forward(*args, **kwargs)
        received, flow = self._received, self._flow

        def give(place: int, leaf: Leaf) -> Any:
            assert leaf.dtype is not None
            given = received.get((number, place))
            if given is None:
                given = zeros(leaf.shape, leaf.dtype, device)
            return given.clone(memory_format=torch.contiguous_format) if flow.writes_in_place else given

        return call.give(tree_flatten((args, kwargs))[0], give)

    def after_call(self, output: Any) -> None:
        """The newest call has returned ``output``, and the module's hooks have run.

        Raises:
            _StageEnd: It was the stage's last.
        """
        number, flow = self.number - 1, self._flow
        if self._is_last or flow.calls[number].stage != self._stage or flow.calls[number].leaves is None:
            return
        self._keep(number, output)
        if number == flow.last_call[self._stage]:
            raise _StageEnd

    def _keep(self, number: int, output: Any) -> None:
        wanted = [source for source in self._flow.crossing[self._stage] if source[0] == number]
        if wanted:
            leaves = tree_flatten(output)[0]
            goes_on = self._flow.writes_in_place and number != self._flow.last_call[self._stage]
            for source in wanted:
                leaf = leaves[source[1]]
                self._made[source] = leaf.clone() if goes_on else leaf

    def handed_on(self) -> tuple[Tensor, ...]:
        every = {**self._received, **self._made}
        return tuple(every[source] for source in self._flow.crossing[self._stage])


class _ElementForward:
    """Stands for an element's ``forward``."""

    def __init__(self, stages: weakref.ref[Stages], index: int, module: nn.Module) -> None:
        self._stages = stages
        self._index = index
        if not isinstance(module, StandIn):
            self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages = self._stages()
        assert stages is not None
        return stages.call_element(stages.elements[self._index], args, kwargs)


class _AfterElement:
    """Forward hook of an element, after all others."""

    def __init__(self, stages: weakref.ref[Stages]) -> None:
        self._stages = stages

    def __call__(self, _module: nn.Module, _args: object, output: object) -> None:
        stages = self._stages()
        if stages is not None:
            stages.after_element(output)


class _RootForward:
    """Stands for the model's ``forward``."""

    def __init__(self, stages: Stages, model: nn.Module) -> None:
        self._stages = stages
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stages.call_root(args, kwargs)


def _not_whole(what: str) -> StateError:
    return StateError(
        f"{what} was called, but this rank holds some of its pipeline stages only.\n"
        "  Call sw.train_step(model, batch, ...) on every rank, or sw.eval_step where nothing is trained."
    )


def shown_shapes(batch: Any) -> str:
    """The shapes of a batch's tensors, for a message."""
    leaves = tree_flatten(batch)[0]
    return ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)) or "no tensors"
