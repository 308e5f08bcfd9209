"""How to train: one frozen description that planning, the engine, checkpoints and configuration share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.spec.errors import MeshError, PlanError
from shardwise.spec.foreign import translated
from shardwise.spec.granularity import Granularity, resolve_granularity
from shardwise.spec.mesh import Mesh
from shardwise.spec.policies import (
    OffloadPolicy,
    RecomputePolicy,
    WrapPolicy,
    check_offload,
    ignored_entries,
    offload_policy,
    recompute_policy,
    wrap_policy,
)
from shardwise.spec.precision import FULL_PRECISION, PrecisionPolicy
from shardwise.spec.quantize import Quantization
from shardwise.spec.rows import row_sharded_names
from shardwise.spec.schedule import PipelinePolicy, pipeline_policy
from shardwise.spec.styles import parse_table
from shardwise.spec.traffic.data import BUFFER_SYNCS

if TYPE_CHECKING:
    from shardwise.spec.placement import Placements

#: How microbatches are accumulated; what ``auto`` becomes depends on the strategy.
ACCUMULATIONS = ("auto", "sharded", "unsharded", "defer_replicate")

#: What happens at ``parallelize`` where ranks hold different weights.
SYNCS = ("warn", "error", "rank0")


@dataclass(frozen=True)
class ParallelPlan:
    """Which strategy, on which mesh, wrapped how.

    Attributes:
        strategy: A preset name or alias in any case (``ddp``, ``zero1``, ``zero2``, ``shard_grad_op``, ``zero3``,
            ``hsdp``, ``hybrid_shard_grad_op``; ``data_parallel``, replicas in one process), or a ``Placements``.
        dp_replicate: Groups of ranks that each hold the model as the strategy says. Gradients are summed inside each
            group, then over the groups. ``hsdp`` and ``hybrid_shard_grad_op`` with 1 take what ``dp_shard`` leaves of
            the world; where that says nothing either, a group is the ranks of one machine.
        dp_shard: Ranks of a group: the axis on which the strategy's placements act. ``-1``: what is left of the world.
        cp: Context-parallel ranks, which each compute with a part of every sequence and read the same samples. They
            share the parameters as ``dp_shard`` ranks do. For our GPT and causal language models of transformers.
        tp: Tensor-parallel ranks, which each hold a part of the large weights and compute with it.
        pp: Ranks of a pipeline, which each hold some of the model's stages. Such a model is run by ``sw.train_step``
            and ``sw.eval_step``; it adds up the gradients of the microbatches and reduces them once.
        ep: Expert-parallel ranks: neighbours among the ``dp_shard * cp`` ranks that share parameters, each of which
            holds a part of every mixture's experts and gets the tokens for them from the others. Only ranks with the
            same experts shard or replicate those, as the strategy says.
        expert_capacity: ``None``: every token gets to the experts that it chose. A factor: of a rank's batch of n
            tokens with k choices each, an expert of E takes the first ``ceil(factor * n * k / E)``, first choices
            before second ones, in the order of tokens; the others add nothing. It acts with any ``ep``, 1 too.
        tp_plan: How ``tp`` cuts the model: a mapping from name patterns to styles (``spec.styles``), such as
            ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``, beside and instead of what is known for the
            model's class. ``None``: as is known.
        sequence_parallel: With ``tp``: what lies between the divided layers (norms, dropout, the residual stream) is
            divided over its ranks too, by positions. For our GPT, and GPT-2, BERT, ViT, Llama, Qwen3 and Mixtral of
            transformers.
        auto_wrap_policy: ``"auto"`` (the model's repeated blocks), ``"none"``, or a wrap policy. A mapping with one of
            ``by_class: [names]``, ``by_size: numel``, ``by_name: [globs]`` is what configuration files write.
        ignored: What is left alone: neither sharded, compared over the ranks nor reduced, but each rank's own (experts,
            parts that another library moves). Shell patterns of module or parameter names (``*`` does not cross a dot;
            of a module everything below it is meant), modules, or parameters. ``engine.ignore`` has the details.
        row_sharded: Embeddings whose rows are spread over all ranks, under any strategy of the rest: each rank holds a
            range of them with gradients and optimizer state, and only the rows that a batch looks up travel
            (``embedding.rows``). Shell patterns of module names. Not with ``tp``, ``cp``, ``pp``, ``ep``, ``compile``.
        reshard_after_forward: ``"auto"`` (as the strategy says), ``True``, ``False``, or a number: after its forward a
            unit stays sharded over that many neighbouring ranks of ``dp_shard``, and backward gathers it from them.
        mp_policy: In which dtypes to compute and reduce; ``None``: the model's own, no cast. A mapping of the fields of
            ``PrecisionPolicy`` is what configuration files write. Its ``overrides`` are for parts of the model.
        quantize_frozen: ``"int8"``: frozen weights of linear layers are held and gathered as int8 blocks, and unpacked
            while their unit computes (``spec.quantize``); ``"bf16"``: the same in 16 bit. Both also where parameters
            are replicated. State dicts and checkpoints hold what is read from them, in the dtype that the weights had.
        quantized_gather: ``"int8"``: parameters are sent as int8 blocks when they are gathered (ZeRO++'s qwZ). Every
            rank computes with what is read from the blocks, its own part too; the optimizer updates the master. Frozen
            parameters that all ranks hold anyway are not gathered, and stay as they are.
        quantized_reduce: ``"int8"``: gradients are sent as int8 blocks to the rank that adds them up, in fp32 (ZeRO++'s
            qgZ). The mean over N ranks is off by at most the sum of the blocks' largest values over 254 N.
        granularity: What a rank's cut never divides, for the optimizer's sake: ``"element"``, ``"row"``,
            ``sw.block(n)`` (in a file ``[block, n]``) or ``"tensor"``, which gives every parameter whole to one rank
            (of what tensor or expert parallelism has cut, this rank's part).
        offload_policy: What is kept on the host. ``"none"``; ``"cpu"``: masters, gradients and optimizer state; or an
            ``OffloadPolicy``, of which files write a mapping of the fields.
        activation_checkpointing: What is computed again in backward instead of being kept. ``"none"``; ``"full"``:
            every unit; ``"selective"``: every unit, but for what matrix products and attention give; a wrap policy: the
            modules that it names; or a ``RecomputePolicy``. Files write one of the strings, the mapping of a wrap
            policy, or a mapping of the fields of ``RecomputePolicy``.
        accumulation: ``"auto"``, ``"sharded"`` (every microbatch is reduced, and the means are added in the master's
            dtype), ``"unsharded"`` (a rank adds its microbatches in ``reduce_dtype``, and only the last sends), or
            ``"defer_replicate"`` (every microbatch is reduced inside its group, the last also over the groups).
        pipeline: With ``pp`` of 2 or more: how microbatches go through the stages. ``None`` (1F1B with ``pp``
            microbatches), the name of a schedule, or a ``PipelinePolicy``, of which files write a mapping of the
            fields.
        merge_units: Neighbouring units of a ``ModuleList`` or ``Sequential`` travel together up to this many bytes of
            parameters: fewer messages, more memory. ``"auto"``: up to 2 MiB, on CUDA 1 MiB a rank if that
            is more, and an eighth of the model (``spec.merge``); ``False``: every unit by itself.
        gradient_buffers: Full-size gradient buffers per size of unit. With 2 the gradients of a unit are collected
            while those of the unit before are being reduced, with 3 those of the two units before, and so on; 1 takes
            the least memory.
        keep_buffers: Memory for gathered units, gradient buffers and gradients stays allocated from step to step, so
            that on the CPU no page is touched anew. ``False``: it is given back to torch's allocator when nothing is in
            it, and forward's activations can lie there. The most that is held at once is then told by
            ``sw.dry_run``; ``sw.summary`` tells the most of each category, which are not all there at once.
        sync: What to do where ranks hold different weights: ``"warn"`` sends rank 0's and warns once, ``"error"``
            refuses, ``"rank0"`` takes rank 0's and lets the other ranks hold meta tensors.
        sync_buffers: What happens, before the first forward after one in train mode, to buffers that each rank has
            changed by itself, such as batch norm's running statistics: ``"broadcast"`` sends rank 0's, ``"mean"``
            averages those of floating point over the ranks and sends rank 0's others, ``"none"`` leaves them alone.
            ``"auto"`` broadcasts those that are saved with the model, under every strategy; what is not saved (masks,
            rotary frequencies) does not change.
        compile: Compile every unit that encloses no other (the root only where it is the one unit) by itself, with
            ``torch.compile``. Not together with operators whose outputs are kept (``activation_checkpointing``), nor
            with ``tp``, ``cp``, ``ep`` or ``row_sharded``, whose collectives lie inside of units.

    Raises:
        PlanError: A value is out of range, or does not go with another.
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
    mp_policy: PrecisionPolicy | Mapping[str, Any] | None = None
    quantize_frozen: str = "none"
    quantized_gather: str = "none"
    quantized_reduce: str = "none"
    granularity: str | Granularity | Sequence[Any] = "element"
    offload_policy: str | OffloadPolicy | Mapping[str, Any] = "none"
    activation_checkpointing: str | WrapPolicy | RecomputePolicy | Mapping[str, Any] = "none"
    accumulation: str = "auto"
    pipeline: PipelinePolicy | Mapping[str, Any] | str | None = None
    merge_units: str | bool | int = "auto"
    gradient_buffers: int = 2
    keep_buffers: bool = True
    sync: str = "warn"
    sync_buffers: str = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        """Check every field that can be checked without a model or a world."""
        self._translate()
        for axis in ("dp_replicate", "cp", "tp", "pp", "ep"):
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise PlanError(f"{axis}={size!r}: expected a positive integer.\n  Set {axis}=1.")
        if isinstance(self.dp_shard, bool) or not isinstance(self.dp_shard, int):
            raise PlanError(
                f"dp_shard={self.dp_shard!r}: expected an integer.\n  Use -1 for what is left of the world."
            )
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise PlanError(
                f"dp_shard={self.dp_shard}: expected a positive integer or -1.\n  Use -1 for what is left of the world."
            )
        _ = self.placements
        self._parse_policies()
        object.__setattr__(self, "tp_plan", parse_table(self.tp_plan))
        if not isinstance(self.sequence_parallel, bool) or (self.sequence_parallel and self.tp == 1):
            raise PlanError(
                f"sequence_parallel={self.sequence_parallel!r} with tp={self.tp}: expected True or False, and True"
                " divides positions over tp.\n  Set tp to 2 or more, or leave sequence_parallel at False."
            )
        self._check_context()
        object.__setattr__(self, "ignored", ignored_entries(self.ignored))
        object.__setattr__(self, "row_sharded", row_sharded_names(self.row_sharded))
        self._check_rows()
        self._check_reshard()
        self._check_pipeline()
        self._check_experts()
        _ = self.quantization
        object.__setattr__(self, "granularity", resolve_granularity(self.granularity))
        _one_of("accumulation", self.accumulation, ACCUMULATIONS)
        _one_of("sync", self.sync, SYNCS)
        _one_of("sync_buffers", self.sync_buffers, BUFFER_SYNCS)
        self._check_compile(self.recompute)
        self._check_buffers()

    def _translate(self) -> None:
        """Replace objects of torch's FSDP by what they are here (``spec.foreign``)."""
        notes = []
        for name in ("strategy", "auto_wrap_policy", "mp_policy", "offload_policy", "activation_checkpointing"):
            value, note = translated(getattr(self, name))
            if note is not None:
                object.__setattr__(self, name, value)
                notes.append(note)
        object.__setattr__(self, "_notes", tuple(notes))

    @property
    def notes(self) -> tuple[str, ...]:
        """What objects of torch's FSDP became, in words."""
        return vars(self)["_notes"]

    def _parse_policies(self) -> None:
        """Replace what files write by the policies that it means; words stay words."""
        object.__setattr__(self, "auto_wrap_policy", wrap_policy(self.auto_wrap_policy, "auto_wrap_policy"))
        if self.mp_policy is not None:
            object.__setattr__(self, "mp_policy", PrecisionPolicy.parse(self.mp_policy))
        for name, parse in (("offload_policy", offload_policy), ("activation_checkpointing", recompute_policy)):
            policy = parse(getattr(self, name))
            if not isinstance(getattr(self, name), str):
                object.__setattr__(self, name, policy)

    def _check_rows(self) -> None:
        others = [f"{axis}={getattr(self, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(self, axis) != 1]
        if self.placements.is_threaded:
            others.append(f"strategy={self.strategy!r}")
        if self.row_sharded and others:
            raise PlanError(
                f"row_sharded={list(self.row_sharded)} with {', '.join(others)}: rows are spread over data-parallel"
                " ranks, each with samples of its own.\n"
                "  Leave row_sharded out, or use dp_shard and dp_replicate alone."
            )
        if self.row_sharded and self.compile:
            raise PlanError(
                f"row_sharded={list(self.row_sharded)} with compile=True: compiled units would break at every lookup.\n"
                "  Leave compile at False, or leave row_sharded out."
            )

    def _check_pipeline(self) -> None:
        if self.pp > 1 and self.accumulation in {"sharded", "defer_replicate"}:
            raise PlanError(
                f"accumulation={self.accumulation!r} with pp={self.pp}: a pipeline adds up the gradients of a step's"
                " microbatches and reduces them once.\n  Leave accumulation at 'auto'."
            )
        if self.pp > 1 and self.placements.is_threaded:
            raise PlanError(
                f"strategy {self.strategy!r} runs in one process, but pp={self.pp}.\n  Use ddp, or set pp=1."
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
            object.__setattr__(self, "pipeline", policy)

    def _check_context(self) -> None:
        if self.cp > 1 and self.placements.is_threaded:
            raise PlanError(
                f"strategy {self.strategy!r} runs in one process, but cp={self.cp}.\n  Use ddp, or set cp=1."
            )

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

    def _check_compile(self, policy: RecomputePolicy | None) -> None:
        if not isinstance(self.compile, bool):
            raise PlanError(f"compile={self.compile!r}: expected True or False.\n  Leave it at False.")
        for axis in ("tp", "cp"):
            if self.compile and getattr(self, axis) > 1:
                raise PlanError(
                    f"compile=True with {axis}={getattr(self, axis)}: compiled units would break at every collective.\n"
                    f"  Leave compile at False, or set {axis}=1."
                )
        if self.compile and policy is not None and policy.save:
            raise PlanError(
                "compile=True with operators whose outputs are kept: a compiled unit no longer calls them one by one.\n"
                "  Use activation_checkpointing='full', or compile=False."
            )

    def _check_buffers(self) -> None:
        if not (self.merge_units in ("auto", False) or _is_positive(self.merge_units)):
            raise PlanError(
                f"merge_units={self.merge_units!r}: expected 'auto', False or a number of bytes.\n"
                "  Use False to keep every unit by itself."
            )
        if not _is_positive(self.gradient_buffers):
            raise PlanError(
                f"gradient_buffers={self.gradient_buffers!r}: expected a positive integer.\n"
                "  Use 2, or 1 for the least memory."
            )
        if not isinstance(self.keep_buffers, bool):
            raise PlanError(f"keep_buffers={self.keep_buffers!r}: expected True or False.\n  Leave it at True.")

    @property
    def placements(self) -> Placements:
        """Where parameters, gradients and optimizer state live."""
        from shardwise.spec.placement import resolve_strategy  # placement is read only when a strategy is asked for

        return resolve_strategy(self.strategy)

    @property
    def precision(self) -> PrecisionPolicy:
        """``mp_policy`` as a policy, whatever it was given as."""
        assert not isinstance(self.mp_policy, Mapping)  # __post_init__ has replaced it
        return self.mp_policy or FULL_PRECISION

    @property
    def quantization(self) -> Quantization:
        """What is quantized.

        Raises:
            PlanError: A form is unknown.
        """
        return Quantization(frozen=self.quantize_frozen, gather=self.quantized_gather, reduce=self.quantized_reduce)

    @property
    def cut_granularity(self) -> Granularity:
        """``granularity``, whatever it was given as."""
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
    def pipeline_policy(self) -> PipelinePolicy | None:
        """``pipeline`` as a policy; ``None`` where there is no pipeline."""
        return pipeline_policy(self.pipeline) if self.pp > 1 else None

    @property
    def routes_tokens(self) -> bool:
        """Mixtures of experts send tokens to the experts that they chose, or drop some."""
        return self.ep > 1 or self.expert_capacity is not None

    @property
    def wrap_policy(self) -> str | WrapPolicy:
        """``auto_wrap_policy``, where a mapping has become the policy that it describes."""
        assert not isinstance(self.auto_wrap_policy, Mapping)  # __post_init__ has replaced it
        return self.auto_wrap_policy

    @property
    def is_replicated(self) -> bool:
        """Gradients are also summed over ``dp_replicate``, be it over one group only."""
        return self.placements.is_hybrid or self.dp_replicate > 1

    @property
    def inner_size(self) -> int | None:
        """Ranks that share a unit after its forward, where ``reshard_after_forward`` is a number."""
        return None if isinstance(self.reshard_after_forward, bool | str) else self.reshard_after_forward

    @property
    def merge_limit(self) -> int | None:
        """The most bytes of parameters in a merged unit; 0: none is merged, ``None``: as the size of the model says."""
        return None if self.merge_units == "auto" else int(self.merge_units)

    def mesh(self, world_size: int, local_size: int | None = None) -> Mesh:
        """The mesh of this plan on ``world_size`` ranks, ``local_size`` of them on each machine where that is known.

        Raises:
            MeshError: The degrees do not make the world.
            PlanError: ``reshard_after_forward`` does not divide ``dp_shard``, or there is no replication to defer.
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
                shard = self._machine(world_size, local_size) // others
            if world_size % (shard * others) == 0:
                replicate = world_size // (shard * others)
        mesh = Mesh.build(
            world_size, pp=self.pp, dp_replicate=replicate, dp_shard=shard, cp=self.cp, tp=self.tp, ep=self.ep
        )
        if self.inner_size is not None:
            check_inner_size(self.inner_size, mesh.dp_shard)
        return mesh

    def _machine(self, world_size: int, local_size: int | None) -> int:
        """Ranks of a machine, which are a group of hybrid sharding unless the plan says otherwise."""
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

    def _check_reshard(self) -> None:
        value = self.reshard_after_forward
        if isinstance(value, bool) or value == "auto":
            return
        if not isinstance(value, int):
            raise PlanError(
                f"reshard_after_forward={value!r}: expected 'auto', True, False or a number of ranks.\n"
                "  Leave it at 'auto'."
            )
        if value < 2:
            raise PlanError(
                f"reshard_after_forward={value}: the ranks that share a unit after its forward are at least 2.\n"
                "  Use False to keep units whole on every rank."
            )


def check_inner_size(size: int, dp_shard: int) -> None:
    """Refuse a number as ``reshard_after_forward`` that does not cut ``dp_shard`` into inner groups.

    Raises:
        PlanError: It is 1, ``dp_shard`` itself, or no divisor of it.
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


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        shown = ", ".join(repr(choice) for choice in choices)
        raise PlanError(f"{name}={value!r}: expected one of {shown}.\n  Set {name} to one of them.")


def check_plan(plan: ParallelPlan) -> None:
    """Refuse what cannot be combined.

    Raises:
        PlanError: ``reshard_after_forward`` was given for a strategy that keeps parameters whole, ``quantized_gather``
            for one that gathers nothing, units for one that has none, or ``offload_policy`` asks for shards that it
            does not have.
    """
    if plan.reshard_after_forward != "auto" and not plan.placements.shards_parameters:
        raise PlanError(
            f"reshard_after_forward={plan.reshard_after_forward} has no meaning for strategy {plan.strategy!r}:"
            " it keeps parameters whole.\n  Leave it at 'auto', or use zero3 or shard_grad_op."
        )
    if plan.placements.is_threaded and (plan.recompute is not None or plan.compile):
        raise PlanError(
            f"strategy {plan.strategy!r} runs copies of the model's modules: activation_checkpointing and compile do"
            " not act on them.\n  Leave them out, or use ddp."
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
