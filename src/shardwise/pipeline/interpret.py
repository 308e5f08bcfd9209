"""Running a schedule: every action in its place, on one rank.

A send starts in its place and is waited for when its tensor is of no further use, or at the end of the step. A receive
is posted one computation early, where the transport allows it, and waited for by the computation that takes it: posted
in its place, it was measured to take 2 to 5 ms where Gloo's thread had yet to get a processor. The first message of a
kind of batch follows a header with shapes and dtypes.
"""

from __future__ import annotations

import contextlib
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
from shardwise.pipeline.stage import Agreement, Stages
from shardwise.pipeline.trace import Source, StageFlow
from shardwise.pipeline.weight_gradient import Deferral, WeightGradients
from shardwise.spec.errors import StateError
from shardwise.spec.schedule import Action, Kind, Schedule

#: Gradients that may be on their way to the stage before while this rank computes.
_SENDS_AHEAD = 2
_MAX_DIMS = 8
_DTYPES = ("fp32", "bf16", "fp16", "fp64", "int64", "int32", "bool", "uint8", "int8", "complex64", "complex128")


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that goes from a stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class SavedMicrobatch:
    """A microbatch of a stage between its forward and its backward."""

    received: dict[Source, Tensor]
    outputs: tuple[Tensor, ...]
    sends: list[tuple[Handle, Tensor]] = field(default_factory=list)
    weights: WeightGradients | None = None


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        schedule: The actions.
        parts: The microbatches, the same on every rank of the pipeline.
        call: Calls the model with a microbatch.
        loss: Calls the model with a microbatch, and returns its loss.
        flow: What goes from stage to stage for microbatches of this shape.
        agreement: Compares what the ranks are about to do; ``None``: there are no peers.
        enter: Called with stage and microbatch before each forward and each backward.
        collect: Takes the gradients from the weights.
        end: Called after the last backward of a stage, if gradients of weights are still to be computed with what
            computes those of given parameters.
        scale: Scales a loss before its backward, for fp16.
        backward: Computes gradients from outputs with gradients, or from a loss, as ``torch.autograd.backward``.
    """

    schedule: Schedule
    parts: Sequence[Any]
    call: Callable[[Any], Any]
    loss: Callable[[Any], Tensor]
    flow: StageFlow
    agreement: Agreement | None
    enter: Callable[[int, int], None]
    collect: Callable[[], None]
    end: Callable[..., None]
    scale: Callable[[Tensor], Tensor]
    backward: Callable[..., None] = torch.autograd.backward


class Interpreter:
    """Runs schedules on the stages of this rank.

    Attributes:
        peak_saved: The most microbatches, counted once per stage, that were between forward and backward at a time.
        spans: If a list, every computation appends its begin and end, in seconds of ``time.perf_counter``.
        comm: The axis ``pp``.
        compute_dtype: In a dry run the dtype of floating-point activations where units cast: the trace knows the
            model's own.
    """

    def __init__(self, stages: Stages, comm: Comm, deferral: Deferral) -> None:
        self.stages = stages
        self.deferral = deferral
        self.peak_saved = 0
        self.spans: list[tuple[float, float]] | None = None
        self.compute_dtype: torch.dtype | None = None
        self.comm = comm

    def run(self, step: Step) -> list[Tensor]:
        """Run one step; returns the losses of the microbatches in order on the rank of the last stage, [] elsewhere.

        Collective:
            Waits for the agreement before the first message. Then the messages of the schedule along ``pp``: for each
            microbatch and each tensor that crosses two stages on different ranks its values, and back its gradient
            where it needs one.
        """
        running = _Step(self, step)
        rank = self.comm.rank
        early = {} if self.comm.is_in_order else step.schedule.early(rank)
        for place, action in enumerate(step.schedule.actions[rank]):
            running.post(early.get(place, ()))
            running.do(action)
        running.finish()
        return [running.losses[index] for index in sorted(running.losses)]

    def send(self, tensor: Tensor, to: int, unit: str) -> tuple[Handle, Tensor]:
        """Start a send; the returned tensor must live until the handle has been waited for."""
        flat = tensor.detach().contiguous().view(-1)
        return self.comm.send(flat, to=to, unit=unit), flat

    def receive(self, like: BoundaryTensor, source: int, unit: str) -> tuple[Handle, Tensor]:
        """Post a receive."""
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.stages.device)
        return self.comm.receive(buffer.view(-1), source=source, unit=unit), buffer

    def header(self, stage: int, made: Sequence[BoundaryTensor]) -> Tensor:
        """Shapes and dtypes of what ``stage`` sends to the next stage, as a tensor."""
        rows = []
        for crossing in made:
            if len(crossing.shape) > _MAX_DIMS:
                raise StateError(f"pipeline stage {stage} gives a tensor of {len(crossing.shape)} dimensions.")
            shape = [*crossing.shape, *[0] * (_MAX_DIMS - len(crossing.shape))]
            code = _DTYPES.index(dtype_name(crossing.dtype))
            rows.append([code, int(crossing.requires_grad), len(crossing.shape), *shape])
        return torch.tensor(rows, dtype=torch.int64, device=self.stages.device)

    def empty_header(self, count: int) -> Tensor:
        """Room for the header of ``count`` tensors."""
        return torch.empty(count, 3 + _MAX_DIMS, dtype=torch.int64, device=self.stages.device)


def read_header(header: Tensor) -> tuple[BoundaryTensor, ...]:
    """The tensors that a header describes."""
    return tuple(
        BoundaryTensor(tuple(shape[:num_dims]), torch_dtype(_DTYPES[code]), bool(needs_grad))
        for code, needs_grad, num_dims, *shape in header.tolist()
    )


class _Step:
    """One run of a schedule."""

    def __init__(self, interpreter: Interpreter, plan: Step) -> None:
        self._interpreter = interpreter
        self._plan = plan
        self._schedule = plan.schedule
        self._flow = plan.flow
        self.losses: dict[int, Tensor] = {}
        self._draws = (
            RngStreams(interpreter.stages.device) if torch.is_grad_enabled() or interpreter.stages.trains else None
        )
        self._saved: dict[tuple[int, int], SavedMicrobatch] = {}
        self._received: dict[tuple[int, int], list[tuple[Handle, Tensor]]] = {}
        self._gradients: dict[tuple[int, int], list[tuple[Handle, Tensor]]] = {}
        self._input_gradients: dict[tuple[int, int], list[Tensor]] = {}
        self._weights: dict[tuple[int, int], WeightGradients] = {}
        self._sends: deque[list[tuple[Handle, Tensor]]] = deque()
        self._unannounced: set[int] = set()  # stages whose shapes were learned in this step, and not sent yet
        self._arrived_at = 0.0  # when the inputs of the newest computation were there

    def do(self, action: Action) -> None:
        self._arrived_at = time.perf_counter()
        # No table of bound methods: a step that holds itself is freed, with all that was received, only when cycles are
        # collected.
        getattr(self, f"_{action.kind}")(action)
        if self._interpreter.spans is not None and not action.kind.is_message:
            self._interpreter.spans.append((self._arrived_at, time.perf_counter()))

    def post(self, receives: Sequence[Action]) -> None:
        """Post receives before their place, as far as what they receive is known."""
        for action in receives:
            is_activation = action.kind is Kind.RECEIVE_ACTIVATION
            is_traced = is_activation and self._interpreter.stages.device.type == "meta"
            if not is_traced and self._crossings(action.stage - is_activation) is None:
                return
            self.do(action)

    def finish(self) -> None:
        for sends in (*self._sends, *(each.sends for each in self._saved.values())):
            for handle, _ in sends:
                handle.wait()

    def _crossings(self, boundary: int) -> tuple[BoundaryTensor, ...] | None:
        """The tensors that go from stage ``boundary`` to the next, if known."""
        return self._flow.learned.get((self._trained, boundary))

    def _learn(self, boundary: int, crossings: tuple[BoundaryTensor, ...]) -> None:
        self._flow.learned[self._trained, boundary] = crossings

    @property
    def _trained(self) -> int:
        """Which parameters are trained, as a number: gradients, and so headers, depend on that."""
        return 0 if self._plan.agreement is None else self._plan.agreement.wait()

    # -- forward

    def _receive_activation(self, action: Action) -> None:
        boundary, peer = action.stage - 1, action.peer
        assert peer is not None
        if (action.stage, action.microbatch) in self._received:  # posted early
            return
        if self._interpreter.stages.device.type == "meta":  # a dry run: no peer sends a header
            self._learn(boundary, self._traced(boundary))
        elif self._crossings(boundary) is None:
            header = self._interpreter.empty_header(len(self._flow.boundary[boundary]))
            self._interpreter.comm.receive(header.view(-1), source=peer, unit=f"shapes of stage {boundary}").wait()
            self._learn(boundary, read_header(header))
        crossings = self._crossings(boundary)
        self._received[action.stage, action.microbatch] = [
            self._interpreter.receive(crossing, peer, f"activation of stage {boundary}") for crossing in crossings or ()
        ]

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = self._take_received(stage, microbatch)
        part = self._plan.parts[microbatch]
        is_last = stage == self._interpreter.stages.num_stages - 1
        weights = WeightGradients() if self._schedule.is_split else None
        forward = self._plan.loss if is_last else self._plan.call
        self._plan.enter(stage, microbatch)
        draws = self._draws.of(stage, microbatch) if self._draws is not None else contextlib.nullcontext()
        with draws, self._interpreter.deferral.to(weights):
            made = self._interpreter.stages.run(stage, self._flow, received, lambda: forward(part))
        if is_last:
            self.losses[microbatch] = made.detach()  # without the graph, whose leaves are what was received
        outputs = (made,) if is_last else made
        if not is_last:
            self._check(stage, outputs)
        self._saved[stage, microbatch] = SavedMicrobatch(received, outputs, weights=weights)
        self._interpreter.peak_saved = max(self._interpreter.peak_saved, len(self._saved))
        if not torch.is_grad_enabled() and is_last:
            del self._saved[stage, microbatch]

    def _take_received(self, stage: int, microbatch: int) -> dict[Source, Tensor]:
        if stage == 0:
            return {}
        if (stage, microbatch) in self._received:
            tensors = []
            for handle, buffer in self._received.pop((stage, microbatch)):
                handle.wait()
                tensors.append(buffer)
            self._arrived_at = time.perf_counter()
        else:  # the stage before is this rank's too
            saved = self._saved[stage - 1, microbatch]
            tensors = [output.detach() for output in saved.outputs]
            if not torch.is_grad_enabled():
                del self._saved[stage - 1, microbatch]
        crossings = self._crossings(stage - 1) or ()
        for tensor, crossing in zip(tensors, crossings, strict=True):
            tensor.requires_grad_(crossing.requires_grad)
        return dict(zip(self._flow.boundary[stage - 1], tensors, strict=True))

    def _check(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Compare a stage's outputs with the shapes that the next stage expects."""
        made = tuple(BoundaryTensor(tuple(t.shape), t.dtype, t.requires_grad) for t in outputs)
        known = self._crossings(stage)
        if known is None:
            self._learn(stage, made)
            self._unannounced.add(stage)
        elif made != known:
            raise StateError(
                f"pipeline stage {stage} gave {_shown(made)} where it had given {_shown(known)} for a batch of the same"
                " shape.\n  Pipeline stages need the same shapes every time: pad, or give batches of other shapes."
            )

    def _send_activation(self, action: Action) -> None:
        saved = self._saved[action.stage, action.microbatch]
        assert action.peer is not None
        if action.stage in self._unannounced:  # here, where the schedule has a send: a transport may work in order
            self._unannounced.remove(action.stage)
            header = self._interpreter.header(action.stage, self._crossings(action.stage) or ())
            self._sends.append([self._interpreter.send(header, action.peer, f"shapes of stage {action.stage}")])
        unit = f"activation of stage {action.stage}"
        saved.sends = [self._interpreter.send(output, action.peer, unit) for output in saved.outputs]
        if not torch.is_grad_enabled():
            del self._saved[action.stage, action.microbatch]
            self._send_later(saved.sends)

    # -- backward

    def _receive_gradient(self, action: Action) -> None:
        assert action.peer is not None
        if (action.stage, action.microbatch) in self._gradients:  # posted early
            return
        self._gradients[action.stage, action.microbatch] = [
            self._interpreter.receive(crossing, action.peer, f"gradient of stage {action.stage}")
            for crossing in self._crossings(action.stage) or ()
            if crossing.requires_grad
        ]

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        saved = self._saved.pop((stage, microbatch))
        self._plan.enter(stage, microbatch)
        again = self._interpreter.stages.again(stage, self._flow, saved.received)
        with again, self._interpreter.deferral.to(saved.weights):  # what is recomputed defers as well
            if stage == self._interpreter.stages.num_stages - 1:
                self._plan.backward([self._plan.scale(saved.outputs[0] / len(self._plan.parts))])
            else:
                gradients = self._take_gradients(stage, microbatch)
                outputs = [output for output in saved.outputs if output.requires_grad]
                if outputs:
                    self._plan.backward(outputs, gradients)
        if saved.weights is not None:
            self._weights[stage, microbatch] = saved.weights
        elif self._is_last(microbatch):
            self._plan.end(stage)
        self._plan.collect()  # before another microbatch's come to them
        for handle, _ in saved.sends:  # the rank that sent the gradients has received these
            handle.wait()
        self._input_gradients[stage, microbatch] = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in saved.received.values()
            if tensor.requires_grad
        ]

    _backward_input = _backward

    def _backward_weight(self, action: Action) -> None:
        with torch.no_grad():
            weights = self._weights.pop((action.stage, action.microbatch))
            if self._is_last(action.microbatch):
                self._plan.end(action.stage, weights.compute)
            weights.compute()
            self._plan.collect()

    def _is_last(self, microbatch: int) -> bool:
        """Backwards of a stage come in the order of microbatches."""
        return microbatch == len(self._plan.parts) - 1

    def _take_gradients(self, stage: int, microbatch: int) -> list[Tensor]:
        if (stage, microbatch) not in self._gradients:  # the next stage is this rank's too
            return self._input_gradients.pop((stage + 1, microbatch))
        found = []
        for handle, buffer in self._gradients.pop((stage, microbatch)):
            handle.wait()
            found.append(buffer)
        self._arrived_at = time.perf_counter()
        return found

    def _send_gradient(self, action: Action) -> None:
        assert action.peer is not None
        unit = f"gradient of stage {action.stage - 1}"
        gradients = self._input_gradients.pop((action.stage, action.microbatch))
        self._send_later([self._interpreter.send(gradient, action.peer, unit) for gradient in gradients])

    def _send_later(self, sends: list[tuple[Handle, Tensor]]) -> None:
        self._sends.append(sends)
        while len(self._sends) > _SENDS_AHEAD:
            for handle, _ in self._sends.popleft():
                handle.wait()

    def _traced(self, boundary: int) -> tuple[BoundaryTensor, ...]:
        """What crosses, as the trace has it; all that can have a gradient is taken to need one."""
        leaves = [self._flow.leaf(source) for source in self._flow.boundary[boundary]]
        found = [(leaf.shape, leaf.dtype) for leaf in leaves if leaf.dtype is not None]
        computed = self._interpreter.compute_dtype
        return tuple(
            BoundaryTensor(shape, computed or dtype if dtype.is_floating_point else dtype, dtype.is_floating_point)
            for shape, dtype in found
        )


def _shown(crossings: Sequence[BoundaryTensor]) -> str:
    return ", ".join(f"{list(crossing.shape)} {dtype_name(crossing.dtype)}" for crossing in crossings)


class RngStreams:
    """Random numbers of one step: dropout of each stage and microbatch has a stream of its own.

    The ranks of a pipeline usually have the same random state, as they read the same samples. One number of it seeds
    the step, whatever the stages draw: afterwards the states are still the same, so that loaders that shuffle by them
    agree, and a restored state repeats the step.
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
            # torch.manual_seed also notes a traceback for every kind of device that is not in use: 0.5 ms each time.
            torch.default_generator.manual_seed(seed)
            for device in self._devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield
