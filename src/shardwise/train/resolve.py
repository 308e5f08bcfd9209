"""From a configuration that was read to a run that can start: everything decidable without torch is decided here.

The launcher calls :func:`resolve` before it starts a process, and every rank calls it again, so that a run under
``torchrun`` is refused in the same words, by all ranks alike, before the first collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.spec.errors import ConfigError, MeshError, PlanError, ShardwiseError
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan, check_plan
from shardwise.spec.policies import PrecisionPolicy
from shardwise.spec.schedule.builders import PipelinePolicy
from shardwise.spec.shape.gpt import PRESETS, GPTConfig, gpt_config
from shardwise.train.config import Config, RawConfig
from shardwise.train.data import Data, Source, check_size, find_source, open_data
from shardwise.train.hf import LanguageModel, NotCausalError, read_language_model, stored_dtype
from shardwise.train.tokenizer import BYTES, find_tokenizer, has_tokenizer, tokenized


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule with everything filled in."""

    name: str
    steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    decay_steps: int = 0

    def ratio(self, step: int) -> float:
        """Learning rate of ``step`` (from 0) over the peak rate."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        last = self.steps - 1
        start = (
            max(self.warmup_steps, self.steps - self.decay_steps - 1)
            if self.name == "warmup-stable-decay"
            else self.warmup_steps
        )
        t = min(1.0, max(0.0, (step - start) / max(1, last - start)))
        if self.name == "cosine":
            return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * t)) / 2
        return 1 - (1 - self.min_lr_ratio) * t


_DEFAULT_PRESET = "gpt-tiny"
_DEFAULT_MICRO = 8
#: ``data.seq_len`` where the configuration does not say: as long as the model allows, up to this.
DEFAULT_SEQ_LEN = 2048
#: ``log.every`` on a machine with GPUs, where the configuration does not say: reading a loss makes the host wait there.
GPU_LOG_EVERY = 10
#: Fields of the plan that mean something only beside others.
_READ_WITH = {"pipeline": ("pp",), "sequence_parallel": ("tp",)}


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples per forward, forwards per step, ranks that read, and their product."""

    micro: int
    accumulation: int
    data_parallel_size: int

    @property
    def total(self) -> int:
        """Samples per step over all ranks."""
        return self.micro * self.accumulation * self.data_parallel_size

    def __str__(self) -> str:
        """All three numbers, as they are printed at the start."""
        return (
            f"global batch {self.total} = micro batch {self.micro} x accumulation {self.accumulation} "
            f"x {self.data_parallel_size} rank{'s' if self.data_parallel_size != 1 else ''}"
        )


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A configuration with nothing left open.

    Attributes:
        config: Every value filled in: batch sizes, sequence length, what the optimizer and schedule default to.
        plan: The parallel plan.
        mesh: The mesh of this world.
        batch: Batch sizes.
        model: The shape of a built-in model, ``None`` for a Hugging Face folder.
        positions: The longest sequence that the model takes, where that is known.
        vocab_size: Number of token ids of the model.
        seq_len: Tokens per sample.
        source: The data's files.
        schedule: The learning rate.
        raised_from: The dtype in which a Hugging Face folder stores the weights, where the optimizer updates fp32
            copies of them; ``None``: masters have the stored dtype.
        asked: The keys, as ``section.field``, that ``--set`` gave.
    """

    config: Config
    plan: ParallelPlan
    mesh: Mesh
    batch: Batch
    model: GPTConfig | None
    positions: int | None
    vocab_size: int
    seq_len: int
    source: Source
    schedule: Schedule
    raised_from: str | None = None
    asked: frozenset[str] = frozenset()


def data_of(resolved: RunConfig) -> Data:
    """The samples of a run, as ``train.data.open_data`` makes them."""
    config = resolved.config
    return open_data(
        resolved.source,
        seq_len=resolved.seq_len,
        held_out=config.data.held_out,
        vocab_size=resolved.vocab_size,
        seed=config.train.seed,
    )


def resolve(
    raw: RawConfig,
    world_size: int,
    local_size: int | None = None,
    *,
    checks_data: bool = True,
    raises_masters: bool = True,
    say: Callable[[str], None] | None = None,
) -> RunConfig:
    """Check a configuration for a world of ``world_size`` ranks and fill in what it leaves open.

    Args:
        raw: The configuration as it was read.
        world_size: Ranks.
        local_size: Ranks on each machine; by default all are on this one.
        checks_data: There must be enough data for a step of so many ranks; text is tokenized to know.
        raises_masters: Weights that a folder stores in 16 bit get fp32 masters, unless the configuration names a
            ``master_dtype``.
        say: Called with a line before work that takes time.

    Raises:
        ConfigError: Something in the configuration is wrong; every mistake is listed with its line.
        DataError: The configuration is right but the data is not.
    """
    config, num_found = raw.config, len(raw.mistakes)
    plan, mesh = _plan(raw, world_size, local_size or world_size)
    has_plan = len(raw.mistakes) == num_found
    shape, facts = _model(raw)
    raised_from = None
    if raises_masters and not raw.mistakes:
        plan, raised_from = _with_fp32_masters(config, plan)
    optimizer = _check_optimizer(raw)
    schedule = _schedule(raw)
    batch = _batch(raw, mesh, plan) if has_plan else Batch(1, 1, 1)
    seq_len = _seq_len(raw, facts.positions, plan)
    if config.optimizer.in_backward:
        _check_in_backward(raw, plan, batch)
    raw.raise_if_any()

    source, tokenizer = _source(raw, facts.vocab_size, say, reads=checks_data)
    if checks_data:
        at_once = batch.micro * batch.data_parallel_size if config.train.eval_every else 1
        check_size(source, seq_len=seq_len, held_out=config.data.held_out, needed=batch.total, needed_held_out=at_once)
    filled: dict[str, dict[str, object]] = {
        "model": {"preset": config.model.preset or (None if config.model.hf else _DEFAULT_PRESET)},
        "data": {"seq_len": seq_len, "tokenizer": tokenizer},
        "parallel": {"mp_policy": plan.precision.as_dict()} if raised_from is not None else {},
        "optimizer": optimizer,
        # decay_steps stays open, as it follows train.steps
        "schedule": {} if schedule.name == "constant" else {"min_lr_ratio": schedule.min_lr_ratio},
        "log": {} if "every" in raw.given("log") or not _has_gpus() else {"every": GPU_LOG_EVERY},
        "train": {
            "micro_batch_size": batch.micro,
            "global_batch_size": batch.total,
            "gradient_accumulation_steps": batch.accumulation,
        },
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in filled.items()}
    return RunConfig(
        config.model_copy(update=sections),
        plan,
        mesh,
        batch,
        shape,
        facts.positions,
        facts.vocab_size,
        seq_len,
        source,
        schedule,
        raised_from,
        raw.asked(),
    )


def _plan(raw: RawConfig, world_size: int, local_size: int) -> tuple[ParallelPlan, Mesh]:
    """The plan and its mesh; where they are refused, stand-ins with which the other checks go on."""
    values = {name: getattr(raw.config.parallel, name) for name in type(raw.config.parallel).model_fields}
    stand_in = ParallelPlan(strategy="ddp"), Mesh.build(world_size, dp_shard=world_size)
    num_found = len(raw.mistakes)
    for name in sorted(raw.given("parallel") & set(values)):
        try:
            ParallelPlan(**{key: values[key] for key in (name, *_READ_WITH.get(name, ()))})
        except ShardwiseError as error:
            raw.fail("parallel", name, _inline(error))
    if len(raw.mistakes) > num_found:
        return stand_in
    try:
        plan = ParallelPlan(**values)
        mesh = plan.mesh(world_size, local_size)
        check_plan(plan)
    except ShardwiseError as error:
        usual = "dp_shard" if isinstance(error, MeshError) else "strategy"
        name = next((name for name in values if str(error).startswith(f"{name}=")), usual)
        raw.fail("parallel", name, _inline(error))
        return stand_in
    return plan, mesh


def _model(raw: RawConfig) -> tuple[GPTConfig | None, LanguageModel]:
    """The shape of a built-in model (``None`` for a folder), and the facts of either."""
    section, unknown = raw.config.model, LanguageModel(1 << 31, None)
    if section.hf is not None:
        if section.preset is not None:
            raw.fail("model", "hf", "preset and hf exclude each other; take one of them out")
        elif section.overrides:
            key = next(iter(section.overrides))
            raw.fail("model", key, "fields of a preset do not apply to a Hugging Face folder")
        else:
            try:
                return None, read_language_model(Path(section.hf).expanduser())
            except NotCausalError as error:
                raw.fail("model", "hf", str(error))
        return None, unknown
    try:
        shape = gpt_config(section.preset or _DEFAULT_PRESET, **section.overrides)
    except ConfigError as error:
        keys = section.overrides if section.preset in {None, *PRESETS} else ["preset"]
        for item in _items(error):
            key = item.partition("=")[0]
            raw.fail("model", key if key in keys else next(iter(keys)), item)
        return None, unknown
    return shape, LanguageModel(shape.vocab_size, shape.seq_len)


def _source(
    raw: RawConfig, vocab_size: int, say: Callable[[str], None] | None, *, reads: bool
) -> tuple[Source, str | None]:
    """The data's files, and the name of the tokenizer: as given, else the model folder's own, else bytes.

    Text of a folder's tokenizer becomes its token file, which is written only where ``reads`` is set. The name is
    ``None`` where the model's folder has no tokenizer and the data needs none.
    """
    config = raw.config
    name = config.data.tokenizer or config.model.hf or BYTES
    has_own = name == BYTES or has_tokenizer(Path(name).expanduser())
    source = find_source(config.data.source, max_bytes=config.data.max_bytes)
    key, wrong = "tokenizer", None
    if not has_own and (config.data.tokenizer is not None or source.kind == "text"):
        wrong = f"{name!r} is no folder with a tokenizer (tokenizer.json, vocab.json, ...); name one, or 'bytes'"
    elif source.kind == "text" and name != BYTES:
        tokenizer = find_tokenizer(name)
        if tokenizer.vocab_size <= vocab_size:
            source = (
                tokenized(source, name, tokenizer, say) if reads else replace(source, vocab_size=tokenizer.vocab_size)
            )
        else:
            wrong = (
                f"the tokenizer of {name} has {tokenizer.vocab_size:,} ids, the model's embedding {vocab_size:,} rows;"
                " use the tokenizer that the model was made for, or a model with as many rows"
            )
    if wrong is None and (source.vocab_size or 0) > vocab_size:
        advice = (
            "tokenize the text with its tokenizer" if config.model.hf else f"set model.vocab_size={source.vocab_size}"
        )
        key, wrong = (
            "source",
            f"its tokens have a vocabulary of {source.vocab_size:,}, the model's has {vocab_size:,}; {advice}",
        )
    if wrong is not None:
        raw.fail("data", key, wrong)
        raw.raise_if_any()
    return source, name if has_own else None


def _with_fp32_masters(config: Config, plan: ParallelPlan) -> tuple[ParallelPlan, str | None]:
    """The plan with fp32 masters where the model's folder stores 16 bit, and that dtype.

    Products run in the stored dtype, unless the configuration names a ``param_dtype``.
    """
    stored = None if config.model.hf is None else stored_dtype(Path(config.model.hf).expanduser())
    if stored not in {"bf16", "fp16"}:
        return plan, None
    policy = plan.precision if plan.mp_policy is not None else PrecisionPolicy(param_dtype=stored)
    if policy.master_dtype is not None:
        return plan, None
    parts = {name: replace(part, master_dtype=part.master_dtype or "fp32") for name, part in policy.parts}
    return replace(plan, mp_policy=replace(policy, master_dtype="fp32", overrides=parts)), stored


def _check_optimizer(raw: RawConfig) -> dict[str, object]:
    """The values that the optimizer's section leaves open."""
    section = raw.config.optimizer
    for key in {"sgd": ("betas", "eps")}.get(section.name, ("momentum",)):
        if getattr(section, key) is not None:
            raw.fail("optimizer", key, f"{section.name} has no {key}; take it out")
    if section.betas is not None and max(section.betas) >= 1.0:
        raw.fail("optimizer", "betas", f"expected two numbers below 1, got {list(section.betas)}")
    if section.name == "sgd":
        return {"momentum": 0.9 if section.momentum is None else section.momentum}
    return {"betas": section.betas or (0.9, 0.95), "eps": section.eps or 1e-8}


def _check_in_backward(raw: RawConfig, plan: ParallelPlan, batch: Batch) -> None:
    """Report what needs the gradients of the whole model, or of several microbatches, before the update."""
    policies = [plan.precision, *(part for _, part in plan.precision.parts)]
    reasons = {
        "clipping needs the norm of all gradients before the first update; set train.clip_grad_norm=null": (
            raw.config.train.clip_grad_norm is not None
        ),
        f"every backward is an update, but gradients of {batch.accumulation} microbatches are to be added up;"
        " set train.gradient_accumulation_steps=1": batch.accumulation > 1,
        "a pipeline adds up gradients of several microbatches first; set parallel.pp=1": plan.pp > 1,
        "fp16's scaled gradients are checked before the update; use bf16": any(
            "fp16" in {policy.param_dtype, policy.reduce_dtype} for policy in policies
        ),
        "offload_policy keeps gradients on the host, where they cost no device memory; use one of both": (
            plan.offload is not None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raw.fail("optimizer", "in_backward", reason)


def _schedule(raw: RawConfig) -> Schedule:
    section, steps = raw.config.schedule, raw.config.train.steps
    decays = section.name == "warmup-stable-decay"
    decay = section.decay_steps or max(1, steps // 5)
    if section.name == "constant" and section.min_lr_ratio is not None:
        raw.fail("schedule", "min_lr_ratio", "a constant schedule has no end rate; take it out")
    if not decays and section.decay_steps is not None:
        raw.fail("schedule", "decay_steps", f"a {section.name} schedule has no decay_steps; take it out")
    if section.warmup_steps > steps:
        message = f"{section.warmup_steps} warm-up steps do not fit in train.steps={steps}"
        raw.fail("schedule", "warmup_steps", message)
    if decays and section.warmup_steps + decay > steps:
        message = f"{section.warmup_steps} warm-up and {decay} decay steps do not fit in train.steps={steps}"
        raw.fail("schedule", "decay_steps", message)
    ratio = 0.1 if section.min_lr_ratio is None else section.min_lr_ratio
    return Schedule(section.name, steps, section.warmup_steps, ratio, decay if decays else 0)


def _batch(raw: RawConfig, mesh: Mesh, plan: ParallelPlan) -> Batch:
    """The batch sizes: two of micro batch, accumulation and global batch determine the third."""
    train, policy, ranks = raw.config.train, plan.pipeline_policy, mesh.data_parallel_size
    micro, total, steps = train.micro_batch_size, train.global_batch_size, train.gradient_accumulation_steps
    if total is None or micro is None:
        steps = steps or (1 if policy is None else policy.microbatches(plan.pp))
    if total is None:
        batch = Batch(micro or _DEFAULT_MICRO, steps or 1, ranks)
    else:
        name, factor = ("micro_batch_size", micro) if micro is not None else ("gradient_accumulation_steps", steps or 1)
        other = total // (factor * ranks)
        batch = Batch(other, factor, ranks) if micro is None else Batch(factor, other, ranks)
        if total % (factor * ranks):
            product = f"{name}={factor} * {ranks} ranks = {factor * ranks}"
            message = f"{total} samples are not a multiple of {product}; use {_nearest(total, factor * ranks)}"
            raw.fail("train", "global_batch_size", message)
        elif steps is not None and steps != batch.accumulation:
            message = (
                f"micro_batch_size={micro} * gradient_accumulation_steps={steps} * {ranks} ranks = "
                f"{factor * steps * ranks}, but global_batch_size={total}; leave one of the three out"
            )
            raw.fail("train", "gradient_accumulation_steps", message)
    if policy is not None and not raw.mistakes:
        _check_microbatches(raw, policy, plan.pp, batch.accumulation)
    return batch


def _check_microbatches(raw: RawConfig, policy: PipelinePolicy, pp: int, accumulation: int) -> None:
    count = policy.num_microbatches
    if count is not None and count != accumulation:
        message = (
            f"num_microbatches={count}, but a step has {accumulation} microbatches (gradient_accumulation_steps);"
            " leave num_microbatches out"
        )
        raw.fail("parallel", "pipeline", message)
        return
    try:
        replace(policy, num_microbatches=accumulation).check(pp)
    except PlanError as error:
        raw.fail("train", "gradient_accumulation_steps", str(error).splitlines()[0])


def _has_gpus() -> bool:
    return Path("/dev/nvidiactl").exists()


def _nearest(total: int, unit: int) -> str:
    low = total // unit * unit
    return f"{low} or {low + unit}" if low else f"{unit}"


def _seq_len(raw: RawConfig, positions: int | None, plan: ParallelPlan) -> int:
    """Tokens per sample. Attention and activations of models for 128k tokens would not fit by themselves."""
    given = raw.config.data.seq_len
    divisor = plan.tp if plan.sequence_parallel and plan.cp == 1 else 1  # cp pads
    if given is None:
        longest = min(positions or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)
        return max(longest // divisor, 1) * divisor
    if given % divisor:
        message = (
            f"{given} tokens are not a multiple of tp={divisor}, over which sequence_parallel divides them;"
            f" use {_nearest(given, divisor)}"
        )
        raw.fail("data", "seq_len", message)
    if positions is not None and given > positions:
        message = f"{given} tokens are more than the model's {positions} positions; lower it, or raise model.seq_len"
        raw.fail("data", "seq_len", message)
    return given


def _items(error: Exception) -> list[str]:
    """What a message of several lines lists; of a message without a list, what is wrong and what to do."""
    lines = [line.strip().rstrip(".:") for line in str(error).splitlines() if line.strip()]
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")] or ["; ".join(lines)]


def _inline(error: Exception) -> str:
    """A message of several lines as one."""
    return "; ".join(_items(error))
