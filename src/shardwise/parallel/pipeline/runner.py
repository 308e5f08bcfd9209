"""The schedule runner: executes the actions of a pipeline schedule on one rank.

A send starts at its place in the schedule and is waited for when its tensor is no longer needed, or at the end of the
step. A receive is posted one computation early if the transport allows it, and waited for by the computation that uses
it. Posted at its place, it was measured to take 2 to 5 ms, because Gloo's thread was not scheduled yet. The first
message for a new kind of batch is preceded by a header with shapes and dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.base import Comm, Handle
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.extensions.pipeline_step import PipelineStep
from shardwise.parallel.pipeline.stage import Stages, StepCheck
from shardwise.parallel.pipeline.trace import Source, StageFlow
from shardwise.parallel.pipeline.weight_grad_store import WeightGradStore
from shardwise.spec.errors import StateError
from shardwise.spec.schedule import Action, Kind, Schedule

#: Number of microbatches whose gradients may be under way to the previous stage while this rank computes.
_SENDS_AHEAD = 2
_MAX_DIMS = 8
#: Dtypes that a header can describe, by number.
DTYPES = ("fp32", "bf16", "fp16", "fp64", "int64", "int32", "bool", "uint8", "int8", "complex64", "complex128")


@dataclass(frozen=True)
class BoundaryTensor:
    """Shape, dtype and ``requires_grad`` of a tensor that a stage sends to the next one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def empty_header(count: int, device: torch.device) -> Tensor:
    """Allocate the header of ``count`` tensors."""
    return torch.empty(count, 3 + _MAX_DIMS, dtype=torch.int64, device=device)


def header(stage: int, tensors: Sequence[BoundaryTensor], device: torch.device) -> Tensor:
    """Encode shapes and dtypes of the tensors that ``stage`` sends to the next stage, as a tensor."""
    rows = []
    for each in tensors:
        if len(each.shape) > _MAX_DIMS:
            raise StateError(f"pipeline stage {stage} gives a tensor of {len(each.shape)} dimensions.")
        shape = [*each.shape, *[0] * (_MAX_DIMS - len(each.shape))]
        rows.append([DTYPES.index(dtype_name(each.dtype)), int(each.requires_grad), len(each.shape), *shape])
    return torch.tensor(rows, dtype=torch.int64, device=device)


def read_header(header: Tensor) -> tuple[BoundaryTensor, ...]:
    """Decode a header."""
    return tuple(
        BoundaryTensor(tuple(shape[:num_dims]), torch_dtype(DTYPES[code]), bool(needs_grad))
        for code, needs_grad, num_dims, *shape in header.tolist()
    )


#: A message under way, with the memory that must live until it has been waited for.
Message = tuple[Handle, Tensor]


@dataclass
class SavedMicrobatch:
    """A microbatch of a stage between its forward and its backward."""

    received: dict[Source, Tensor]
    outputs: tuple[Tensor, ...]
    sends: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """One step.

    Attributes:
        schedule: The actions of all ranks.
        parts: The microbatches, the same on every rank of the pipeline.
        call: Calls the model with a microbatch.
        loss: Calls the model with a microbatch, and returns its loss.
        flow: The tensors that stages exchange for microbatches of this shape.
        step_check: Compares the step between ranks; ``None``: there are no peers.
        step: Gathers units before a pass, collects gradients and reduces them.
        scale: Scales a loss before its backward, for fp16.
        backward: Computes gradients from outputs with gradients, or from a loss, as ``torch.autograd.backward``.
    """

    schedule: Schedule
    parts: Sequence[Any]
    call: Callable[[Any], Any]
    loss: Callable[[Any], Tensor]
    flow: StageFlow
    step_check: StepCheck | None
    step: PipelineStep
    scale: Callable[[Tensor], Tensor]
    backward: Callable[..., None] = torch.autograd.backward


class ScheduleRunner:
    """Runs a schedule on the stages of this rank.

    Attributes:
        losses: The losses by microbatch, on the rank of the last stage.
        spans: Begin and end of every computation, in seconds of ``time.perf_counter``.
        peak_saved: Maximum number of microbatches, counted once per stage, between forward and backward.
    """

    def __init__(self, job: Job, stages: Stages, comm: Comm, store: WeightGradStore) -> None:
        self._job = job
        self._flow = job.flow
        self._stages = stages
        self._comm = comm
        self._store = store
        self.losses: dict[int, Tensor] = {}
        self.spans: list[tuple[float, float]] = []
        self.peak_saved = 0
        self._rng = RngStreams(stages.device) if torch.is_grad_enabled() or stages.trains else None
        self._saved: dict[tuple[int, int], SavedMicrobatch] = {}
        self._received: dict[tuple[Kind, int, int], list[Message]] = {}
        self._input_gradients: dict[tuple[int, int], list[Tensor]] = {}
        self._sends: deque[list[Message]] = deque()
        self._unannounced: set[int] = set()  # stages whose shapes became known in this step, and were not sent yet
        self._inputs_ready_at = 0.0  # time at which the inputs of the newest computation were available

    def run(self) -> list[Tensor]:
        """Run the step; returns the losses of the microbatches in order on the rank of the last stage, else ``[]``.

        Collective:
            Waits for the step check before the first message. Then the messages of the schedule along ``pp``: for each
            microbatch and each tensor between two stages on different ranks its values, and back its gradient if it
            needs one.
        """
        rank, schedule = self._comm.rank, self._job.schedule
        early = {} if self._comm.is_in_order else schedule.early(rank)
        try:
            for index, action in enumerate(schedule.actions[rank]):
                self.post_early(early.get(index, ()))
                self.execute(action)
        finally:
            self._store.clear()  # if the step failed
        self.finish()
        return [self.losses[index] for index in sorted(self.losses)]

    def execute(self, action: Action) -> None:
        """Carry out one action."""
        self._inputs_ready_at = time.perf_counter()
        # No table of bound methods, because the reference cycle would keep the runner and all received tensors alive
        # until a garbage collection.
        getattr(self, f"_{action.kind}")(action)
        if not action.kind.is_message:
            self.spans.append((self._inputs_ready_at, time.perf_counter()))

    def post_early(self, receives: Sequence[Action]) -> None:
        """Post receives before their place in the schedule, up to the first whose shapes are unknown."""
        for action in receives:
            boundary = action.stage - (action.kind is Kind.RECEIVE_ACTIVATION)
            if self._stages.device.type != "meta" and self._boundary_tensors(boundary) is None:
                return
            self.execute(action)

    def finish(self) -> None:
        """Wait for all sends."""
        for sends in (*self._sends, *(each.sends for each in self._saved.values())):
            for handle, _ in sends:
                handle.wait()

    def _boundary_tensors(self, boundary: int) -> tuple[BoundaryTensor, ...] | None:
        """The tensors that stage ``boundary`` sends to the next one; ``None`` if they are unknown."""
        return self._flow.announced.get((self._trained_digest, boundary))

    @property
    def _trained_digest(self) -> int:
        """A digest of the set of trained parameters, on which gradients, and so headers, depend."""
        return 0 if self._job.step_check is None else self._job.step_check.wait()

    # -- messages

    def _send(self, tensor: Tensor, to: int, unit: str) -> Message:
        flat = tensor.detach().contiguous().view(-1)
        return self._comm.send(flat, to=to, unit=unit), flat

    def _post_receive(self, like: BoundaryTensor, source: int, unit: str) -> Message:
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self._stages.device)
        return self._comm.receive(buffer.view(-1), source=source, unit=unit), buffer

    def _receive(self, action: Action) -> None:
        key = action.kind, action.stage, action.microbatch
        assert action.peer is not None
        if key in self._received:  # posted early
            return
        is_activation = action.kind is Kind.RECEIVE_ACTIVATION
        boundary = action.stage - is_activation
        if self._boundary_tensors(boundary) is None:
            self._flow.announced[self._trained_digest, boundary] = self._receive_header(boundary, action.peer)
        unit = f"{'activation' if is_activation else 'gradient'} of stage {boundary}"
        self._received[key] = [
            self._post_receive(each, action.peer, unit)
            for each in self._boundary_tensors(boundary) or ()
            if is_activation or each.requires_grad
        ]

    _receive_activation = _receive_gradient = _receive

    def _receive_header(self, boundary: int, peer: int) -> tuple[BoundaryTensor, ...]:
        """Receive the peer's header; a dry run uses the trace, and assumes gradients of all floating-point tensors."""
        sources, device = self._flow.boundary[boundary], self._stages.device
        if device.type != "meta":
            header = empty_header(len(sources), device)
            self._comm.receive(header.view(-1), source=peer, unit=f"shapes of stage {boundary}").wait()
            return read_header(header)
        made = []
        for leaf in map(self._flow.leaf, sources):
            is_float = leaf.dtype.is_floating_point
            dtype = self._stages.compute_dtype if is_float else None
            made.append(BoundaryTensor(tuple(leaf.shape), dtype or leaf.dtype, is_float))
        return tuple(made)

    def _wait_received(self, kind: Kind, stage: int, microbatch: int) -> list[Tensor] | None:
        """Wait for received tensors and return them; ``None``: the sender is a stage of this rank."""
        if (kind, stage, microbatch) not in self._received:
            return None
        tensors = []
        for handle, buffer in self._received.pop((kind, stage, microbatch)):
            handle.wait()
            tensors.append(buffer)
        self._inputs_ready_at = time.perf_counter()
        return tensors

    def _send_activation(self, action: Action) -> None:
        saved = self._saved[action.stage, action.microbatch]
        assert action.peer is not None
        if action.stage in self._unannounced:  # at a send of the schedule, because a transport may work in order
            self._unannounced.remove(action.stage)
            message = header(action.stage, self._boundary_tensors(action.stage) or (), self._stages.device)
            self._sends.append([self._send(message, action.peer, f"shapes of stage {action.stage}")])
        unit = f"activation of stage {action.stage}"
        saved.sends = [self._send(output, action.peer, unit) for output in saved.outputs]
        if not torch.is_grad_enabled():
            del self._saved[action.stage, action.microbatch]
            self._send_later(saved.sends)

    def _send_gradient(self, action: Action) -> None:
        assert action.peer is not None
        unit = f"gradient of stage {action.stage - 1}"
        gradients = self._input_gradients.pop((action.stage, action.microbatch))
        self._send_later([self._send(gradient, action.peer, unit) for gradient in gradients])

    def _send_later(self, sends: list[Message]) -> None:
        self._sends.append(sends)
        while len(self._sends) > _SENDS_AHEAD:
            for handle, _ in self._sends.popleft():
                handle.wait()

    # -- forward

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = self._inputs(stage, microbatch)
        part = self._job.parts[microbatch]
        is_last = stage == self._stages.num_stages - 1
        forward = self._job.loss if is_last else self._job.call
        self._job.step.enter(stage, microbatch)
        draws = self._rng.of(stage, microbatch) if self._rng is not None else contextlib.nullcontext()
        with draws, self._store_weight_grads(action):
            made = self._stages.run(stage, self._flow, received, lambda: forward(part))
        if is_last:
            self.losses[microbatch] = made.detach()  # without the graph, which keeps received tensors
        outputs = (made,) if is_last else made
        if not is_last:
            self._check_outputs(stage, outputs)
        self._saved[stage, microbatch] = SavedMicrobatch(received, outputs)
        self.peak_saved = max(self.peak_saved, len(self._saved))
        if not torch.is_grad_enabled() and is_last:
            del self._saved[stage, microbatch]

    def _store_weight_grads(self, action: Action) -> contextlib.AbstractContextManager[None]:
        return self._store.store_for((action.stage, action.microbatch) if self._job.schedule.is_split else None)

    def _inputs(self, stage: int, microbatch: int) -> dict[Source, Tensor]:
        if stage == 0:
            return {}
        tensors = self._wait_received(Kind.RECEIVE_ACTIVATION, stage, microbatch)
        if tensors is None:
            tensors = [output.detach() for output in self._saved[stage - 1, microbatch].outputs]
            if not torch.is_grad_enabled():
                del self._saved[stage - 1, microbatch]
        for tensor, known in zip(tensors, self._boundary_tensors(stage - 1) or (), strict=True):
            tensor.requires_grad_(known.requires_grad)
        return dict(zip(self._flow.boundary[stage - 1], tensors, strict=True))

    def _check_outputs(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Compare a stage's outputs with the shapes that the next stage expects."""
        made = tuple(BoundaryTensor(tuple(t.shape), t.dtype, t.requires_grad) for t in outputs)
        known = self._boundary_tensors(stage)
        if known is None:
            self._flow.announced[self._trained_digest, stage] = made
            self._unannounced.add(stage)
        elif made != known:
            raise StateError(
                f"pipeline stage {stage} gave {_describe(made)} where it had given {_describe(known)} for a batch of"
                " the same shape.\n"
                "  Pipeline stages need the same shapes every time: pad, or give batches of other shapes."
            )

    # -- backward

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        saved = self._saved.pop((stage, microbatch))
        self._job.step.enter(stage, microbatch)
        context = self._stages.backward_context(stage, self._flow, saved.received)
        with context, self._store_weight_grads(action):  # a recomputation stores gradients, too
            if stage == self._stages.num_stages - 1:
                self._job.backward([self._job.scale(saved.outputs[0] / len(self._job.parts))])
            else:
                gradients = self._wait_received(Kind.RECEIVE_GRADIENT, stage, microbatch)
                if gradients is None:
                    gradients = self._input_gradients.pop((stage + 1, microbatch))
                outputs = [output for output in saved.outputs if output.requires_grad]
                if outputs:
                    self._job.backward(outputs, gradients)
        if self._is_last(microbatch) and not self._job.schedule.is_split:
            self._job.step.end(stage)
        self._job.step.collect()  # before the next microbatch adds to .grad
        for handle, _ in saved.sends:  # finished: the peer has sent gradients of these tensors
            handle.wait()
        self._input_gradients[stage, microbatch] = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in saved.received.values()
            if tensor.requires_grad
        ]

    _backward_input = _backward

    def _backward_weight(self, action: Action) -> None:
        with torch.no_grad():
            compute = functools.partial(self._store.compute, (action.stage, action.microbatch))
            if self._is_last(action.microbatch):
                self._job.step.end(action.stage, compute)
            compute()
            self._job.step.collect()

    def _is_last(self, microbatch: int) -> bool:
        """Whether it is the last microbatch; the backwards of a stage run in the order of microbatches."""
        return microbatch == len(self._job.parts) - 1


def _describe(tensors: Sequence[BoundaryTensor]) -> str:
    return ", ".join(f"{list(each.shape)} {dtype_name(each.dtype)}" for each in tensors)


class RngStreams:
    """Random numbers of one step: dropout of each stage and microbatch has a separate stream.

    The ranks of a pipeline usually have the same random state, because they read the same samples. One number drawn
    from it seeds the step, however much the stages draw. Afterwards the states are still equal, so that data loaders
    that shuffle by them agree, and a restored state repeats the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._seed = None if device.type == "meta" else int(torch.randint(1 << 62, (), device="cpu"))

    @contextlib.contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Draw from the stream of a stage and microbatch inside."""
        if self._seed is None:
            yield
            return
        text = f"{self._seed} {stage} {microbatch}".encode()
        with torch.random.fork_rng(devices=self._devices):
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
            # torch.manual_seed also records a traceback for every unused device type: 0.5 ms for each call.
            torch.default_generator.manual_seed(seed)
            for device in self._devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield
