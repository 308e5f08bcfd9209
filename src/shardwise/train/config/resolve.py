"""Completes and checks a configuration, so that the run can start. Everything decidable without torch is decided here.

The launcher calls :func:`resolve` before it starts a process, and every rank calls it again, so that under ``torchrun``
all ranks refuse a run with the same message before the first collective.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from shardwise.launch.process import num_gpus
from shardwise.spec.errors import ConfigError, MeshError, PlanError, ShardwiseError
from shardwise.spec.granularity import block, resolve_granularity
from shardwise.spec.memory.eight_bit import BLOCK, LEAST
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan, check_plan
from shardwise.spec.policies import PrecisionPolicy
from shardwise.spec.schedule.builders import PipelinePolicy
from shardwise.spec.shape.gpt import PRESETS, GPTConfig, gpt_config
from shardwise.train.config.data import check_packing, sources
from shardwise.train.config.hf import LanguageModel, NotTrainedError, read_language_model, stored_dtype
from shardwise.train.config.sections import (
    Config,
    ModelSection,
    OptimizerSection,
    RawConfig,
    ScheduleSection,
    inline,
    items,
)
from shardwise.train.data.samples import Data, check_size, open_data
from shardwise.train.data.source import BYTE_VOCAB, Source, is_indexed, user_source
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import BYTES
from shardwise.train.spec import FROM_PYTHON, TrainSpec, load_spec
from shardwise.train.task import ANSWER, CAUSAL, NEXT, Task

_DEFAULT_PRESET = "gpt-tiny"
_DEFAULT_MICRO = 8
#: Upper bound of the default ``data.seq_len``, which is otherwise the maximum of the model.
DEFAULT_SEQ_LEN = 2048
#: Default of ``log.every`` on a machine with GPUs, where the host must wait for the device to read a loss.
GPU_LOG_EVERY = 10
#: Fields of the plan that can only be checked together with others.
_READ_WITH = {"pipeline": ("pp",), "sequence_parallel": ("tp",)}
#: Optimizers that do not support flat parameters, and why.
_BY_NAME = {
    "muon": "orthogonalizes each matrix by itself",
    "adamw8bit": "chooses by each parameter's size how its state is kept",
}
#: Settings that only some optimizers have, by optimizer.
_SETTINGS = {
    "adamw": {"betas", "eps"},
    "adam": {"betas", "eps"},
    "adamw8bit": {"betas", "eps"},
    "sgd": {"momentum"},
    "muon": {*("betas", "eps", "momentum"), *("adamw_lr", "adjust_lr", "ns_steps", "fused_weights", "adamw_weights")},
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch sizes: samples per forward, forwards per step, ranks that read different samples, and the product."""

    micro: int
    accumulation: int
    data_parallel_size: int

    @property
    def total(self) -> int:
        """Number of samples per step over all ranks."""
        return self.micro * self.accumulation * self.data_parallel_size

    def __str__(self) -> str:
        """Return all sizes in one line, as printed at the start."""
        return (
            f"global batch {self.total} = micro batch {self.micro} x accumulation {self.accumulation} "
            f"x {self.data_parallel_size} rank{'s' if self.data_parallel_size != 1 else ''}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RunConfig:
    """A complete configuration. Equal only to itself (``eq=False``), so that its model is traced once."""

    config: Config  # with all defaults filled in: batch sizes, sequence length, settings of the optimizer and schedule
    plan: ParallelPlan
    mesh: Mesh
    batch: Batch
    model: GPTConfig | None  # the shape of a built-in model, ``None`` for a Hugging Face folder
    positions: int | None  # maximum sequence length of the model, if known
    vocab_size: int  # number of token ids of the model
    seq_len: int
    source: Source  # the data's files
    #: The stored dtype of a Hugging Face folder's weights if the optimizer updates fp32 copies of them;
    #: ``None``: masters have the stored dtype
    raised_from: str | None = None
    overridden: frozenset[str] = frozenset()  # the keys, as ``section.field``, that ``--set`` gave
    end_token: int | None = None  # end-of-document token, if documents do not attend to each other
    task: Task = CAUSAL  # the task that the model is trained for
    spec: TrainSpec = field(default_factory=TrainSpec)  # parts that a user's code replaces

    def ratio(self, step: int) -> float:
        """Return the learning rate of ``step`` (from 0) divided by the peak rate."""
        schedule, steps = self.spec.schedule, self.config.train.steps
        return self.config.schedule.ratio(step, steps) if schedule is None else float(schedule(step, steps))

    def to_yaml(self) -> str:
        """Return a YAML text that resolves to the same configuration, without the parts that the spec replaces."""
        return self.config.to_yaml(without=_replaced_by(self.spec))


def data_of(resolved: RunConfig) -> Data:
    """Open the samples of a run, by ``data.samples.open_data`` or from the spec."""
    config, source, spec = resolved.config, resolved.source, resolved.spec
    if spec.data is not None:
        from shardwise.train.data.user_data import open_user_data

        batch = resolved.batch
        most, least = config.train.eval_batches * batch.total, batch.micro * batch.data_parallel_size
        how = {"seed": config.train.seed, "workers": config.data.workers}
        return open_user_data(spec.data, spec.eval_data, spec.collate, most, least, **how)
    return open_data(
        source,
        seq_len=resolved.seq_len,
        held_out=config.data.held_out,
        vocab_size=resolved.vocab_size,
        seed=config.train.seed,
        packs=bool(config.data.packing),
        end=resolved.end_token,
        task=resolved.task,
    )


def resolve(
    raw: RawConfig,
    world_size: int,
    local_size: int | None = None,
    *,
    checks_data: bool = True,
    raises_masters: bool = True,
    trains: bool = True,
    say: Callable[[str], None] | None = None,
    spec: TrainSpec | None = None,
) -> RunConfig:
    """Check a configuration for a world of ``world_size`` ranks, and fill in its defaults.

    Args:
        raw: The configuration as read.
        world_size: Number of ranks.
        local_size: Number of ranks on each machine; by default all ranks are on one machine.
        checks_data: Check that there is enough data for a step. Text is tokenized for this.
        raises_masters: Use fp32 masters for weights stored in 16 bit, unless the configuration sets ``master_dtype``.
        trains: The model computes a training loss; otherwise it generates or scores.
        say: Called with a line of text before slow work.
        spec: The parts that a user's code replaces; by default loaded from ``spec:`` in the configuration.

    Raises:
        ConfigError: The configuration is wrong; the message lists every mistake with its line.
        DataError: The configuration is right but the data is not usable.
    """
    config, num_found, is_from_python = raw.config, len(raw.mistakes), spec is not None
    if spec is None:
        spec = TrainSpec() if config.spec is None else load_spec(config.spec)
    _check_spec(raw, spec)
    plan, mesh = _plan(raw, world_size, local_size or world_size)
    has_plan = len(raw.mistakes) == num_found
    shape, facts = _model(raw) if spec.model is None else (None, _UNKNOWN)
    raised_from = None
    if raises_masters and not raw.mistakes:
        plan, raised_from = _with_fp32_masters(config, plan)
    optimizer = _check_optimizer(raw, plan)
    _check_lora(raw)
    has_epochs = config.train.epochs is not None
    if not has_epochs:
        _check_schedule(raw)
    _check_evaluation(raw, spec)
    batch = _batch(raw, mesh, plan) if has_plan else Batch(1, 1, 1)
    seq_len = _seq_len(raw, facts.positions, plan) if spec.data is None else config.data.seq_len or 0
    if config.optimizer.in_backward:
        _check_in_backward(raw, plan, batch)
    raw.raise_if_any()

    packs = check_packing(raw, plan)
    _check_task(raw, facts.task, plan)
    _check_router_loss(raw, plan, adds_loss=facts.adds_router_loss and trains)
    if spec.data is None:
        source, tokenizer, end_token, task = sources(raw, facts, say, reads=checks_data)
    else:
        source, tokenizer, end_token, task = user_source(spec.data), config.data.tokenizer, None, facts.task
    # token files with a vocabulary other than that of bytes do not say which text their tokens stand for
    hides_text = tokenizer == BYTES and source.kind == "tokens" and source.vocab_size != BYTE_VOCAB
    if config.train.sample_prompts and (task.name != NEXT or tokenizer is None or hides_text):
        raw.refuse("train", "sample_prompts", "needs a causal language model and the data's tokenizer; take it out")
    filled: dict[str, dict[str, object]] = {
        "model": {"preset": config.model.preset or (None if config.model.hf or spec.model else _DEFAULT_PRESET)},
        "data": {
            "seq_len": seq_len or None,
            "source": None if config.data.mix else source.name,
            "tokenizer": tokenizer,
            "packing": packs if "examples" in source.kinds else config.data.packing,  # cp changes the default
        },
        "parallel": {"mp_policy": plan.precision.as_dict()} if raised_from is not None else {},
        "optimizer": optimizer
        | ({} if spec.optimizer is None or "flat" in raw.given_keys("optimizer") else {"flat": False}),
        # decay_steps is not filled in, because it depends on train.steps
        "schedule": {} if config.schedule.name == "constant" else {"min_lr_ratio": config.schedule.end_ratio},
        "log": {} if "every" in raw.given_keys("log") or not num_gpus() else {"every": GPU_LOG_EVERY},
        "train": {
            "micro_batch_size": batch.micro,
            "global_batch_size": batch.total,
            "gradient_accumulation_steps": batch.accumulation,
            **({"eval_every": None} if spec.data is not None and spec.eval_data is None else {}),
        },
    }
    sections: dict[str, Any] = {
        name: getattr(config, name).model_copy(update=values) for name, values in filled.items()
    }
    if is_from_python and not spec.is_empty:
        sections["spec"] = FROM_PYTHON
    resolved = RunConfig(
        config.model_copy(update=sections),
        plan,
        mesh,
        batch,
        shape,
        facts.positions,
        facts.vocab_size if spec.model is None else source.vocab_size or BYTE_VOCAB,
        seq_len,
        source,
        raised_from,
        raw.overridden_keys(),
        end_token,
        task,
        spec,
    )
    num_samples = source.num_samples
    if source.kind == "given":
        _check_count(source, spec, batch)
    elif checks_data and source.kind != "random":
        at_once = batch.micro * batch.data_parallel_size if config.train.eval_every else 1
        data = data_of(resolved)
        check_size(source, data, seq_len=seq_len, needed=batch.total, needed_held_out=at_once)
        num_samples = None if source.streams is not None else data.train.num_samples
    return _with_epochs(raw, resolved, num_samples) if has_epochs and checks_data else resolved


def _with_epochs(raw: RawConfig, resolved: RunConfig, num_samples: int | None) -> RunConfig:
    """Return the run with ``train.steps`` computed from ``train.epochs``."""
    train, total, name = resolved.config.train, resolved.batch.total, resolved.source.name
    if num_samples is None or "random" in resolved.source.kinds:
        message = f"the number of samples of {name} is not known beforehand; set train.steps instead"
        raw.refuse("train", "epochs", message)
    steps = math.ceil(Fraction(repr(train.epochs)) * num_samples / total)
    if "steps" in raw.given_keys("train") and train.steps != steps:
        message = (
            f"{train.epochs:g} epochs of {num_samples:,} samples are {steps} steps of {total}, but"
            f" train.steps={train.steps}; leave one of the two out"
        )
        raw.fail("train", "epochs", message)
    config = resolved.config.model_copy(update={"train": train.model_copy(update={"steps": steps})})
    _check_schedule(replace(raw, config=config))
    raw.raise_if_any()
    return replace(resolved, config=config)


def _check_evaluation(raw: RawConfig, spec: TrainSpec) -> None:
    """Report settings that need an evaluation, or a value of it, which the run does not have."""
    config = raw.config
    has_none = config.train.eval_every is None or (spec.data is not None and spec.eval_data is None)
    values = ["eval_loss", *(f"eval_{name}" for name in spec.metrics)]
    for section, key, metric in (
        ("checkpoint", "best", config.checkpoint.best),
        ("train", "patience", config.train.patience),
        ("train", "sample_prompts", config.train.sample_prompts),
    ):
        if metric and has_none:
            raw.fail(section, key, "nothing is evaluated (train.eval_every, and eval_data of a spec); take it out")
    if config.checkpoint.best is not None and config.checkpoint.best not in values:
        raw.fail("checkpoint", "best", f"an evaluation gives {', '.join(values)}; name one of these")
    has_whole_texts = config.parallel.cp == 1 and not config.parallel.sequence_parallel
    if config.train.sample_prompts and not (has_whole_texts and spec.data is None and spec.model is None):
        message = "texts are continued by language models on text, without cp and sequence_parallel; take it out"
        raw.fail("train", "sample_prompts", message)


#: Placeholder for the facts of a model that are unknown before it is built.
_UNKNOWN = LanguageModel(1 << 31, None)


def _replaced_by(spec: TrainSpec) -> dict[str, set[str]]:
    """Return the fields that the spec replaces, by section."""
    fields = {
        "model": set(ModelSection.model_fields),
        "data": {"source", "mix", "eval_source", "streaming", "column", "max_bytes"},
        "optimizer": set(OptimizerSection.model_fields) - {"lr", "weight_decay", "flat", "in_backward"},
        "schedule": set(ScheduleSection.model_fields),
    }
    return {section: names for section, names in fields.items() if getattr(spec, section) is not None}


def _check_spec(raw: RawConfig, spec: TrainSpec) -> None:
    """Report settings that the spec also provides, and settings that do not work with the spec."""
    config = raw.config
    of_model = {name for name in ("hf", "preset") if getattr(config.model, name)} | set(config.model.overrides)
    for section, keys in _replaced_by(spec).items():
        for key in sorted(of_model if section == "model" else keys & raw.given_keys(section)):
            raw.fail(section, key, f"the spec brings the {section}; take it out")
    has_loss, of_tokens = spec.loss is not None, spec.data is None
    if config.data.workers and (of_tokens or not is_indexed(spec.data)):
        why = (
            "tokens are read from files as they lie there"
            if of_tokens
            else "the spec's iterable or loader reads itself"
        )
        raw.fail("data", "workers", f"{why}; leave it out, or give the spec a data set with len and items")
    chunked = config.train.chunked_cross_entropy and (has_loss or spec.model is not None or not of_tokens)
    whole_loss = of_tokens and (has_loss or spec.model is not None or bool(spec.metrics))
    for section, key, holds, why in (
        ("lora", "rank", config.lora.is_used and spec.model is not None, "the spec brings the model; adapt it there"),
        ("optimizer", "in_backward", config.optimizer.in_backward and has_loss, "the spec's loss is divided later"),
        ("parallel", "cp", config.parallel.cp > 1 and whole_loss, "the logits of a sequence lie on several ranks"),
        ("train", "chunked_cross_entropy", chunked, "the spec brings the loss; call sw.chunk_cross_entropy in it"),
    ):
        if holds:
            raw.fail(section, key, f"{why}; take it out")


def _check_count(source: Source, spec: TrainSpec, batch: Batch) -> None:
    """Refuse a data set with fewer samples than a step or an evaluation needs at once."""
    num_eval_samples = len(spec.eval_data) if spec.eval_data is not None and is_indexed(spec.eval_data) else None
    least = batch.micro * batch.data_parallel_size
    for name, count, needed in (("data", source.num_samples, batch.total), ("eval_data", num_eval_samples, least)):
        if count is not None and count < needed:
            key = "micro_batch_size" if needed == least else "global_batch_size"
            raise DataError(
                f"TrainSpec({name}=...) has {count} samples, {needed} are needed at once ({batch}).\n"
                f"  Give it more, or lower train.{key}."
            )


def _check_task(raw: RawConfig, task: Task, plan: ParallelPlan) -> None:
    if raw.config.train.chunked_cross_entropy:
        divided = [key for key in ("tp", "pp", "cp") if getattr(plan, key) > 1]
        if divided or task.name != NEXT:
            reason = f"{divided[0]} divides the head" if divided else "it is for causal language models"
            raw.refuse("train", "chunked_cross_entropy", f"{reason}; leave it out")
    if task.name == NEXT:
        return
    for key in ("pp", "cp"):
        if getattr(plan, key) > 1:
            raw.fail("parallel", key, f"it divides causal language models, and model.hf is trained for {task.name}")
    if raw.config.lora.is_used and task.name != ANSWER:
        raw.fail("lora", "rank", f"adapters alone do not learn {task.name}; leave it out, or train in your own loop")
    raw.raise_if_any()


def _check_router_loss(raw: RawConfig, plan: ParallelPlan, *, adds_loss: bool) -> None:
    for key in ("pp", "cp"):
        if adds_loss and getattr(plan, key) > 1:
            why = (
                "the model adds a loss of its routers (output_router_logits), and no rank has the logits of all routers"
            )
            raw.refuse("parallel", key, f"{why}; set {key}: 1, or output_router_logits to false in config.json")


def _plan(raw: RawConfig, world_size: int, local_size: int) -> tuple[ParallelPlan, Mesh]:
    """Return the plan and its mesh; if they are refused, substitutes with which the other checks can continue."""
    values = {name: getattr(raw.config.parallel, name) for name in type(raw.config.parallel).model_fields}
    if raw.config.optimizer.name == "adamw8bit" and "granularity" not in raw.given_keys("parallel"):
        values["granularity"] = block(LEAST)  # its blocks must not be cut
    stand_in = ParallelPlan(strategy="ddp"), Mesh.build(world_size, dp_shard=world_size)
    num_found = len(raw.mistakes)
    for name in sorted(raw.given_keys("parallel") & set(values)):
        try:
            ParallelPlan(**{key: values[key] for key in (name, *_READ_WITH.get(name, ()))})
        except ShardwiseError as error:
            raw.fail("parallel", name, inline(error))
    if len(raw.mistakes) > num_found:
        return stand_in
    try:
        plan = ParallelPlan(**values)
        mesh = plan.mesh(world_size, local_size)
        check_plan(plan)
    except ShardwiseError as error:
        key_at_fault = "dp_shard" if isinstance(error, MeshError) else "strategy"
        name = next((name for name in values if str(error).startswith(f"{name}=")), key_at_fault)
        raw.fail("parallel", name, inline(error))
        return stand_in
    return plan, mesh


def _model(raw: RawConfig) -> tuple[GPTConfig | None, LanguageModel]:
    """Return the shape of a built-in model (``None`` for a folder), and the facts of either."""
    section, unknown = raw.config.model, _UNKNOWN
    if section.hf is not None:
        if section.preset is not None:
            raw.fail("model", "hf", "preset and hf exclude each other; take one of them out")
        elif section.overrides:
            key = next(iter(section.overrides))
            raw.fail("model", key, "fields of a preset do not apply to a Hugging Face folder")
        else:
            try:
                return None, read_language_model(Path(section.hf).expanduser())
            except NotTrainedError as error:
                raw.fail("model", "hf", str(error))
        return None, unknown
    try:
        shape = gpt_config(section.preset or _DEFAULT_PRESET, **section.overrides)
    except ConfigError as error:
        keys = section.overrides if section.preset in {None, *PRESETS} else ["preset"]
        for item in items(error):
            key = item.partition("=")[0]
            raw.fail("model", key if key in keys else next(iter(keys)), item)
        return None, unknown
    return shape, LanguageModel(shape.vocab_size, shape.seq_len)


def _with_fp32_masters(config: Config, plan: ParallelPlan) -> tuple[ParallelPlan, str | None]:
    """Return the plan with fp32 masters if the model's folder stores 16 bit, and that dtype.

    Computation uses the stored dtype, unless the configuration sets ``param_dtype``.
    """
    stored = None if config.model.hf is None else stored_dtype(Path(config.model.hf).expanduser())
    if stored not in {"bf16", "fp16"}:
        return plan, None
    if config.lora.is_used:  # frozen weights keep their 16 bits; adapters are fp32 anyway
        return plan if plan.mp_policy is not None else replace(
            plan, mp_policy=PrecisionPolicy(param_dtype=stored)
        ), None
    policy = plan.precision if plan.mp_policy is not None else PrecisionPolicy(param_dtype=stored)
    if policy.master_dtype is not None:
        return plan, None
    parts = {name: replace(part, master_dtype=part.master_dtype or "fp32") for name, part in policy.parts}
    return replace(plan, mp_policy=replace(policy, master_dtype="fp32", overrides=parts)), stored


def _check_eight_bit(raw: RawConfig, plan: ParallelPlan) -> None:
    if importlib.util.find_spec("torchao") is None:
        raw.fail(
            "optimizer", "name", "adamw8bit is torchao's, which is not installed; pip install 'shardwise[torchao]'"
        )
    if plan.placements.shards_optimizer and not resolve_granularity(plan.granularity).covers(block(BLOCK)):
        raw.fail(
            "optimizer",
            "name",
            f"adamw8bit keeps a scale for each {BLOCK} elements, which have to be on one rank; set"
            f" parallel.granularity=[block, {LEAST}], or take it out",
        )


def _check_optimizer(raw: RawConfig, plan: ParallelPlan) -> dict[str, object]:
    """Check the optimizer's section, and return defaults for the settings that it leaves open."""
    section = raw.config.optimizer
    for key in sorted(_SETTINGS["muon"] - _SETTINGS[section.name]):
        if getattr(section, key) is not None:
            raw.fail("optimizer", key, f"{section.name} has no {key}; take it out")
    if section.betas is not None and max(section.betas) >= 1.0:
        raw.fail("optimizer", "betas", f"expected two numbers below 1, got {list(section.betas)}")
    if section.name == "sgd":
        return {"momentum": 0.9 if section.momentum is None else section.momentum}
    filled: dict[str, object] = {"betas": section.betas or (0.9, 0.95), "eps": section.eps or 1e-8}
    if section.name not in _BY_NAME:
        return filled
    if section.flat and "flat" in raw.given_keys("optimizer"):
        raw.fail("optimizer", "flat", f"{section.name} {_BY_NAME[section.name]}; take it out")
    if section.name == "adamw8bit":
        _check_eight_bit(raw, plan)
        return filled | {"flat": False}
    return filled | {
        "momentum": 0.95 if section.momentum is None else section.momentum,
        "adjust_lr": section.adjust_lr or "match_rms_adamw",
        "ns_steps": section.ns_steps or 5,
        "flat": False,
    }


def _check_lora(raw: RawConfig) -> None:
    section = raw.config.lora
    if section.is_used and raw.config.model.hf is None:
        raw.fail("lora", "rank", "adapters go into a Hugging Face model; name its folder in model.hf")
    defaults = type(section)()
    for key in ("alpha", "dropout", "targets"):
        if section.rank is None and getattr(section, key) != getattr(defaults, key):
            raw.fail("lora", key, "it goes with lora.rank; an adapter of a folder brings its own")
    if section.rank is not None and section.adapter is not None:
        raw.fail("lora", "adapter", "it brings its own rank; take lora.rank out")


def _check_in_backward(raw: RawConfig, plan: ParallelPlan, batch: Batch) -> None:
    """Report settings for which the update needs gradients of the whole model or of several microbatches first."""
    policies = [plan.precision, *(part for _, part in plan.precision.parts)]
    reasons = {
        "clipping needs the norm of all gradients before the first update; set train.clip_grad_norm=null": (
            raw.config.train.clip_grad_norm is not None
        ),
        f"every backward is an update, but gradients of {batch.accumulation} microbatches are to be added up;"
        " set train.gradient_accumulation_steps=1, or parallel.offload_policy=cpu, which adds them up on the host": (
            batch.accumulation > 1 and not _is_all_on_host(plan)
        ),
        "a pipeline adds up gradients of several microbatches first; set parallel.pp=1": plan.pp > 1,
        "fp16's scaled gradients are checked before the update; use bf16": any(
            "fp16" in {policy.param_dtype, policy.reduce_dtype} for policy in policies
        ),
        "muon exchanges the matrices of all units after backward; use adamw": raw.config.optimizer.name == "muon",
    }
    for reason, holds in reasons.items():
        if holds:
            raw.fail("optimizer", "in_backward", reason)


def _is_all_on_host(plan: ParallelPlan) -> bool:
    """Return whether all trained parameters are updated on the host."""
    return plan.offload is not None and plan.offload.optimizer and plan.offload.ratio == 1


def _check_schedule(raw: RawConfig) -> None:
    section, steps = raw.config.schedule, raw.config.train.steps
    decay = section.num_decay_steps(steps)
    if section.name == "constant" and section.min_lr_ratio is not None:
        raw.fail("schedule", "min_lr_ratio", "a constant schedule has no end rate; take it out, or set it to null")
    if section.name != "warmup-stable-decay" and section.decay_steps is not None:
        raw.fail("schedule", "decay_steps", f"a {section.name} schedule has no decay_steps; take it out")
    if section.warmup_steps > steps:
        message = f"{section.warmup_steps} warm-up steps do not fit in train.steps={steps}"
        raw.fail("schedule", "warmup_steps", message)
    if decay and section.warmup_steps + decay > steps:
        message = f"{section.warmup_steps} warm-up and {decay} decay steps do not fit in train.steps={steps}"
        raw.fail("schedule", "decay_steps", message)


def _batch(raw: RawConfig, mesh: Mesh, plan: ParallelPlan) -> Batch:
    """Compute the batch sizes: two of micro batch, accumulation and global batch determine the third."""
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


def batch_in(raw: RawConfig, world_size: int, local_size: int | None) -> tuple[Batch | None, list[str]]:
    """Return the batch sizes in a world, or ``None`` if the plan or the batch do not fit it; and the reasons."""
    tried = replace(raw, mistakes={})
    plan, mesh = _plan(tried, world_size, local_size or world_size)
    batch = None if tried.mistakes else _batch(tried, mesh, plan)
    problems = [f"{where}: {message}" for where, message in tried.mistakes]
    return (None if problems else batch), problems


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


def _nearest(total: int, unit: int) -> str:
    low = total // unit * unit
    return f"{low} or {low + unit}" if low else f"{unit}"


def _seq_len(raw: RawConfig, positions: int | None, plan: ParallelPlan) -> int:
    """Return the tokens per sample. The default is bounded: samples of 128k tokens would rarely fit into memory."""
    seq_len = raw.config.data.seq_len
    divisor = plan.tp if plan.sequence_parallel and plan.cp == 1 else 1  # cp pads
    if seq_len is None:
        longest = min(positions or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)
        return max(longest // divisor, 1) * divisor
    if seq_len % divisor:
        message = (
            f"{seq_len} tokens are not a multiple of tp={divisor}, over which sequence_parallel divides them;"
            f" use {_nearest(seq_len, divisor)}"
        )
        raw.fail("data", "seq_len", message)
    if positions is not None and seq_len > positions:
        other = "" if raw.config.model.hf else ", or raise model.seq_len"
        message = f"{seq_len} tokens are more than the model's {positions} positions; lower it{other}"
        raw.fail("data", "seq_len", message)
    return seq_len
