"""Execution of one rank's pipeline stages with the model's own forward.

Every stage module's call is replaced on the instance. In a pass of stage ``s`` the modules of ``s`` compute, with their
hooks. Modules of other stages return the tensors that this rank received, or zeros that nothing uses. After the stage's
last module, the next call of a stage module ends the model's forward by an exception. This happens inside the engine's
hooks of the model, so that the engine sees an ordinary call. A recomputation in backward by a checkpoint around stage
modules (our GPT with ``activation_checkpointing=True``) does not count as a call of the pass.
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
from shardwise.parallel.pipeline.stage_module import StageModule, use_zeros, zeros
from shardwise.parallel.pipeline.trace import Source, StageFlow, Tracer, inner_tensor_error, shape_key
from shardwise.spec.errors import StateError


class StepCheck:
    """Checks that the ranks of a pipeline are about to run the same step.

    Collective:
        An all-gather of 16 bytes per rank; :meth:`wait` waits for it.
    """

    def __init__(self, comm: Comm, step: str, shown: str, trained: bytes) -> None:
        self._comm, self._shown = comm, shown
        digests = torch.zeros(comm.size, 2, dtype=torch.int64)
        digests[comm.rank] = torch.tensor([digest_text(step), digest_text(trained)])
        host = comm.host  # the host reads the result; on the device it would wait for earlier work
        self._pending: tuple[torch.Tensor, Handle] | None = digests, host.all_gather(digests.view(-1), unit="step")
        self._all_trained = 0

    def wait(self) -> int:
        """Wait for the other ranks, and raise if they disagree about the step.

        Returns:
            A digest of the sets of trained parameters of all ranks.

        Collective:
            Two all-gathers of JSON if the ranks disagree.
        """
        if self._pending is not None:
            digests, handle = self._pending
            self._pending = None  # frees its memory for the rest of the step
            handle.wait()
            rows = digests.tolist()
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


#: Number of kinds of batches whose flows are cached.
_MAX_FLOWS = 256


class Stages:
    """The stages of a model, of which this rank has some.

    Attributes:
        compute_dtype: The dtype of floating-point activations if units cast them; ``None``: the dtype found by the
            trace, which is that of the masters. Masks that the model makes have the dtype of a placeholder.
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
        self._previous_forward = model.__dict__.get("forward")  # an earlier replacement of the class's method
        me: weakref.ref[Stages] = weakref.ref(self)
        for module in modules:
            for each in (module.module, module.meta_copy):
                _replace_call(each, me, module)
        use_zeros(meta_copy, modules, device)
        model.__dict__["forward"] = _RootForward(self, model)

    @property
    def trains(self) -> bool:
        """Whether the model is in training mode."""
        model = self._model()
        return model is not None and model.training

    def key(self, batch: Any) -> Hashable:
        """Return the key that all batches of one flow share; its text is the same on every rank."""
        return shape_key(batch), self.trains, torch.is_grad_enabled()

    def flow(self, batch: Any, call: Callable[[nn.Module, Any], Any], step_check: StepCheck | None = None) -> StageFlow:
        """Return the tensors that stages exchange for batches of this shape; traced for a new shape.

        Collective:
            All-gather of one integer along ``pp`` for a new shape. All ranks must call.
        """
        key = self.key(batch)
        if key not in self._flows:
            if step_check is not None:
                step_check.wait()
            self._meta_copy.train(self.trains)
            flow = self._trace(batch, call)
            if self._comm is not None:
                check_same(
                    self._comm,
                    flow.digest,
                    "the ranks of a pipeline disagree about what goes from stage to stage",
                    "Give the same batch to every rank of a pipeline, and build the same model.",
                    show=lambda: f"microbatches of {describe_shapes(batch)}",
                )
            self._flows[key] = flow
            if len(self._flows) > _MAX_FLOWS:  # the same on every rank
                self._flows.popitem(last=False)
        self._flows.move_to_end(key)
        return self._flows[key]

    def _trace(self, batch: Any, call: Callable[[nn.Module, Any], Any]) -> StageFlow:
        try:
            return self._traced(batch, call, writes_in_place=False)
        except RuntimeError:  # expanded zeros cannot be written to, which torch reports by different messages
            try:
                return self._traced(batch, call, writes_in_place=True)
            except NotImplementedError as error:
                if "meta tensor" in str(error):
                    raise inner_tensor_error() from error
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
        """Run one pass of a stage.

        Returns:
            The tensors for the next stage, in the order of ``flow.boundary``; for the last stage, the result of
            ``forward``.
        """
        self._pass = _Pass(stage, flow, received, self.compute_dtype, is_last=stage == self.num_stages - 1)
        try:
            with contextlib.nullcontext() if self._pass.is_last else _without_user_hooks(self._model()):
                return forward()
        finally:
            self._pass = None

    @contextlib.contextmanager
    def backward_context(self, stage: int, flow: StageFlow, received: Mapping[Source, Tensor]) -> Iterator[None]:
        """Context of the backward of a pass, in which checkpoints in the model call stage modules again."""
        self._pass = _Pass(stage, flow, received, self.compute_dtype, recomputes=True)
        try:
            yield
        finally:
            self._pass = None

    def call_module(self, module: StageModule, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Handle a call of a stage module; ``compute`` runs the module."""
        if self._tracer is not None:
            return self._tracer.call(module, compute, args, kwargs)
        if self._pass is None:
            raise _partial_model_error(module.name)
        return self._pass.call(module, compute, args, kwargs, self.device)

    def call_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of the model."""
        if self._pass is None or self._pass.recomputes:
            raise _partial_model_error("the model")
        model = self._model()
        assert model is not None
        try:
            output = (self._previous_forward or type(model).forward.__get__(model))(*args, **kwargs)
        except _StageEnd:
            output = None
        return output if self._pass.is_last else self._pass.outputs()


class _StageEnd(Exception):  # noqa: N818 - no error; an Exception, because torch then still runs hooks that ask for it
    """Ends the model's forward: the stage has computed everything."""


class _Pass:
    """One pass of one stage, or its backward, in which checkpoints recompute."""

    def __init__(
        self,
        stage: int,
        flow: StageFlow,
        received: Mapping[Source, Tensor],
        compute_dtype: torch.dtype | None,
        *,
        is_last: bool = False,
        recomputes: bool = False,
    ) -> None:
        self._number = 0  # number of the next call
        self.is_last = is_last
        self.recomputes = recomputes
        self._stage = stage
        self._flow = flow
        self._compute_dtype = compute_dtype
        self._tensors = dict(received)  # received tensors, and those that this stage makes for the next one
        self._has_ended = False

    def call(
        self, module: StageModule, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any], device: torch.device
    ) -> Any:
        """Return the output of a stage module: computed, received, or zeros."""
        if self._has_ended:
            raise _StageEnd
        number = self._call_number(module)
        call = self._flow.calls[number]
        if call.leaves is not None and call.stage != self._stage:
            return call.make_result(
                tree_leaves((args, kwargs)), lambda index, leaf: self._foreign_output((number, index), leaf, device)
            )
        output = compute(*args, **kwargs)
        if not (self.is_last or self.recomputes or call.leaves is None):
            self._store_outputs(number, output)
            self._has_ended = number == self._flow.last_call[self._stage]
        return output

    def _call_number(self, module: StageModule) -> int:
        """Return the number of this call of ``module`` in the flow; raises if the model's path has changed."""
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

    def _foreign_output(self, source: Source, leaf: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of another stage: received, or zeros that nothing uses."""
        tensor = self._tensors.get(source)
        if tensor is None:
            tensor = zeros(leaf, device, self._compute_dtype if leaf.dtype.is_floating_point else None)
        return tensor.clone(memory_format=torch.contiguous_format) if self._flow.writes_in_place else tensor

    def _store_outputs(self, number: int, output: Any) -> None:
        wanted = [source for source in self._flow.boundary[self._stage] if source[0] == number]
        leaves = tree_leaves(output) if wanted else ()
        for source in wanted:
            leaf = leaves[source[1]]
            self._tensors[source] = leaf.clone() if self._flow.writes_in_place else leaf

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage."""
        return tuple(self._tensors[source] for source in self._flow.boundary[self._stage])


class _RootForward:
    """Replaces the model's ``forward``."""

    def __init__(self, stages: Stages, model: nn.Module) -> None:
        self._stages = stages
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stages.call_root(args, kwargs)


@contextlib.contextmanager
def _without_user_hooks(model: nn.Module | None) -> Iterator[None]:
    """Disable the user's hooks on the output of ``model``, because inner stages return activations."""
    assert model is not None
    hooks_of = {name: model.__dict__[name] for name in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")}
    for name, hooks in hooks_of.items():
        ours = ((key, hook) for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("shardwise."))
        model.__dict__[name] = OrderedDict(ours)
    try:
        yield
    finally:
        model.__dict__.update(hooks_of)


def _replace_call(module: nn.Module, reference: weakref.ref[Stages], stage_module: StageModule) -> None:
    """Redirect calls of ``module``, hooks included, on the instance: others may read its class and ``forward``."""
    compiled = module._compiled_call_impl  # noqa: SLF001 - torch's own __call__ reads it
    itself, function = weakref.ref(module), type(module)._call_impl  # noqa: SLF001 - the same

    def compute(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if compiled is not None else function(itself(), *args, **kwargs)  # type: ignore[arg-type]

    def redirect(*args: Any, **kwargs: Any) -> Any:
        stages = reference()
        assert stages is not None
        return stages.call_module(stage_module, compute, args, kwargs)

    module.__dict__["_call_impl" if compiled is None else "_compiled_call_impl"] = redirect


def _partial_model_error(what: str) -> StateError:
    return StateError(
        f"{what} was called, but this rank holds only some of its pipeline stages.\n"
        "  Call sw.train_step(model, batch, ...) on every rank, or sw.eval_step where nothing is trained."
    )


def describe_shapes(batch: Any) -> str:
    """Describe the shapes of a batch's tensors, for error messages."""
    leaves = tree_leaves(batch)
    return ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)) or "no tensors"
