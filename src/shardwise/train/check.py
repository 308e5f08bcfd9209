"""From a configuration that was read to a run that can start: everything decidable without torch is decided here.

The launcher calls :func:`resolve` before it starts a process, and every rank calls it again, so that a run under
``torchrun`` is refused in the same words, by all ranks alike, before the first collective.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.models.shape import PRESETS, GPTConfig, gpt_config
from shardwise.spec.errors import ConfigError, MeshError, PlanError, ShardwiseError
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan, check_plan
from shardwise.spec.policies import PrecisionPolicy
from shardwise.spec.precision import dtype_name
from shardwise.spec.text import did_you_mean
from shardwise.train.config import Config, LogSection, OptimizerSection, RawConfig, ScheduleSection, TrainSection
from shardwise.train.data import Source, check_size, find_source
from shardwise.train.schedule import Schedule
from shardwise.train.tokenizer import BYTES, find_tokenizer, has_tokenizer, tokenized

_DEFAULT_PRESET = "gpt-tiny"
_DEFAULT_MICRO = 8
#: ``data.seq_len`` where the configuration does not say: as long as the model allows, up to this.
DEFAULT_SEQ_LEN = 2048
#: ``log.every`` on a machine with GPUs, where the configuration does not say.
GPU_LOG_EVERY = 10


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
        mesh: Of this world.
        batch: Batch sizes.
        model: The shape of a built-in model, ``None`` for a Hugging Face folder.
        positions: The longest sequence that the model takes, where that is known.
        vocab_size: Of the model.
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
    source: Source
    schedule: Schedule
    raised_from: str | None = None
    asked: frozenset[str] = frozenset()


def resolve(
    draft: RawConfig,
    world_size: int,
    local_size: int | None = None,
    *,
    checks_data: bool = True,
    raises_masters: bool = True,
    say: Callable[[str], None] | None = None,
) -> RunConfig:
    """Check ``draft`` for a world of ``world_size`` ranks and fill in what it leaves open.

    Args:
        draft: The configuration.
        world_size: Ranks.
        local_size: Ranks on each machine; by default all are on this one.
        checks_data: There must be enough data for a step of so many ranks; text is tokenized to know.
        raises_masters: Weights that a folder stores in 16 bit get fp32 masters, unless the configuration names a
            ``master_dtype``.
        say: Told what is done where it takes time.

    Raises:
        ConfigError: Something in the configuration is wrong; every mistake is listed with its line.
        DataError: The configuration is right but the data is not.
    """
    problems, sections = draft.problems, draft.sections
    plan, mesh = _plan(draft, world_size, local_size or world_size)
    model, vocab_size, positions = _model(draft)
    raised_from = None
    if raises_masters and plan is not None and not problems.found:
        plan, raised_from = _with_fp32_masters(draft, plan)
    optimizer = _optimizer(draft, sections.get("optimizer"))
    schedule = _schedule(draft, sections.get("schedule"), sections.get("train"))
    batch = _batch(draft, sections.get("train"), mesh, plan)
    seq_len = _seq_len(draft, positions, plan)
    if optimizer is not None and optimizer.in_backward:
        _in_backward(draft, sections.get("train"), plan, batch)
    problems.raise_if_any()
    if plan is None or mesh is None or batch is None or schedule is None or optimizer is None:
        raise AssertionError("a check failed without a message")

    config = draft.config()
    tokens_by = _tokenizer(draft, config)
    source = find_source(config.data.source, max_bytes=config.data.max_bytes)
    if source.kind == "text" and tokens_by is None:
        problems.add(
            draft.where("data", "tokenizer"),
            f"{config.model.hf} holds no tokenizer, and data.source is text; name a folder that holds the model's"
            " tokenizer, or 'bytes' for one token per byte",
        )
        problems.raise_if_any()
    if source.kind == "text" and tokens_by not in {None, BYTES}:
        source = _tokenized(draft, source, str(tokens_by), vocab_size, say, reads=checks_data)
    vocab = source.vocab_size or vocab_size
    if vocab > vocab_size:
        problems.add(
            draft.where("data", "source"),
            f"its tokens have a vocabulary of {vocab:,}, the model's has {vocab_size:,}; "
            + (f"set model.vocab_size={vocab}" if config.model.hf is None else "tokenize the text with its tokenizer"),
        )
        problems.raise_if_any()
    at_once = batch.micro * batch.data_parallel_size
    if checks_data:
        check_size(
            source,
            seq_len=seq_len,
            held_out=config.data.held_out,
            needed=batch.total,
            needed_held_out=at_once if config.train.eval_every else 1,
        )
    config = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"preset": config.model.preset or (None if config.model.hf else _DEFAULT_PRESET)}
            ),
            "data": config.data.model_copy(update={"seq_len": seq_len, "tokenizer": tokens_by}),
            "parallel": config.parallel.model_copy(
                update={"mp_policy": plan.precision.as_dict()} if raised_from is not None else {}
            ),
            "optimizer": optimizer,
            "schedule": _filled(config.schedule, schedule),
            "log": _log(draft, config.log),
            "train": config.train.model_copy(
                update={
                    "micro_batch_size": batch.micro,
                    "global_batch_size": batch.total,
                    "gradient_accumulation_steps": batch.accumulation,
                }
            ),
        }
    )
    return RunConfig(
        config, plan, mesh, batch, model, positions, vocab_size, source, schedule, raised_from, draft.asked()
    )


#: Fields of the plan that mean something only beside others.
_READ_WITH = {"pipeline": ("pp",), "sequence_parallel": ("tp",)}


def _plan(draft: RawConfig, world_size: int, local_size: int) -> tuple[ParallelPlan | None, Mesh | None]:
    section = draft.sections.get("parallel")
    if section is None:
        return None, None
    values = {name: getattr(section, name) for name in type(section).model_fields}
    is_good = True
    for name in draft.given("parallel") & set(values):
        try:
            ParallelPlan(**{key: values[key] for key in (name, *_READ_WITH.get(name, ()))})
        except ShardwiseError as error:
            draft.problems.add(draft.where("parallel", name), _inline(error))
            is_good = False
    if not is_good:
        return None, None
    try:
        plan = ParallelPlan(**values)
        mesh = plan.mesh(world_size, local_size)
        check_plan(plan)
        return plan, mesh  # noqa: TRY300  both may be refused
    except ShardwiseError as error:
        usual = "dp_shard" if isinstance(error, MeshError) else "strategy"
        name = next((name for name in values if str(error).startswith(f"{name}=")), usual)
        draft.problems.add(draft.where("parallel", name), _inline(error))
        return None, None


def _model(draft: RawConfig) -> tuple[GPTConfig | None, int, int | None]:
    """The built-in shape or None, the vocabulary, and the longest sequence where one is known."""
    section = draft.sections.get("model")
    if section is None:
        return None, 1 << 31, None
    if section.hf is not None:
        return _hf_model(draft, section)
    preset = section.preset or _DEFAULT_PRESET
    if preset not in PRESETS:
        names = ", ".join(PRESETS)
        draft.problems.add(
            draft.where("model", "preset"),
            f"unknown preset {preset!r}.{did_you_mean(preset, PRESETS) or f' Use one of {names}.'}",
        )
        return None, 1 << 31, None
    try:
        shape = gpt_config(preset, **section.overrides)
    except ConfigError as error:
        if len(section.overrides) > 1 and _each_override(draft, preset, section.overrides):
            return None, 1 << 31, None
        key = next(iter(section.overrides)) if len(section.overrides) == 1 else "preset"
        draft.problems.add(draft.where("model", key), _inline(error))
        return None, 1 << 31, None
    return shape, shape.vocab_size, shape.seq_len


def _tokenizer(draft: RawConfig, config: Config) -> str | None:
    """The tokenizer's name: as given, else the model folder's own, else bytes; ``None``: the folder has none."""
    if config.data.tokenizer is not None:
        if config.data.tokenizer != BYTES and not has_tokenizer(Path(config.data.tokenizer).expanduser()):
            draft.problems.add(
                draft.where("data", "tokenizer"),
                f"{config.data.tokenizer!r} is no folder with a tokenizer (tokenizer.json, vocab.json, ...);"
                " name one, or 'bytes'",
            )
            draft.problems.raise_if_any()
        return config.data.tokenizer
    if config.model.hf is None:
        return BYTES
    return config.model.hf if has_tokenizer(Path(config.model.hf).expanduser()) else None


def _tokenized(
    draft: RawConfig, source: Source, name: str, vocab_size: int, say: Callable[[str], None] | None, *, reads: bool
) -> Source:
    """The source's tokens by the tokenizer of folder ``name``, whose vocabulary must fit the model's."""
    tokenizer = find_tokenizer(name)
    if tokenizer.vocab_size > vocab_size:
        draft.problems.add(
            draft.where("data", "tokenizer"),
            f"the tokenizer of {name} has {tokenizer.vocab_size:,} ids, the model's embedding {vocab_size:,} rows; "
            "use the tokenizer that the model was made for, or a model with as many rows",
        )
        draft.problems.raise_if_any()
    return tokenized(source, name, tokenizer, say) if reads else replace(source, vocab_size=tokenizer.vocab_size)


def _each_override(draft: RawConfig, preset: str, overrides: dict[str, Any]) -> bool:
    found = False
    for key, value in overrides.items():
        if key in {"hidden", "num_heads", "num_experts", "experts_per_token"} and type(value) is int and value > 0:
            continue  # legal or not together with the others only
        try:
            gpt_config(preset, **{key: value})
        except ConfigError as error:
            draft.problems.add(draft.where("model", key), _inline(error))
            found = True
    return found


def _hf_model(draft: RawConfig, section: Any) -> tuple[None, int, int | None]:  # noqa: PLR0911  a list of refusals
    def fail(key: str, message: str) -> tuple[None, int, None]:
        draft.problems.add(draft.where("model", key), message)
        return None, 1 << 31, None

    if section.preset is not None:
        return fail("hf", "preset and hf exclude each other; take one of them out")
    if section.overrides:
        return fail(next(iter(section.overrides)), "fields of a preset do not apply to a Hugging Face folder")
    path = Path(section.hf).expanduser() / "config.json"
    try:
        held = json.loads(path.read_text("utf-8"))
    except OSError:
        return fail("hf", f"no readable {path}; name a folder with a Hugging Face model (nothing is downloaded)")
    except (ValueError, RecursionError):
        return fail("hf", f"{path} is not JSON")
    if not isinstance(held, dict):
        return fail("hf", f"{path} is not a configuration: expected a mapping")
    reason = _not_causal(held)
    if reason is not None:
        return fail("hf", f"{path}: {reason}")
    vocab = held.get("vocab_size")
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        return fail("hf", f"{path} names no vocab_size: not a language model; {_OWN_LOOP}")
    if "auto_map" in held:
        return fail("hf", f"{path} has an auto_map: the model needs code of its own, which is never run")
    positions = held.get("max_position_embeddings", held.get("n_positions"))
    return None, vocab, positions if isinstance(positions, int) and positions > 0 else None


_OWN_LOOP = "`shardwise train` trains causal language models; train it in a loop of your own with sw.parallelize"
#: Model types whose language-modelling head sees the tokens that it is to predict unless ``is_decoder`` is set.
_ENCODERS = {
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


def _not_causal(held: dict[str, Any]) -> str | None:
    """Why a folder's configuration is not that of a causal language model; ``None`` where nothing says so."""
    kinds = held.get("architectures")
    name = str(kinds[0]) if isinstance(kinds, list) and kinds else str(held.get("model_type", "the model"))
    if held.get("is_encoder_decoder") is True:
        return f"{name} has an encoder and a decoder; {_OWN_LOOP} (examples/finetune_t5.py)"
    if held.get("model_type") in _ENCODERS and held.get("is_decoder") is not True:
        return (
            f"{name} is an encoder: every position sees the token that it would have to predict; {_OWN_LOOP}, or set"
            " is_decoder: true there to make it causal"
        )
    if re.search("For(?!CausalLM)[A-Z]", name):
        vision = " (examples/finetune_vit.py)" if "Image" in name else ""
        return f"{name} is made for another task; {_OWN_LOOP}{vision}, or export its language model by itself"
    return None


def _with_fp32_masters(draft: RawConfig, plan: ParallelPlan) -> tuple[ParallelPlan, str | None]:
    """The plan with fp32 masters where the model's folder stores 16 bit, and that dtype.

    Products run in the stored dtype, unless the configuration names a ``param_dtype``.
    """
    section = draft.sections.get("model")
    stored = None if section is None or section.hf is None else stored_dtype(Path(section.hf).expanduser())
    if stored not in {"bf16", "fp16"}:
        return plan, None
    policy = plan.precision if plan.mp_policy is not None else PrecisionPolicy(param_dtype=stored)
    if policy.master_dtype is not None:
        return plan, None
    parts = {name: replace(part, master_dtype=part.master_dtype or "fp32") for name, part in policy.parts}
    return replace(plan, mp_policy=replace(policy, master_dtype="fp32", overrides=parts)), stored


def stored_dtype(folder: Path) -> str | None:
    """The dtype in which a Hugging Face folder stores its weights: its configuration's, else that of its first file.

    Returns:
        The short name; ``None`` where neither says.
    """
    try:
        held = json.loads((folder / "config.json").read_text("utf-8"))
        named = held.get("dtype") or held.get("torch_dtype")
        if isinstance(named, str):
            return dtype_name(named)
        name = "model.safetensors"
        if not (folder / name).is_file():
            name = min(json.loads((folder / f"{name}.index.json").read_text("utf-8"))["weight_map"].values())
        with (folder / Path(name).name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        stored = [_FLOATING[entry["dtype"]] for entry in header.values() if entry.get("dtype") in _FLOATING]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ShardwiseError):
        return None  # what is wrong with the folder is said where it is read
    return stored[0] if stored else None


#: The floating-point dtypes of safetensors files.
_FLOATING = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def _optimizer(draft: RawConfig, section: OptimizerSection | None) -> OptimizerSection | None:
    if section is None:
        return None
    foreign = {"sgd": ("betas", "eps")}.get(section.name, ("momentum",))
    for key in foreign:
        if getattr(section, key) is not None:
            draft.problems.add(draft.where("optimizer", key), f"{section.name} has no {key}; take it out")
    if section.betas is not None and max(section.betas) >= 1.0:
        draft.problems.add(
            draft.where("optimizer", "betas"), f"expected two numbers below 1, got {list(section.betas)}"
        )
    if section.name == "sgd":
        return section.model_copy(update={"momentum": 0.9 if section.momentum is None else section.momentum})
    return section.model_copy(update={"betas": section.betas or (0.9, 0.95), "eps": section.eps or 1e-8})


def _in_backward(draft: RawConfig, train: TrainSection | None, plan: ParallelPlan | None, batch: Batch | None) -> None:
    """Report what needs the gradients of the whole model, or of several microbatches, before the update."""
    reasons = []
    if train is not None and train.clip_grad_norm is not None:
        reasons.append(
            "clipping needs the norm of all gradients before the first update; set train.clip_grad_norm=null"
        )
    if batch is not None and batch.accumulation > 1:
        reasons.append(
            f"every backward is an update, but gradients of {batch.accumulation} microbatches are to be added up; "
            "set train.gradient_accumulation_steps=1"
        )
    if plan is not None:
        if plan.pp > 1:
            reasons.append("a pipeline adds up gradients of several microbatches first; set parallel.pp=1")
        policies = [plan.precision, *(part for _, part in plan.precision.parts)]
        if any("fp16" in {policy.param_dtype, policy.reduce_dtype} for policy in policies):
            reasons.append("fp16's scaled gradients are looked at before the update; use bf16")
        if plan.offload is not None:
            reasons.append(
                "offload_policy keeps gradients on the host, where they cost no device memory; use one of both"
            )
    for reason in reasons:
        draft.problems.add(draft.where("optimizer", "in_backward"), reason)


