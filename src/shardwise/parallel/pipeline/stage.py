"""One rank's stages: how the model's own forward runs for one of them.

Every stage module's call is replaced on the instance. In a pass of stage ``s`` the modules of ``s`` compute, with their
hooks. Modules of other stages return what this rank received of them, or zeros that nothing uses. After the stage's
last module the next call of a stage module ends the model's forward by an exception, inside the engine's hooks of the
model, for which the pass is an ordinary call. What a checkpoint around stage modules computes again in backward (our
GPT with ``activation_checkpointing=True``) is no call of a pass.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.comm.base import Comm, Handle
from shardwise.comm.control import check_same, digest_text, refuse_different
from shardwise.parallel.pipeline.stage_module import StageModule, show_zeros, zeros
from shardwise.parallel.pipeline.trace import Source, StageFlow, Tracer, inside_of_blocks, shape_key
from shardwise.spec.errors import StateError


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
    """The stages of a model, of which this rank holds some.

    Attributes:
        compute_dtype: In a dry run the dtype of floating-point activations where units cast: the trace knows the
            model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        meta_copy: nn.Module,
        modules: Sequence[StageModule],
        num_stages: int,
        *,
        device: torch.device,
        comm: Comm | None,
    ) -> None:
        self.num_stages = num_stages
        self.device = device
        self.modules = modules
        self.compute_dtype: torch.dtype | None = None
        self._comm = comm
        self._flows: OrderedDict[Hashable, StageFlow] = OrderedDict()
        self._tracer: Tracer | None = None
        self._pass: _Pass | None = None
        self._meta_copy = meta_copy
        self._model = weakref.ref(model)
        self._own = model.__dict__.get("forward")  # another replacement of the class's method
        me: weakref.ref[Stages] = weakref.ref(self)
        for module in modules:
            for each in (module.module, module.meta_copy):
                _replace_call(each, me, module)
        show_zeros(meta_copy, modules, device)
        model.__dict__["forward"] = _RootForward(self, model)

    @property
    def trains(self) -> bool:
        """The model is in training mode."""
        model = self._model()
        return model is not None and model.training

    def key(self, batch: Any) -> Hashable:
        """The key that all batches of one flow share; its text is the same on every rank."""
        return shape_key(batch), self.trains, torch.is_grad_enabled()

    def flow(self, batch: Any, call: Callable[[nn.Module, Any], Any], agreement: Agreement | None = None) -> StageFlow:
        """The tensors between stages for batches of this shape.

        Collective:
            All-gather of one integer along ``pp`` for a shape that is new. All ranks must call.
        """
        key = self.key(batch)
        if key not in self._flows:
            if agreement is not None:
                agreement.wait()
            self._meta_copy.train(self.trains)
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
        self._flows.move_to_end(key)
        return self._flows[key]

    def _trace(self, batch: Any, call: Callable[[nn.Module, Any], Any]) -> StageFlow:
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
            self._tracer = Tracer(self.modules, self.device, writes_in_place=writes_in_place)
            try:
                return self._tracer.run(lambda: call(self._meta_copy, batch), self._meta_copy, self.num_stages)
            finally:
                self._tracer = None

    def run(self, stage: int, flow: StageFlow, received: Mapping[Source, Tensor], forward: Callable[[], Any]) -> Any:
        """One pass of a stage.

        Returns:
            The tensors for the next stage, in the order of ``flow.boundary``; of the last stage what ``forward``
            returns.
        """
        self._pass = _Pass(stage, flow, received, is_last=stage == self.num_stages - 1)
        try:
            with contextlib.nullcontext() if self._pass.is_last else _hidden_hooks(self._model()):
                return forward()
        finally:
            self._pass = None

    @contextlib.contextmanager
    def again(self, stage: int, flow: StageFlow, received: Mapping[Source, Tensor]) -> Iterator[None]:
        """Around the backward of a pass, in which checkpoints of the model's own call stage modules once more."""
        self._pass = _Pass(stage, flow, received, recomputes=True)
        try:
            yield
        finally:
            self._pass = None

    def call_module(self, module: StageModule, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A call of a stage module, which ``compute`` computes."""
        if self._tracer is not None:
            return self._tracer.call(module, compute, args, kwargs)
        if self._pass is None:
            raise _not_whole(module.name)
        return self._pass.call(module, compute, args, kwargs, self.device)

    def call_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model."""
        if self._pass is None or self._pass.recomputes:
            raise _not_whole("the model")
        model = self._model()
        assert model is not None
        try:
            output = (self._own or type(model).forward.__get__(model))(*args, **kwargs)
        except _StageEnd:
            output = None
        return output if self._pass.is_last else self._pass.handed_on()


class _StageEnd(Exception):  # noqa: N818 - no error; an Exception, because torch then still runs hooks that ask for it
    """Ends the model's forward: the stage has computed everything."""


class _Pass:
    """One pass of one stage, or its backward, in which checkpoints compute again."""

    def __init__(
        self,
        stage: int,
        flow: StageFlow,
        received: Mapping[Source, Tensor],
        *,
        is_last: bool = False,
        recomputes: bool = False,
    ) -> None:
        self._number = 0  # of the next call
        self.is_last = is_last
        self.recomputes = recomputes
        self._stage = stage
        self._flow = flow
        self._held = dict(received)  # with what this stage makes for the next ones
        self._is_over = False

    def call(
        self, module: StageModule, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any], device: torch.device
    ) -> Any:
        """Call the stage module, and return its output."""
        if self._is_over:
            raise _StageEnd
        number = self._place(module)
        call = self._flow.calls[number]
        if call.leaves is not None and call.stage != self._stage:
            return call.give(
                tree_leaves((args, kwargs)), lambda place, leaf: self._given((number, place), leaf, device)
            )
        output = compute(*args, **kwargs)
        if not (self.is_last or self.recomputes or call.leaves is None):
            self._keep(number, output)
            self._is_over = number == self._flow.last_call[self._stage]
        return output

    def _place(self, module: StageModule) -> int:
        """The number of a call of ``module``."""
        calls = self._flow.calls
        if self.recomputes:  # all calls of a module with parameters are on one stage
            return next(number for number, call in enumerate(calls) if call.module is module)
        number, self._number = self._number, self._number + 1
        if number >= len(calls) or calls[number].module is not module:
            expected = "nothing more" if number >= len(calls) else repr(calls[number].module.name)
            raise StateError(
                f"the model's forward called {module.name!r} where it had called {expected} for the first batch of"
                " this shape: pipeline stages need the same path every time.\n"
                "  Take out what chooses by value or at random (layer drop), or set pp=1."
            )
        return number

    def _given(self, source: Source, leaf: Tensor, device: torch.device) -> Tensor:
        """A tensor of another stage: received, or zeros that nothing uses."""
        given = self._held.get(source)
        if given is None:
            given = zeros(leaf, device)
        return given.clone(memory_format=torch.contiguous_format) if self._flow.writes_in_place else given

    def _keep(self, number: int, output: Any) -> None:
        wanted = [source for source in self._flow.boundary[self._stage] if source[0] == number]
        leaves = tree_leaves(output) if wanted else ()
        for source in wanted:
            leaf = leaves[source[1]]
            self._held[source] = leaf.clone() if self._flow.writes_in_place else leaf

    def handed_on(self) -> tuple[Tensor, ...]:
        """The tensors for the next stage."""
        return tuple(self._held[source] for source in self._flow.boundary[self._stage])


