"""Running a schedule: every action in its place, on one rank.

A send is started in its place and waited for when what it carries is of no further use, or at the end of the step. A
receive is posted one computation early, where the transport allows it, and waited for by the computation that takes it:
posting in its place, when the message is there already, was measured to take 2 to 5 ms where Gloo's thread had yet to
get a processor. The first message of a kind of batch is preceded by a header that tells the receiver shapes and dtypes.
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
from shardwise.pipeline.agreement import Agreement
from shardwise.pipeline.stage import Stages
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
    """One tensor that goes from a stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class SavedMicrobatch:
    """What a stage keeps of a microbatch from its forward to its backward."""

    received: dict[Source, Tensor]
    outputs: tuple[Tensor, ...]
    sends: list[tuple[Handle, Tensor]] = field(default_factory=list)
    weights: WeightGradients | None = None


@dataclass(frozen=True)
class Step:
    """What one step is.

    Attributes:
        schedule: What to do.
        parts: The microbatches, the same on every rank of the pipeline.
        call: Calls the model with a microbatch.
        loss: The same, and gives the loss of it.
        flow: What goes from stage to stage for microbatches of this shape.
        agreement: That the ranks do the same; ``None``: nobody is there.
        enter: Is told stage and microbatch before each forward, and each backward that begins.
        collect: Takes the gradients that are on weights.
        end: Is told when the last backward of a stage is over. Where gradients are still to be computed, it
            is given what computes those of the parameters that it names.
        scale: Of a loss before its backward, for fp16.
        backward: Goes from outputs with gradients, or from a loss, to the leaves.
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
        peak_tapes: The most microbatches, counted once per stage, that were between forward and backward at a time.
        spans: Where it is a list, the begin and the end of every computation are added to it, in seconds of the clock
            ``time.perf_counter``.
        comm: Along ``pp``.
        compute_dtype: In a dry run, of floating-point activations, where units cast: the trace knows the model's own.
    """

    def __init__(self, stages: Stages, comm: Comm, deferral: Deferral) -> None:
        self.stages = stages
        self.deferral = deferral
        self.peak_tapes = 0
        self.spans: list[tuple[float, float]] | None = None
        self.compute_dtype: torch.dtype | None = None
        self.comm = comm

    def run(self, job: Step) -> list[Tensor]:
        """One step.

        Returns:
            The losses of the microbatches in order, on the rank of the last stage; nothing elsewhere.

        Collective:
            Waits for the agreement before the first message. The messages of the schedule along ``pp``: for each
            tensor that crosses two stages on different ranks one for each microbatch with what it holds, and one back
            with its gradient where it needs one.
        """
        step = _Step(self, job)
        rank = self.comm.rank
        early = {} if self.comm.is_in_order else job.schedule.early(rank)
        for place, action in enumerate(job.schedule.actions[rank]):
            step.post(early.get(place, ()))
            step.do(action)
        step.finish()
        return [step.losses[index] for index in sorted(step.losses)]

    def send(self, tensor: Tensor, to: int, unit: str) -> tuple[Handle, Tensor]:
        """Start a send; the tensor must live until it has been waited for."""
        flat = tensor.detach().contiguous().view(-1)
        return self.comm.send(flat, to=to, unit=unit), flat

    def receive(self, like: BoundaryTensor, source: int, unit: str) -> tuple[Handle, Tensor]:
        """Post a receive."""
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.stages.device)
        return self.comm.receive(buffer.view(-1), source=source, unit=unit), buffer

    def header(self, stage: int, made: Sequence[BoundaryTensor]) -> Tensor:
        """What tells the rank of the next stage what ``stage`` will send it."""
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
    """The tensors that a header tells of."""
    return tuple(
        BoundaryTensor(tuple(shape[:num_dims]), torch_dtype(_DTYPES[code]), bool(needs_grad))
        for code, needs_grad, num_dims, *shape in header.tolist()
    )