def _schedule(draft: RawConfig, section: ScheduleSection | None, train: TrainSection | None) -> Schedule | None:
    if section is None or train is None:
        return None
    steps = train.steps
    if section.name == "constant" and section.min_lr_ratio is not None:
        draft.problems.add(draft.where("schedule", "min_lr_ratio"), "a constant schedule has no end rate; take it out")
    if section.name != "warmup-stable-decay" and section.decay_steps is not None:
        draft.problems.add(
            draft.where("schedule", "decay_steps"), f"a {section.name} schedule has no decay_steps; take it out"
        )
    if section.warmup_steps > steps:
        draft.problems.add(
            draft.where("schedule", "warmup_steps"),
            f"{section.warmup_steps} warm-up steps do not fit in train.steps={steps}",
        )
    decay = section.decay_steps or max(1, steps // 5)
    if section.name == "warmup-stable-decay" and section.warmup_steps + decay > steps:
        draft.problems.add(
            draft.where("schedule", "decay_steps"),
            f"{section.warmup_steps} warm-up and {decay} decay steps do not fit in train.steps={steps}",
        )
    ratio = 0.1 if section.min_lr_ratio is None else section.min_lr_ratio
    return Schedule(
        section.name, steps, section.warmup_steps, ratio, decay if section.name == "warmup-stable-decay" else 0
    )


def _filled(section: ScheduleSection, schedule: Schedule) -> ScheduleSection:
    """The section with its defaults written out; ``decay_steps`` stays open, as it follows ``train.steps``."""
    if section.name == "constant":
        return section
    return section.model_copy(update={"min_lr_ratio": schedule.min_lr_ratio})


def _batch(draft: RawConfig, train: TrainSection | None, mesh: Mesh | None, plan: ParallelPlan | None) -> Batch | None:
    batch = _sizes(draft, train, mesh, plan)
    policy = plan.pipeline_policy if plan is not None else None
    if batch is None or policy is None or plan is None:
        return batch
    count = policy.num_microbatches
    if count is not None and count != batch.accumulation:
        draft.problems.add(
            draft.where("parallel", "pipeline"),
            f"num_microbatches={count}, but a step has {batch.accumulation} microbatches (gradient_accumulation_steps);"
            " leave num_microbatches out",
        )
        return None
    try:
        replace(policy, num_microbatches=batch.accumulation).check(plan.pp)
    except PlanError as error:
        draft.problems.add(draft.where("train", "gradient_accumulation_steps"), str(error).splitlines()[0])
    return batch


def _sizes(  # noqa: PLR0911  a table of cases
    draft: RawConfig, train: TrainSection | None, mesh: Mesh | None, plan: ParallelPlan | None
) -> Batch | None:
    if train is None or mesh is None:
        return None
    policy = plan.pipeline_policy if plan is not None else None
    usual = 1 if policy is None or plan is None else policy.microbatches(plan.pp)
    ranks = mesh.data_parallel_size
    micro, total, accumulation = train.micro_batch_size, train.global_batch_size, train.gradient_accumulation_steps

    def fail(key: str, message: str) -> None:
        draft.problems.add(draft.where("train", key), message)

    if total is None:
        return Batch(micro or _DEFAULT_MICRO, accumulation or usual, ranks)
    if micro is not None:
        if total % (micro * ranks):
            return fail(
                "global_batch_size",
                f"{total} samples are not a multiple of micro_batch_size={micro} * {ranks} ranks = {micro * ranks}; "
                f"use {_nearest(total, micro * ranks)}",
            )
        derived = total // (micro * ranks)
        if accumulation is not None and accumulation != derived:
            return fail(
                "gradient_accumulation_steps",
                f"micro_batch_size={micro} * gradient_accumulation_steps={accumulation} * {ranks} ranks = "
                f"{micro * accumulation * ranks}, but global_batch_size={total}; leave one of the three out",
            )
        return Batch(micro, derived, ranks)
    steps = accumulation or usual
    if total % (steps * ranks):
        return fail(
            "global_batch_size",
            f"{total} samples are not a multiple of gradient_accumulation_steps={steps} * {ranks} ranks = "
            f"{steps * ranks}; use {_nearest(total, steps * ranks)}",
        )
    return Batch(total // (steps * ranks), steps, ranks)


def _log(draft: RawConfig, section: LogSection) -> LogSection:
    """Reading a loss makes the host wait for a GPU; on CPU it costs nothing."""
    if "every" in draft.given("log") or not _has_gpus():
        return section
    return section.model_copy(update={"every": GPU_LOG_EVERY})


def _has_gpus() -> bool:
    return Path("/dev/nvidiactl").exists()


def _nearest(total: int, unit: int) -> str:
    low = total // unit * unit
    return f"{low} or {low + unit}" if low else f"{unit}"


def _seq_len(draft: RawConfig, positions: int | None, plan: ParallelPlan | None) -> int:
    """Tokens per sample. Attention and activations of models for 128k tokens would not fit by themselves."""
    section = draft.sections.get("data")
    if section is None:
        return 1
    divisor = plan.tp if plan is not None and plan.sequence_parallel and plan.cp == 1 else 1  # cp pads
    if section.seq_len is None:
        longest = min(positions or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)
        return max(longest // divisor, 1) * divisor
    if section.seq_len % divisor:
        draft.problems.add(
            draft.where("data", "seq_len"),
            f"{section.seq_len} tokens are not a multiple of tp={divisor}, over which sequence_parallel divides them;"
            f" use {_nearest(section.seq_len, divisor)}",
        )
    if positions is not None and section.seq_len > positions:
        draft.problems.add(
            draft.where("data", "seq_len"),
            f"{section.seq_len} tokens are more than the model's {positions} positions; "
            "lower it, or raise model.seq_len",
        )
    return int(section.seq_len)


def _inline(error: Exception) -> str:
    """A message of several lines as one: what is wrong; what to do. Of a list, only its items."""
    lines = [line.strip().rstrip(".:") for line in str(error).splitlines() if line.strip()]
    items = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return "; ".join(items or lines)