class _RootForward:
    """Replaces the model's ``forward``."""

    def __init__(self, stages: Stages, model: nn.Module) -> None:
        self._stages = stages
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stages.call_root(args, kwargs)


@contextlib.contextmanager
def _hidden_hooks(model: nn.Module | None) -> Iterator[None]:
    """Hides the user's hooks on what ``model`` returns: an inner stage returns activations."""
    assert model is not None
    held = {name: model.__dict__[name] for name in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")}
    for name, hooks in held.items():
        ours = ((key, hook) for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("shardwise."))
        model.__dict__[name] = OrderedDict(ours)
    try:
        yield
    finally:
        model.__dict__.update(held)


def _replace_call(module: nn.Module, reference: weakref.ref[Stages], called: StageModule) -> None:
    """Send calls of ``module``, hooks included: on the instance, as its class and ``forward`` may be read by others."""
    compiled = module._compiled_call_impl  # noqa: SLF001 - what torch's own __call__ asks
    itself, function = weakref.ref(module), type(module)._call_impl  # noqa: SLF001 - the same

    def compute(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if compiled is not None else function(itself(), *args, **kwargs)  # type: ignore[arg-type]

    def send(*args: Any, **kwargs: Any) -> Any:
        stages = reference()
        assert stages is not None
        return stages.call_module(called, compute, args, kwargs)

    module.__dict__["_call_impl" if compiled is None else "_compiled_call_impl"] = send


def _not_whole(what: str) -> StateError:
    return StateError(
        f"{what} was called, but this rank holds some of its pipeline stages only.\n"
        "  Call sw.train_step(model, batch, ...) on every rank, or sw.eval_step where nothing is trained."
    )


def shown_shapes(batch: Any) -> str:
    """The shapes of a batch's tensors, for a message."""
    leaves = tree_leaves(batch)
    return ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)) or "no tensors"