class _Step:
    """One run of a schedule."""

    def __init__(self, interpreter: Interpreter, job: Step) -> None:
        self._its = interpreter
        self._job = job
        self._schedule = job.schedule
        self._flow = job.flow
        self.losses: dict[int, Tensor] = {}
        self._draws = (
            RngStreams(interpreter.stages.device) if torch.is_grad_enabled() or interpreter.stages.trains else None
        )
        self._tapes: dict[tuple[int, int], SavedMicrobatch] = {}
        self._received: dict[tuple[int, int], list[tuple[Handle, Tensor]]] = {}
        self._gradients: dict[tuple[int, int], list[tuple[Handle, Tensor]]] = {}
        self._input_gradients: dict[tuple[int, int], list[Tensor]] = {}
        self._weights: dict[tuple[int, int], WeightGradients] = {}
        self._sends: deque[list[tuple[Handle, Tensor]]] = deque()
        self._untold: set[int] = set()  # stages whose shapes were learned in this step, and not sent yet
        self._arrived_at = 0.0  # what the newest computation takes

    def do(self, action: Action) -> None:
        self._arrived_at = time.perf_counter()
        # No table of bound methods: a step that holds itself is freed, with all that was received, only when cycles are
        # collected.
        getattr(self, f"_{action.kind}")(action)
        if self._its.spans is not None and not action.kind.is_message:
            self._its.spans.append((self._arrived_at, time.perf_counter()))

    def post(self, receives: Sequence[Action]) -> None:
        """Post receives before their place, as far as what they receive is known."""
        for action in receives:
            is_activation = action.kind is Kind.RECEIVE_ACTIVATION
            is_traced = is_activation and self._its.stages.device.type == "meta"
            if not is_traced and self._crossings(action.stage - is_activation) is None:
                return
            self.do(action)

    def finish(self) -> None:
        for sends in (*self._sends, *(tape.sends for tape in self._tapes.values())):
            for handle, _ in sends:
                handle.wait()

    def _crossings(self, boundary: int) -> tuple[BoundaryTensor, ...] | None:
        """What goes from stage ``boundary`` to the next, if that is known."""
        return self._flow.learned.get((self._trained, boundary))

    def _learn(self, boundary: int, crossings: tuple[BoundaryTensor, ...]) -> None:
        self._flow.learned[self._trained, boundary] = crossings

    @property
    def _trained(self) -> int:
        """Gradients go where parameters are trained: what stages know of each other holds for that."""
        return 0 if self._job.agreement is None else self._job.agreement.wait()

    # -- forward

    def _receive_activation(self, action: Action) -> None:
        boundary, peer = action.stage - 1, action.peer
        assert peer is not None
        if (action.stage, action.microbatch) in self._received:  # posted early
            return
        if self._its.stages.device.type == "meta":  # a dry run: nobody is there to tell
            self._learn(boundary, self._traced(boundary))
        elif self._crossings(boundary) is None:
            header = self._its.empty_header(len(self._flow.crossing[boundary]))
            self._its.comm.receive(header.view(-1), source=peer, unit=f"shapes of stage {boundary}").wait()
            self._learn(boundary, read_header(header))
        crossings = self._crossings(boundary)
        self._received[action.stage, action.microbatch] = [
            self._its.receive(crossing, peer, f"activation of stage {boundary}") for crossing in crossings or ()
        ]

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = self._take_received(stage, microbatch)
        part = self._job.parts[microbatch]
        is_last = stage == self._its.stages.num_stages - 1
        weights = WeightGradients() if self._schedule.is_split else None
        forward = self._job.loss if is_last else self._job.call
        self._job.enter(stage, microbatch)
        draws = self._draws.of(stage, microbatch) if self._draws is not None else contextlib.nullcontext()
        with draws, self._its.deferral.to(weights):
            made = self._its.stages.run(stage, self._flow, received, lambda: forward(part))
        if is_last:
            self.losses[microbatch] = made.detach()  # without the graph, whose leaves are what was received
        outputs = (made,) if is_last else made
        if not is_last:
            self._check(stage, outputs)
        self._tapes[stage, microbatch] = SavedMicrobatch(received, outputs, weights=weights)
        self._its.peak_tapes = max(self._its.peak_tapes, len(self._tapes))
        if not torch.is_grad_enabled() and is_last:
            del self._tapes[stage, microbatch]

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
            tape = self._tapes[stage - 1, microbatch]
            tensors = [output.detach() for output in tape.outputs]
            if not torch.is_grad_enabled():
                del self._tapes[stage - 1, microbatch]
        crossings = self._crossings(stage - 1) or ()
        for tensor, crossing in zip(tensors, crossings, strict=True):
            tensor.requires_grad_(crossing.requires_grad)
        return dict(zip(self._flow.crossing[stage - 1], tensors, strict=True))

    def _check(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """What a stage gives has the shapes that the next stage was told."""
        made = tuple(BoundaryTensor(tuple(t.shape), t.dtype, t.requires_grad) for t in outputs)
        known = self._crossings(stage)
        if known is None:
            self._learn(stage, made)
            self._untold.add(stage)
        elif made != known:
            raise StateError(
                f"pipeline stage {stage} gave {_shown(made)} where it had given {_shown(known)} for a batch of the same"
                " shape.\n  Pipeline stages need the same shapes every time: pad, or give batches of other shapes."
            )

    def _send_activation(self, action: Action) -> None:
        tape = self._tapes[action.stage, action.microbatch]
        assert action.peer is not None
        if action.stage in self._untold:  # here, where the schedule has a send: a transport may work in order
            self._untold.remove(action.stage)
            header = self._its.header(action.stage, self._crossings(action.stage) or ())
            self._sends.append([self._its.send(header, action.peer, f"shapes of stage {action.stage}")])
        unit = f"activation of stage {action.stage}"
        tape.sends = [self._its.send(output, action.peer, unit) for output in tape.outputs]
        if not torch.is_grad_enabled():
            del self._tapes[action.stage, action.microbatch]
            self._send_later(tape.sends)

    # -- backward

    def _receive_gradient(self, action: Action) -> None:
        assert action.peer is not None
        if (action.stage, action.microbatch) in self._gradients:  # posted early
            return
        self._gradients[action.stage, action.microbatch] = [
            self._its.receive(crossing, action.peer, f"gradient of stage {action.stage}")
            for crossing in self._crossings(action.stage) or ()
            if crossing.requires_grad
        ]

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        tape = self._tapes.pop((stage, microbatch))
        self._job.enter(stage, microbatch)
        again = self._its.stages.again(stage, self._flow, tape.received)
        with again, self._its.deferral.to(tape.weights):  # what is recomputed defers as well
            if stage == self._its.stages.num_stages - 1:
                self._job.backward([self._job.scale(tape.outputs[0] / len(self._job.parts))])
            else:
                gradients = self._take_gradients(stage, microbatch)
                outputs = [output for output in tape.outputs if output.requires_grad]
                if outputs:
                    self._job.backward(outputs, gradients)
        if tape.weights is not None:
            self._weights[stage, microbatch] = tape.weights
        elif self._is_last(microbatch):
            self._job.end(stage)
        self._job.collect()  # before another microbatch's come to them
        for handle, _ in tape.sends:  # whoever gave the gradients has received them
            handle.wait()
        self._input_gradients[stage, microbatch] = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in tape.received.values()
            if tensor.requires_grad
        ]

    _backward_input = _backward

    def _backward_weight(self, action: Action) -> None:
        with torch.no_grad():
            weights = self._weights.pop((action.stage, action.microbatch))
            if self._is_last(action.microbatch):
                self._job.end(action.stage, weights.compute)
            weights.compute()
            self._job.collect()

    def _is_last(self, microbatch: int) -> bool:
        """Backwards of a stage come in the order of microbatches."""
        return microbatch == len(self._job.parts) - 1

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
        self._send_later([self._its.send(gradient, action.peer, unit) for gradient in gradients])

    def _send_later(self, sends: list[tuple[Handle, Tensor]]) -> None:
        self._sends.append(sends)
        while len(self._sends) > _SENDS_AHEAD:
            for handle, _ in self._sends.popleft():
                handle.wait()

    def _traced(self, boundary: int) -> tuple[BoundaryTensor, ...]:
        """What crosses, as the trace has it; there gradients are taken to be needed of all that can have one."""
        leaves = [self._flow.leaf(source) for source in self._flow.crossing[boundary]]
        found = [(leaf.shape, leaf.dtype) for leaf in leaves if leaf.dtype is not None]
        computed = self._its.compute_dtype
        return tuple(
            BoundaryTensor(shape, computed or dtype if dtype.is_floating_point else dtype, dtype.is_floating_point)
            for shape, dtype in found
        )


def _shown(crossings: Sequence[BoundaryTensor]) -> str:
    return ", ".join(f"{list(crossing.shape)} {dtype_name(crossing.dtype)}" for crossing in crossings)


class RngStreams:
    """The streams of one step.

    The ranks of a pipeline have the same random state as a rule: they read the same samples. One number of it is the
    step's seed, whatever the stages draw: afterwards the states are still the same, so that loaders that shuffle by
    them agree, and a state that is restored repeats the step.

    Args:
        device: Where the stages compute.
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
