"""The plan: one frozen description of a training, shared by planner, engine, checkpoints and configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.spec.errors import MeshError, PlanError
from shardwise.spec.granularity import Granularity, resolve_granularity
from shardwise.spec.mesh import Mesh
from shardwise.spec.policies import (
    FULL_PRECISION,
    ActivationOffloadPolicy,
    OffloadPolicy,
    PrecisionPolicy,
    RecomputePolicy,
    WrapPolicy,
    activation_offload_policy,
    check_offload,
    ignored_entries,
    is_positive,
    offload_policy,
    recompute_policy,
    translated,
    wrap_policy,
)
from shardwise.spec.quantize import Quantization
from shardwise.spec.schedule import PipelinePolicy, pipeline_policy
from shardwise.spec.shown import short_repr
from shardwise.spec.styles import parse_table
from shardwise.spec.traffic.data import BUFFER_SYNCS

if TYPE_CHECKING:
    from shardwise.spec.placement import Placements

#: How the gradients of microbatches are added up; ``auto`` depends on the strategy.
ACCUMULATIONS = ("auto", "sharded", "unsharded", "defer_replicate")

#: Actions of ``parallelize`` if ranks have different weights.
SYNCS = ("warn", "error", "rank0")


@dataclass(frozen=True)
class ParallelPlan:
    """The strategy, the number of ranks on each axis, the dtypes and the units of a training.

    Every policy can be given as an object, or as a mapping of its fields, as in a configuration file.

    Attributes:
        strategy: A preset (``ddp``, ``zero1``, ``zero2``, ``shard_grad_op``, ``zero3``, ``hsdp``,
            ``hybrid_shard_grad_op``, or ``data_parallel``: replicas in one process), an alias (``fsdp``,
            ``FULL_SHARD``, ...; case does not matter), or a ``Placements``.
        dp_replicate: Number of groups of ranks that each have a copy of the model, placed by the strategy. Gradients
            are summed inside each group, then over the groups. For ``hsdp`` and ``hybrid_shard_grad_op``, 1 means the
            rest of the world divided by ``dp_shard``, or one group for each machine if ``dp_shard`` is -1.
        dp_shard: Ranks of a group, the axis on which the strategy acts. ``-1``: the rest of the world.
        cp: Context-parallel ranks. Each computes a part of every sequence. All of them read the same samples, and
            parameters are sharded over them as over ``dp_shard``. For our GPT and causal language models of
            transformers.
        tp: Tensor-parallel ranks. Each stores and multiplies a part of the large weights.
        pp: Pipeline ranks. Each stores some stages of the model. Train with ``sw.train_step``, evaluate with
            ``sw.eval_step``. Gradients of the microbatches are added up and reduced once.
        ep: Expert-parallel ranks: neighbours among the ``dp_shard * cp`` ranks. Each stores a part of the experts of
            every mixture and receives their tokens from the other ranks. Ranks with the same experts shard or replicate
            them according to the strategy.
        expert_capacity: ``None``: an expert processes every token that chose it. With a factor f, a rank's n tokens and
            k choices each, one of E experts processes the first ``ceil(f * n * k / E)``, first choices before second
            ones, in the order of the tokens. The mixture adds nothing to the other tokens. Also acts with ``ep=1``.
        tp_plan: How ``tp`` cuts the model: name patterns and styles (``spec.styles``), such as
            ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``. They take precedence over the known table of
            the model's class. ``None``: only that table.
        sequence_parallel: With ``tp``: norms, dropout and the residual stream between the cut layers are divided by
            positions. For our GPT, and GPT-2, BERT, ViT, Llama, Qwen3 and Mixtral of transformers.
        auto_wrap_policy: Which modules become units: ``"auto"`` (the model's repeated blocks), ``"none"``, or one of
            ``sw.wrap_by_class``, ``sw.wrap_by_size``, ``sw.wrap_by_name``. In a file: ``by_class: [names]``,
            ``by_size: numel``, ``by_name: [patterns]``.
        ignored: Modules and parameters that are not sharded, not compared over ranks and not reduced: they are separate
            on each rank. Given as objects, or as shell patterns of their names (``*`` does not cross a dot; a module
            includes everything below it).
        row_sharded: Name patterns of embeddings whose rows, with gradients and optimizer state, are spread over all
            ranks under any strategy; only the rows that a batch looks up are sent (``parallel.sharded_embedding``). Not
            with ``tp``, ``cp``, ``pp``, ``ep``, ``compile``.
        reshard_after_forward: ``True``: a unit is released after its forward and gathered again in backward. ``False``:
            it stays gathered. ``"auto"``: the strategy decides. A number: after forward, the unit is sharded over each
            run of that many neighbouring ranks of ``dp_shard``, and backward gathers it from them.
        mp_policy: Dtypes of computing and reducing. ``"bf16"`` is short for ``PrecisionPolicy(param_dtype="bf16")``.
            ``None``: the model's dtypes.
        quantize_frozen: ``"int8"``: frozen weights of linear layers are stored and gathered as int8 blocks
            (``spec.quantize``) and unpacked while their unit computes. ``"bf16"``: the same in 16 bit. State dicts and
            checkpoints have the unpacked values in the weights' original dtype.
        quantized_gather: ``"int8"``: parameters are gathered as int8 blocks (qwZ of ZeRO++, arXiv 2306.10209). Every
            rank computes with the unpacked values, even of its own slice; the optimizer updates the master. Replicated
            frozen parameters are not gathered and stay exact.
        quantized_reduce: ``"int8"``: gradients are sent as int8 blocks and added in fp32 (qgZ of ZeRO++). The mean
            over N ranks is off by at most the sum of the blocks' largest absolute values over 254 N.
        granularity: The smallest part of a parameter that is never divided over ranks, for optimizers whose update
            needs it: ``"element"``, ``"row"``, ``sw.block(n)`` (in a file ``[block, n]``), or ``"tensor"``.
        offload_policy: Data in host memory. ``"none"``; ``"cpu"``: masters, gradients and optimizer state; or an
            ``OffloadPolicy``.
        activation_checkpointing: Modules that are recomputed in backward instead of storing their activations.
            ``"none"``; ``"full"``: every unit; ``"selective"``: every unit, except outputs of matrix products and
            attention; a wrap policy: the modules that it names; or a ``RecomputePolicy``.
        offload_activations: ``True``: tensors that backward needs from the forward of a unit (from a recomputed unit:
            its inputs) are kept in host memory, and copied back one unit before backward needs them. A wrap policy
            names other modules than units; or an ``ActivationOffloadPolicy``. Not with ``"selective"`` recomputation.
        accumulation: How the microbatches of a step are added up. ``"sharded"``: every microbatch is reduced, and the
            means are added in the master's dtype. ``"unsharded"``: each rank adds its microbatches in ``reduce_dtype``
            and reduces once. ``"defer_replicate"``: every microbatch is reduced inside its group, the last one also
            over the groups. ``"auto"``: the strategy decides.
        pipeline: With ``pp`` of 2 or more: the schedule, by name or as a ``PipelinePolicy``. ``None``: 1F1B with ``pp``
            microbatches.
        merge_units: Neighbouring units of a ``ModuleList`` or ``Sequential`` are gathered and reduced together up to
            this many bytes of parameters: fewer messages, more memory. ``"auto"``: up to 2 MiB (on CUDA 1 MiB a rank
            if that is more), and at most an eighth of the model (``spec.module_chain``). ``False``: none are merged.
        forward_prefetch: How many units are gathered ahead of their turn in forward, in the order recorded by the first
            step. ``"auto"``: one. More units ahead hide slow gathers behind several small units; each needs the memory
            of one more gathered unit. 0 needs the least memory, and every gather is waited for.
        backward_prefetch: The same in backward.
        gradient_buffers: Most full-size gradient buffers in use at once. With 1 or 2, backward waits for the previous
            unit's reduction before it collects the gradients of a unit. With n > 2, reductions of n - 2 more units
            may still be running.
        sync: Action if ranks have different weights: ``"warn"`` sends rank 0's and warns once, ``"error"`` refuses,
            ``"rank0"`` sends rank 0's; with ``"rank0"`` the other ranks may have meta tensors.
        sync_buffers: Action before the first forward after one in train mode, for buffers that each rank has changed,
            such as running statistics of batch norm. ``"broadcast"`` sends rank 0's. ``"mean"`` averages floating-point
            buffers and sends rank 0's others. ``"none"`` does nothing. ``"auto"`` broadcasts the buffers that are saved
            with the model. A buffer that counts a rank's own samples gets rank 0's count, as in torch's DDP.
        compile: Compiles every unit that encloses no other with ``torch.compile``. Not with ``tp``, ``cp``, ``ep`` or
            ``row_sharded``, whose collectives are inside units, nor with a ``RecomputePolicy`` that saves outputs of
            operators.

    Raises:
        PlanError: A value is out of range, or two values cannot be combined.
        PlacementError: The strategy is unknown.
    """

    strategy: str | Placements = "zero3"
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_capacity: float | None = None
    tp_plan: Mapping[str, str] | None = None
    sequence_parallel: bool = False
    auto_wrap_policy: str | WrapPolicy | Mapping[str, Any] = "auto"
    ignored: Any = ()
    row_sharded: str | Sequence[str] = ()
    reshard_after_forward: str | bool | int = "auto"
    mp_policy: PrecisionPolicy | Mapping[str, Any] | str | None = None
    quantize_frozen: str = "none"
    quantized_gather: str = "none"
    quantized_reduce: str = "none"
    granularity: str | Granularity | Sequence[Any] = "element"
    offload_policy: str | OffloadPolicy | Mapping[str, Any] = "none"
    activation_checkpointing: str | WrapPolicy | RecomputePolicy | Mapping[str, Any] = "none"
    offload_activations: bool | WrapPolicy | ActivationOffloadPolicy | Mapping[str, Any] = False
    accumulation: str = "auto"
    pipeline: PipelinePolicy | Mapping[str, Any] | str | None = None
    merge_units: str | bool | int = "auto"
    forward_prefetch: str | int = "auto"
    backward_prefetch: str | int = "auto"
    gradient_buffers: int = 2
    sync: str = "warn"
    sync_buffers: str = "auto"
    compile: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Convert values from files and other libraries to policies; run checks that need neither model nor world."""
        self._translate()
        self._check_degrees()
        _ = self.placements
        self._set("auto_wrap_policy", wrap_policy(self.auto_wrap_policy, "auto_wrap_policy"))
        if self.mp_policy is not None:
            self._set("mp_policy", PrecisionPolicy.parse(self.mp_policy))
        for name, parse in (
            ("offload_policy", offload_policy),
            ("activation_checkpointing", recompute_policy),
            ("offload_activations", activation_offload_policy),
        ):
            policy = parse(getattr(self, name))
            if not isinstance(getattr(self, name), str | bool):  # "none", "cpu", "full", True are not converted
                self._set(name, policy)
        self._set("tp_plan", parse_table(self.tp_plan))
        self._set("ignored", ignored_entries(self.ignored))
        self._set("row_sharded", _row_sharded_names(self.row_sharded))
        self._set("granularity", resolve_granularity(self.granularity))
        _ = self.quantization
        _one_of("accumulation", self.accumulation, ACCUMULATIONS)
        _one_of("sync", self.sync, SYNCS)
        _one_of("sync_buffers", self.sync_buffers, BUFFER_SYNCS)
        self._check_values()
        self._check_pipeline()
        self._check_experts()
        for message in self._conflicts():
            raise PlanError(message)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _translate(self) -> None:
        """Replace objects of torch's FSDP by their counterparts (``spec.policies``)."""
        notes = []
        for name in ("strategy", "auto_wrap_policy", "mp_policy", "offload_policy", "activation_checkpointing"):
            value, note = translated(getattr(self, name))
            if note is not None:
                self._set(name, value)
                notes.append(note)
        self._set("_notes", tuple(notes))

    def _check_degrees(self) -> None:
        for axis in ("dp_replicate", "cp", "tp", "pp", "ep"):
            if not is_positive(getattr(self, axis)):
                raise PlanError(f"{axis}={getattr(self, axis)!r}: expected a positive integer.\n  Set {axis}=1.")
        if self.dp_shard != -1 and not is_positive(self.dp_shard):
            raise PlanError(
                f"dp_shard={self.dp_shard!r}: expected a positive integer or -1.\n  Use -1 for what is left of the"
                " world."
            )

    def _check_values(self) -> None:
        if not isinstance(self.sequence_parallel, bool) or (self.sequence_parallel and self.tp == 1):
            raise PlanError(
                f"sequence_parallel={self.sequence_parallel!r} with tp={self.tp}: expected True or False, and True"
                " divides positions over tp.\n  Set tp to 2 or more, or leave sequence_parallel at False."
            )
        reshard = self.reshard_after_forward
        if not isinstance(reshard, int) and reshard != "auto":
            raise PlanError(
                f"reshard_after_forward={reshard!r}: expected 'auto', True, False or a number of ranks.\n"
                "  Leave it at 'auto'."
            )
        if isinstance(reshard, int) and not isinstance(reshard, bool) and reshard < 2:
            raise PlanError(
                f"reshard_after_forward={reshard}: the ranks that share a unit after its forward are at least 2.\n"
                "  Use False to keep units whole on every rank."
            )
        if not (self.merge_units in ("auto", False) or is_positive(self.merge_units)):
            raise PlanError(
                f"merge_units={self.merge_units!r}: expected 'auto', False or a number of bytes.\n"
                "  Use False to keep every unit by itself."
            )
        self._check_prefetch()
        if not is_positive(self.gradient_buffers):
            raise PlanError(
                f"gradient_buffers={self.gradient_buffers!r}: expected a positive integer.\n"
                "  Use 2, or 1 for the least memory."
            )
        if not isinstance(self.compile, bool):
            raise PlanError(f"compile={self.compile!r}: expected True or False.\n  Leave it at False.")

    def _check_pipeline(self) -> None:
        if self.pp > 1 and self.accumulation in {"sharded", "defer_replicate"}:
            raise PlanError(
                f"accumulation={self.accumulation!r} with pp={self.pp}: a pipeline adds up the gradients of a step's"
                " microbatches and reduces them once.\n  Leave accumulation at 'auto'."
            )
        if self.pipeline is None:
            return
        policy = pipeline_policy(self.pipeline)
        if self.pp == 1:
            raise PlanError(
                f"pipeline={policy.schedule!r} with pp=1: one rank has no pipeline to schedule.\n"
                "  Leave pipeline out, or set pp to 2 or more."
            )
        policy.check(self.pp)
        if not isinstance(self.pipeline, str):
            self._set("pipeline", policy)

    def _check_experts(self) -> None:
        capacity = self.expert_capacity
        if capacity is not None and (isinstance(capacity, bool | str) or not 0 < capacity < math.inf):
            raise PlanError(
                f"expert_capacity={capacity!r}: expected None or a positive factor.\n"
                "  Use None to send every token to the experts that it chose, or for example 1.25."
            )
        if not self.routes_tokens:
            return
        given = f"ep={self.ep}" if self.ep > 1 else f"expert_capacity={capacity}"
        if capacity is not None and self.cp > 1:
            raise PlanError(
                f"expert_capacity={capacity} with cp={self.cp}: an expert would take other tokens than in one process,"
                " which sees whole sequences.\n  Leave expert_capacity out, or set cp=1."
            )
        for is_refused, what, advice in (
            (self.placements.is_threaded, f"strategy {self.strategy!r}", "Use ddp"),
            (self.compile, "compile=True", "Leave compile at False"),
            (self.sequence_parallel, "sequence_parallel=True", "Leave sequence_parallel at False"),
            (self.inner_size is not None, f"reshard_after_forward={self.inner_size}", "Use True or False"),
        ):
            if is_refused:
                raise PlanError(f"{given} does not go with {what} in this version.\n  {advice}, or set ep=1.")

    def _conflicts(self) -> Iterator[str]:
        """Messages about fields that cannot be combined."""
        is_threaded = self.placements.is_threaded
        others = [f"{axis}={getattr(self, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(self, axis) != 1]
        others += [f"strategy={self.strategy!r}"] if is_threaded else []
        if self.row_sharded and others:
            yield (
                f"row_sharded={list(self.row_sharded)} with {', '.join(others)}: rows are spread over data-parallel"
                " ranks, each with different samples.\n"
                "  Leave row_sharded out, or use dp_shard and dp_replicate alone."
            )
        if self.row_sharded and self.compile:
            yield (
                f"row_sharded={list(self.row_sharded)} with compile=True: compiled units would break at every lookup.\n"
                "  Leave compile at False, or leave row_sharded out."
            )
        for axis in ("pp", "cp"):
            if is_threaded and getattr(self, axis) > 1:
                size = getattr(self, axis)
                yield f"strategy {self.strategy!r} runs in one process, but {axis}={size}.\n  Use ddp, or set {axis}=1."
        for axis in ("tp", "cp"):
            if self.compile and getattr(self, axis) > 1:
                yield (
                    f"compile=True with {axis}={getattr(self, axis)}: compiled units would break at every collective.\n"
                    f"  Leave compile at False, or set {axis}=1."
                )
        if self.compile and self.recompute is not None and self.recompute.save:
            yield (
                "compile=True with operators whose outputs are kept: a compiled unit no longer calls them one by one.\n"
                "  Use activation_checkpointing='none': the compiler computes again what is cheap. Or 'full', or"
                " compile=False."
            )
        if self.activation_offload is not None and self.recompute is not None and self.recompute.save:
            yield (
                "offload_activations with recomputation that keeps outputs of operators: those would stay on the"
                " device.\n  Use activation_checkpointing='full' or 'none'."
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each object of torch's FSDP that was replaced by its counterpart."""
        return vars(self)["_notes"]

    @property
    def placements(self) -> Placements:
        """The placements of parameters, gradients and optimizer state."""
        from shardwise.spec.placement import resolve_strategy  # loaded only when a strategy is asked for

        return resolve_strategy(self.strategy)

    @property
    def precision(self) -> PrecisionPolicy:
        """``mp_policy`` as a policy."""
        assert not isinstance(self.mp_policy, Mapping | str)  # __post_init__ has replaced it
        return self.mp_policy or FULL_PRECISION

    @property
    def quantization(self) -> Quantization:
        """The three fields about quantization as one object.

        Raises:
            PlanError: A form is unknown.
        """
        return Quantization(frozen=self.quantize_frozen, gather=self.quantized_gather, reduce=self.quantized_reduce)

    @property
    def cut_granularity(self) -> Granularity:
        """``granularity`` as an object."""
        return resolve_granularity(self.granularity)

    @property
    def offload(self) -> OffloadPolicy | None:
        """``offload_policy`` as a policy; ``None`` where nothing is offloaded."""
        return offload_policy(self.offload_policy)

    @property
    def recompute(self) -> RecomputePolicy | None:
        """``activation_checkpointing`` as a policy; ``None`` where nothing is recomputed."""
        return recompute_policy(self.activation_checkpointing)

    @property
    def activation_offload(self) -> ActivationOffloadPolicy | None:
        """``offload_activations`` as a policy; ``None`` where nothing is offloaded."""
        return activation_offload_policy(self.offload_activations)

    @property
    def pipeline_policy(self) -> PipelinePolicy | None:
        """``pipeline`` as a policy; ``None`` where ``pp`` is 1."""
        return pipeline_policy(self.pipeline) if self.pp > 1 else None

    @property
    def routes_tokens(self) -> bool:
        """Whether mixtures of experts send tokens to other ranks, or drop some."""
        return self.ep > 1 or self.expert_capacity is not None

    @property
    def wrap_policy(self) -> str | WrapPolicy:
        """``auto_wrap_policy`` as a policy, ``"auto"`` or ``"none"``; always ``"none"`` for replicas in one process."""
        assert not isinstance(self.auto_wrap_policy, Mapping)  # __post_init__ has replaced it
        return "none" if self.placements.is_threaded else self.auto_wrap_policy

    @property
    def is_replicated(self) -> bool:
        """Whether gradients are also summed over ``dp_replicate``, even if the axis has one rank."""
        return self.placements.is_hybrid or self.dp_replicate > 1

    @property
    def inner_size(self) -> int | None:
        """Ranks over which a unit is sharded after forward; ``None`` if ``reshard_after_forward`` is not a number."""
        return None if isinstance(self.reshard_after_forward, bool | str) else self.reshard_after_forward

    @property
    def merge_limit(self) -> int | None:
        """The most bytes of parameters in a merged unit; 0: no merging, ``None``: depends on the model's size."""
        return None if self.merge_units == "auto" else int(self.merge_units)

    def _check_prefetch(self) -> None:
        for name in ("forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise PlanError(
                    f"{name}={value!r}: expected 'auto' or the number of units that are gathered ahead.\n"
                    "  Leave it at 'auto', or use 2 where gathers of small units are slow."
                )
            if value == "auto" or value < 2:
                continue
            if self.quantized_gather != "none" or self.quantize_frozen != "none":
                raise PlanError(
                    f"{name}={value} with quantized parameters: packed gathers use one receive buffer in turn.\n"
                    f"  Leave {name} at 'auto', or quantized_gather and quantize_frozen at 'none'."
                )

    @property
    def prefetch(self) -> tuple[int, int]:
        """The number of units gathered ahead in forward and in backward."""
        forward, backward = self.forward_prefetch, self.backward_prefetch
        return 1 if isinstance(forward, str) else forward, 1 if isinstance(backward, str) else backward

    def mesh(self, world_size: int, local_size: int | None = None) -> Mesh:
        """The mesh of this plan, with ``local_size`` ranks on each machine (``None``: not known).

        Raises:
            MeshError: The degrees do not make the world.
            PlanError: ``reshard_after_forward`` does not divide ``dp_shard``, ``accumulation="defer_replicate"`` has
                no sum over ``dp_replicate``, or replicas in one process have a world of several ranks.
        """
        replicate, shard = self.dp_replicate, self.dp_shard
        if self.placements.is_threaded and world_size != 1:
            raise PlanError(
                f"strategy={self.strategy!r} runs replicas in one process, but the world has {world_size}.\n"
                "  Launch one process (--nproc 1), or use ddp, with a process for each device."
            )
        if self.accumulation == "defer_replicate" and not (self.is_replicated and self.placements.pools_gradients):
            raise PlanError(
                f"accumulation='defer_replicate' adds up sharded gradients and sums them over dp_replicate once, but"
                f" strategy {self.strategy!r} with dp_replicate={replicate} has no such sums.\n"
                "  Use hsdp, or zero2, shard_grad_op or zero3 with dp_replicate of 2 or more; or 'sharded'."
            )
        if self.placements.is_hybrid and replicate == 1:
            others = self.pp * self.cp * self.tp
            if shard == -1:
                machine = self._machine(world_size, local_size)
                shard = machine // others
                if not shard:
                    raise MeshError(
                        f"strategy {self.strategy!r} shards inside a machine, but tp, pp and cp together take {others}"
                        f" ranks, more than the {machine} of one.\n"
                        "  Set dp_replicate (groups) or dp_shard (ranks of a group), or use zero3."
                    )
            if world_size % (shard * others) == 0:
                replicate = world_size // (shard * others)
        mesh = Mesh.build(
            world_size, pp=self.pp, dp_replicate=replicate, dp_shard=shard, cp=self.cp, tp=self.tp, ep=self.ep
        )
        if self.inner_size is not None:
            check_inner_size(self.inner_size, mesh.dp_shard)
        return mesh

    def _machine(self, world_size: int, local_size: int | None) -> int:
        """Ranks on each machine: the default size of a group in hybrid sharding."""
        if world_size == 1:
            return 1
        if local_size is None or world_size % local_size:
            found = "is not known" if local_size is None else f"is {local_size} here"
            raise MeshError(
                f"strategy {self.strategy!r} shards inside a machine and replicates over machines, but how many of the"
                f" {world_size} ranks share one {found}.\n"
                "  Set dp_replicate (groups) or dp_shard (ranks of a group), or launch with torchrun, which tells."
            )
        return local_size


def check_inner_size(size: int, dp_shard: int) -> None:
    """Refuse a number as ``reshard_after_forward`` that does not cut ``dp_shard`` into inner groups.

    Raises:
        PlanError: ``size`` is 1 or ``dp_shard``, or does not divide ``dp_shard``.
    """
    if 1 < size < dp_shard and dp_shard % size == 0:
        return
    divisors = [str(other) for other in range(2, dp_shard) if dp_shard % other == 0]
    numbers = f"one of {', '.join(divisors)}, " if divisors else ""
    raise PlanError(
        f"reshard_after_forward={size}: as a number of ranks it must divide dp_shard={dp_shard} and lie between 1 and"
        f" it.\n  Use {numbers}True (over all {dp_shard}) or False (kept whole)."
    )


def plan_fields() -> tuple[str, ...]:
    """The names of all fields, in order."""
    return tuple(field.name for field in dataclasses.fields(ParallelPlan))


def check_plan(plan: ParallelPlan) -> None:
    """Refuse fields that have no effect under the strategy.

    Raises:
        PlanError: ``reshard_after_forward`` for a strategy that replicates parameters, ``quantized_gather`` for one
            that gathers nothing, fields about units or recomputation for replicas in one process, or an
            ``offload_policy`` about shards that the strategy does not have.
    """
    if plan.reshard_after_forward != "auto" and not plan.placements.shards_parameters:
        raise PlanError(
            f"reshard_after_forward={plan.reshard_after_forward} has no meaning for strategy {plan.strategy!r}:"
            " it keeps parameters whole.\n  Leave it at 'auto', or use zero3 or shard_grad_op."
        )
    if plan.placements.is_threaded and (
        plan.recompute is not None or plan.activation_offload is not None or plan.compile
    ):
        raise PlanError(
            f"strategy {plan.strategy!r} runs copies of the model's modules: activation_checkpointing,"
            " offload_activations and compile do not act on them.\n  Leave them out, or use ddp."
        )
    for name, harmless in (("auto_wrap_policy", ("auto", "none")), ("merge_units", ("auto", False))):
        if plan.placements.is_threaded and getattr(plan, name) not in harmless:
            raise PlanError(
                f"{name}={getattr(plan, name)!r} has no meaning for strategy {plan.strategy!r}: the whole model is one"
                " unit.\n  Leave it out, or use ddp."
            )
    if plan.quantized_gather != "none" and not plan.placements.shards_optimizer:
        raise PlanError(
            f"quantized_gather={plan.quantized_gather!r} has no meaning for strategy {plan.strategy!r}: nothing is"
            " gathered.\n  Leave it out; quantized_reduce works under every strategy."
        )
    check_offload(plan.offload, plan.placements)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        shown = ", ".join(repr(choice) for choice in choices)
        raise PlanError(f"{name}={value!r}: expected one of {shown}.\n  Set {name} to one of them.")


def _row_sharded_names(value: Any) -> tuple[str, ...]:
    """``ParallelPlan.row_sharded`` as a tuple of name patterns.

    Raises:
        PlanError: It is something else.
    """
    names = (value,) if isinstance(value, str) else value
    if not (isinstance(names, (list, tuple)) and all(isinstance(name, str) and name for name in names)):
        raise PlanError(
            f"row_sharded={value!r}: expected names of embeddings.\n  Write for example row_sharded=['embedding']."
        )
    return tuple(names)
