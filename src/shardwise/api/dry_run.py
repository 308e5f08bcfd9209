"""Run the real engine as one rank of many, without the other ranks: meta tensors, and Comms that only record."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.api.model import gradient_sync, record_collectives
from shardwise.api.parallelize import apply_plan
from shardwise.api.preparation import prepare
from shardwise.comm.axes import DATA_PARALLEL, Comms, open_mesh_comms
from shardwise.comm.base import CollectiveEvent
from shardwise.comm.record import RecordComm
from shardwise.engine.engine import Engine
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.flat_parameters import flat_parameters
from shardwise.measure.meta import FusedAttention, build_on_meta, hides_tokens, without_values, without_values_error
from shardwise.measure.shapes import KnownShapes
from shardwise.measure.storage import StorageCount, buffer_bytes, held_bytes, storage_bytes
from shardwise.nested import forgets_meta
from shardwise.optim.in_backward import optimizer_in_backward
from shardwise.optim.muon import Muon
from shardwise.optim.muon_groups import muon_groups
from shardwise.parallel.pipeline.batch import Forward, LossFn, call_model, forward_loss
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule.simulate import Durations, simulate
from shardwise.spec.shown import Page, Shown, vars_of
from shardwise.spec.text import size
from shardwise.weights.state.average import ExponentialMovingAverage

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]

#: Optimizers that ``optimizer`` may name. Each is called with the parameters of a parallelized model.
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
    "adam": functools.partial(torch.optim.Adam, lr=1e-3),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3),
    "muon": Muon,
}
BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True, repr=False)
class DryRun(Shown):
    """The communication and memory of one rank in a step of the steady state.

    Attributes:
        events: Every collective of the step, including the optimizer's, in order.
        peak_bytes: Peak of allocated device memory in the step: the sum of all categories except ``host``.
        bytes_by_category: Bytes by category: ``parameters``, ``gradients``, ``optimizer`` (owned shards only),
            ``gathered``, ``reduce`` (gradient buffers, and with Gloo the buffers that reductions receive into),
            ``host`` (offloaded tensors, also activations), ``buffers`` and ``average`` (if the model has such) and
            ``activations`` (the peak of everything else: tensors that autograd saves, and temporary tensors; with Gloo
            also those of the optimizer, whose kernels on a GPU are taken as fused). ``gradients``, ``gathered`` and
            ``reduce`` are the bytes allocated at the moment of the peak.
        rank: The simulated rank.
        world_size: Number of ranks.
        strategy: The plan's strategy, in words.
        num_parameters: Number of parameters of the whole model.
        bubble_share: With ``pp``: the fraction of the step's time in which the rank with the most work is idle, if all
            stages take equally long and communication takes no time. ``None`` without a pipeline.
    """

    events: list[CollectiveEvent]
    peak_bytes: int
    bytes_by_category: dict[str, int]
    rank: int
    world_size: int
    strategy: str
    num_parameters: int
    bubble_share: float | None = None

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Number of collectives and bytes sent by this rank, by kind, and by axis if the axis is not ``dp_shard``."""
        found: dict[str, tuple[int, int]] = {}
        for event in self.events:
            what = event.kind if event.axis == "dp_shard" else f"{event.kind} on {event.axis}"
            count, sent = found.get(what, (0, 0))
            found[what] = count + 1, sent + event.sent_bytes
        return found

    @property
    def sent_bytes(self) -> int:
        """All bytes that this rank sends in the step."""
        return sum(event.sent_bytes for event in self.events)

    def to_records(self) -> list[dict[str, Any]]:
        """Return a record for each kind of collective."""
        return [
            {"collective": kind, "count": count, "sent_bytes": sent} for kind, (count, sent) in self.traffic.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with the collectives added up by kind."""
        return vars_of(self) | {"events": self.to_records()}

    def page(self) -> Page:
        """Return memory and collectives as readable text."""
        above = [
            f"{self.num_parameters:,} parameters, {self.strategy}, rank {self.rank} of {self.world_size}",
            f"peak {size(self.peak_bytes)}: "
            + ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in self.bytes_by_category.items()),
        ]
        rows = [(kind, str(count), size(sent)) for kind, (count, sent) in self.traffic.items()]
        share = self.bubble_share
        text = "" if share is None else f"pipeline bubble {share:.1%} of the step, with stages that take equally long"
        return Page(above, [("collective", "count", "sent by this rank"), *rows], [text] if text else [])


@forgets_meta()
def dry_run(
    build_model: Callable[[], nn.Module],
    plan: ParallelPlan | None = None,
    *,
    world_size: int,
    rank: int = 0,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    forward: Forward | None = None,
    optimizer: str | OptimizerFactory = "adamw",
    backend: str = "auto",
    ranks_per_machine: int | None = None,
    num_microbatches: int | None = None,
    has_average: bool = False,
    in_backward: bool = False,
) -> DryRun:
    """Run a few training steps as ``rank`` of ``world_size``, alone, on meta; return communication and memory.

    The engine is the real one: its units, hooks, buffers and order of collectives. Tensors are on ``meta`` and nothing
    is communicated, so GPT-1T on 1,024 ranks takes seconds and little memory. A model whose forward branches on values
    cannot run, because there are no values. The checks that transformers makes before it builds attention masks are
    answered from ``batch``.

    Args:
        build_model: Builds the model; called under ``torch.device("meta")``.
        plan: ``None`` means the defaults.
        world_size: Number of ranks to simulate.
        rank: The rank to simulate.
        batch: This rank's samples of one microbatch, as for ``sw.train_step``; only shapes and dtypes count. By
            default, for our GPT, tokens and targets of shape (1, seq_len).
        loss_fn: As for ``sw.train_step``.
        forward: As for ``sw.train_step``.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"`` (without momentum), ``"muon"`` (``sw.Muon`` on
            ``sw.muon_groups``), or from parameters to an optimizer.
        ranks_per_machine: Size of a group of hybrid sharding if the plan does not set it.
        backend: ``"nccl"``, ``"gloo"`` (which also needs buffers that reductions receive into), or ``"auto"``: the
            backend that training on this machine would use.
        num_microbatches: Number of forwards and backwards of a step, all but the last under ``sw.gradient_sync(model,
            False)``; with ``pp`` they run through the pipeline. ``None``: one, with ``pp`` that of ``plan.pipeline``.
        has_average: Whether a ``sw.ExponentialMovingAverage`` is stored too (category ``average``).
        in_backward: Whether the optimizer updates ``sw.flat_parameters`` inside backward
            (``sw.optimizer_in_backward``). Not possible with Muon, several microbatches or ``pp``.

    Returns:
        Events and bytes of one step of the steady state.

    Raises:
        PlanError, MeshError: The plan does not fit the world, or is ``data_parallel``; ``batch`` is missing; an unknown
            optimizer or backend; ``num_microbatches`` below 1.
        StateError: The model cannot run without values, or contains something that cannot be sharded.
    """
    plan = plan or ParallelPlan()
    _check_optimizer(optimizer)
    is_cuda = _resolve_backend(backend) == "nccl"
    if num_microbatches is None:
        num_microbatches = 1 if plan.pipeline_policy is None else plan.pipeline_policy.microbatches(plan.pp)
    if num_microbatches < 1:
        raise PlanError(f"num_microbatches={num_microbatches}: expected at least 1.\n  Set num_microbatches=1.")
    if plan.placements.is_threaded:
        raise PlanError(
            f"strategy={plan.strategy!r} runs replicas on the devices of one process, but a dry run stands in for one"
            " rank of a world and computes nothing.\n  Use ddp, with a process for each device."
        )
    model, count = _rank_model(build_model, plan, plan.mesh(world_size, ranks_per_machine), rank, receives=not is_cuda)
    inputs = without_values(batch) if batch is not None else _default_batch(model)
    engine = engine_of(model, "sw.dry_run")
    stepper = _make_optimizer(optimizer, model, in_backward=in_backward)

    average = ExponentialMovingAverage(model) if has_average else None

    pipelined = pipelined_of(model)

    def forward_and_backward() -> None:
        if pipelined is not None:
            pipelined.losses(
                model,
                [inputs] * num_microbatches,
                forward or call_model,
                functools.partial(forward_loss, loss_fn=loss_fn, forward=forward),
                backward=torch_private.backward_under_modes,
            )
            return
        for index in range(num_microbatches):
            with gradient_sync(model, index == num_microbatches - 1):
                loss = forward_loss(model, inputs, loss_fn, forward)
                torch_private.backward_under_modes([loss / num_microbatches if num_microbatches > 1 else loss])

    attention = FusedAttention(is_cuda=is_cuda, hides_tokens=hides_tokens(batch))
    with attention, KnownShapes(), torch_private.no_autocast_on_meta(), _named_errors(model):
        forward_and_backward()  # records the order of units and allocates the buffers; later steps are all alike
        stepper.step()
        stepper.zero_grad()
        engine.free_gradients()
        with record_collectives(model) as events:
            totals = _run_and_count(forward_and_backward, stepper, engine, is_cuda=is_cuda)
    if num_bytes := buffer_bytes(model, "meta"):
        totals["buffers"] = num_bytes
    if average is not None:
        totals["average"] = average.num_bytes - average.num_host_bytes
        totals["host"] += average.num_host_bytes
    strategy = plan.strategy if isinstance(plan.strategy, str) else plan.placements.describe()
    bubble = _bubble_share(plan, num_microbatches)
    return DryRun(events, sum(totals.values()) - totals["host"], totals, rank, world_size, strategy, count, bubble)


def _run_and_count(
    forward_and_backward: Callable[[], None], optimizer: torch.optim.Optimizer, engine: Engine, *, is_cuda: bool
) -> dict[str, int]:
    """Run a step of the steady state, and return the bytes at its peak, by category."""
    totals = held_bytes(engine, [optimizer])
    # On the host, and in a GPU's fused kernels, the update has no temporary tensors on the device.
    counts_update = not is_cuda and not any(group.facts.is_offloaded for group in engine.groups)
    with _Log() as seen:
        gc.collect()  # garbage of an earlier dry run must not be freed during this step
        seen.see_all_objects()
        before = seen.live_bytes
        at_rest = {category: storage_bytes(tensors) for category, tensors in _allocated_in_a_step(engine).items()}
        forward_and_backward()
        if counts_update:
            optimizer.step()
    totals["activations"] = seen.peak_bytes - before
    for category, tensors in _allocated_in_a_step(engine).items():
        more = seen.bytes_at_peak(tensors) - at_rest[category]
        totals["activations"] -= more
        totals[category] += more
    seen.forget()
    if not counts_update:
        optimizer.step()
    return totals


def _allocated_in_a_step(engine: Engine) -> dict[str, Iterable[Tensor | None]]:
    """Return, by category, the tensors that an engine allocates during a step."""
    return {
        "gradients": [
            tensor for group in engine.groups if not group.facts.is_offloaded for tensor in group.gradient.buffers
        ],
        "gathered": [group.gathered for group in engine.groups if group.resident_buffer is None],
        "reduce": [group.gradient.scratch for group in engine.groups],
    }


class _Log(StorageCount):
    """Counts bytes of storages, and records every change, so that the contents of the peak are known afterwards."""

    def __init__(self) -> None:
        super().__init__("meta", sees_arguments=False)
        self._names: dict[int, int] = {}  # numbers of live storages by address; a freed storage's address is reused
        self._changes: list[tuple[int, int]] = []
        self._num_to_peak = 0

    def _note(self, storage: torch.UntypedStorage) -> None:
        before, peak = self.live_bytes, self.peak_bytes
        super()._note(storage)
        if self.live_bytes != before:
            name = self._names.setdefault(storage._cdata, len(self._changes))  # noqa: SLF001
            self._changes.append((name, self.live_bytes - before))
        if self.peak_bytes != peak:
            self._num_to_peak = len(self._changes)

    def _freed(self, key: int) -> None:
        before = self.live_bytes
        super()._freed(key)
        self._changes.append((self._names.pop(key, -1), self.live_bytes - before))

    def bytes_at_peak(self, tensors: Iterable[Tensor | None]) -> int:
        """Return the bytes that the storages of these live tensors had at the peak."""
        names = {self._names.get(torch_private.storage_identity(tensor)) for tensor in tensors if tensor is not None}
        return sum(change for name, change in self._changes[: self._num_to_peak] if name in names)


def rehearse(
    build_model: Callable[[], nn.Module],
    plan: ParallelPlan,
    *,
    world_size: int,
    ranks_per_machine: int | None = None,
) -> None:
    """Apply a plan to a model on meta as the first rank of each pipeline stage would, and discard the result.

    ``sw.parallelize``'s own code checks the plan, so errors are the same as in training, without starting processes.

    Raises:
        PlanError, MeshError: The plan does not fit the model or the world.
    """
    mesh = plan.mesh(world_size, ranks_per_machine)
    for stage in range(plan.pp):
        rank = stage * (world_size // plan.pp)
        _rank_model(build_model, plan, mesh, rank, receives=False)


def _rank_model(
    build_model: Callable[[], nn.Module],
    plan: ParallelPlan,
    mesh: Mesh,
    rank: int,
    *,
    receives: bool,
) -> tuple[nn.Module, int]:
    """Return the model on meta under ``plan`` as ``rank`` holds it, and the number of parameters of the whole model."""
    mesh.coordinate(rank)
    model = build_on_meta(build_model)
    prepared = prepare(model, plan, device=torch.device("meta"))
    count = sum(parameter.numel() for parameter in model.parameters())
    comms = record_comms(mesh, rank, receives=receives, is_replicated=plan.is_replicated)
    samples = mesh.data_parallel_group(rank)
    apply_plan(
        model,
        prepared,
        comms,
        lambda: RecordComm(DATA_PARALLEL, rank=samples.index(rank), size=len(samples), device="meta"),
    )
    return model, count


def _bubble_share(plan: ParallelPlan, num_microbatches: int) -> float | None:
    """Return :attr:`DryRun.bubble_share`."""
    policy = plan.pipeline_policy
    if policy is None:
        return None
    return float(simulate(replace(policy, num_microbatches=num_microbatches).build(plan.pp), Durations()).bubble_share)


def record_comms(mesh: Mesh, rank: int, *, receives: bool, is_replicated: bool = False) -> Comms:
    """Return Comms of ``rank`` on ``mesh`` that record collectives and communicate nothing."""

    def open_axis(axis: str, _purpose: str, ranks: Sequence[int]) -> RecordComm:
        return RecordComm(axis, rank=ranks.index(rank), size=len(ranks), device="meta", receives=receives)

    return open_mesh_comms(mesh, rank, open_axis, is_replicated=is_replicated)


def _check_optimizer(optimizer: str | OptimizerFactory) -> None:
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise PlanError(
            f"optimizer={optimizer!r}: expected one of {', '.join(OPTIMIZERS)}, or a function from parameters to an"
            " optimizer.\n  Pass for example optimizer=lambda params: torch.optim.Adagrad(params)."
        )


def _make_optimizer(optimizer: str | OptimizerFactory, model: nn.Module, *, in_backward: bool) -> torch.optim.Optimizer:
    parameters: Iterable[Any] = flat_parameters(model) if in_backward else model.parameters()
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    made = make(muon_groups(model) if optimizer == "muon" else parameters)
    if in_backward:
        optimizer_in_backward(model, made)
    return made


def _resolve_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise PlanError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}.\n  Leave it at 'auto'.")
    return ("nccl" if torch.cuda.is_available() else "gloo") if backend == "auto" else backend


def _default_batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    from shardwise.models.transformer import GPT

    if not isinstance(model, GPT):
        raise PlanError(
            f"sw.dry_run() got no batch for a {type(model).__name__}; only our GPT has one by default.\n"
            "  Pass batch=..., as to sw.train_step(); its values do not count."
        )
    tokens_BT = torch.empty(1, model.config.seq_len, dtype=torch.int64, device="meta")
    return tokens_BT, tokens_BT


@contextlib.contextmanager
def _named_errors(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, StateError):
            raise
        raise without_values_error(model, error, "sw.dry_run") from error
