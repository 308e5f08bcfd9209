"""The configuration of a run: sections, fields, and a reader that reports every mistake at once.

Reading has three steps, none of which starts a process or imports torch: files become plain values with line numbers
(``train.config.document``), onto which ``extends:`` and ``--set`` are merged; pydantic checks the values against the
sections below; ``train.config.resolve`` checks across sections, and against the world, the model and the data.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import operator
import os
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import pydantic
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict

from shardwise.checkpoint.storage import place_of, redacted, without_secrets
from shardwise.spec.errors import ConfigError
from shardwise.spec.hf_cache import hub_name, local_folder
from shardwise.spec.placement import Placements
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.run_files import CONFIG
from shardwise.spec.shape.gpt import GPTConfig
from shardwise.spec.text import did_you_mean
from shardwise.train.config.document import Document, Problem, check_is_ours, parse_yaml, read_document

Positive = Annotated[int, Field(ge=1, le=10**12)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base class of all sections: frozen, with strict types, without unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    _holds_no_secret = pydantic.field_validator("*")(without_secrets)


def _local(name: str) -> str:
    """Return the cached folder of a name on the hub; return any other text unchanged."""
    found = local_folder(name)
    return str(found) if hub_name(found) is not None else name


#: A Hugging Face folder, or the hub name of a cached one. A run records the folder, which is of one revision: a resume,
#: and every rank, reads the same files or is refused.
Folder = Annotated[str, AfterValidator(_local)]


def _place(name: str) -> str:
    """Return a URL, or the absolute path of a folder, because a run compares it with the paths of its checkpoints."""
    return str(place_of(os.path.expanduser(name)).absolute())  # noqa: PTH111  keeps ~user of an unknown user


class ModelSection(Section):
    """The model that is trained: a built-in GPT (``preset`` and overrides of its fields), or a Hugging Face folder."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    preset: str | None = Field(None, description="built-in model, for example gpt-tiny; gpt-tiny where hf is not given")
    hf: Folder | None = Field(
        None,
        description="folder of a Hugging Face model, or its name on the hub if it is in the cache; read offline, never"
        " with code of its own",
    )

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields of the preset that the configuration replaces."""
        return dict(self.__pydantic_extra__ or {})


class OneSource(Section):
    """The reading of one source of tokens."""

    column: str | None = Field(
        None,
        description="column of a data set that holds the texts or conversations; by default the first that exists of"
        " messages, conversations, prompt (with completion) and text",
    )
    learns: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="the tokens of a conversation that count in the loss: the assistant's, its last answer's, or all",
    )
    chat_template: str | None = Field(None, description="file with a chat template; by default the tokenizer's own")
    max_bytes: Positive | None = Field(
        None, description="use only this many bytes of the text, from its beginning; stdlib: 4,000,000"
    )


class MixedSection(OneSource):
    """One source of a mixture."""

    source: str = Field(description="as data.source")
    weight: PositiveFloat = Field(1.0, description="share of the samples, in proportion to the other sources' weights")
    name: str | None = Field(
        None, description="NAME in the metric share_NAME; by default the name of the file or folder"
    )


class DataSection(OneSource):
    """The sources of tokens, and their division into samples."""

    source: str | None = Field(
        None,
        description="path, folder or glob, also of a store such as s3://bucket/texts: text; token files (ours, .npy,"
        " Megatron's .bin with .idx); rows of a data set (.jsonl, .parquet, .csv, what datasets' save_to_disk wrote)."
        " 'stdlib' (where there is no mix) or 'random'",
    )
    mix: Annotated[list[MixedSection], Field(min_length=1)] | None = Field(
        None,
        description="several sources in place of source, each {source: ..., weight: ...}; also with column, learns,"
        " chat_template, max_bytes and name of its own",
    )
    eval_source: str | None = Field(
        None,
        description="data to evaluate on, of the kinds of source; then source or mix is trained on in full",
    )
    seq_len: Annotated[int, Field(ge=1, le=10**7)] | None = Field(
        None, description="tokens per sample; by default the longest that the model accepts, but at most 2,048"
    )
    tokenizer: Folder | None = Field(
        None,
        description="how text becomes tokens: 'bytes' (one token per byte), or a Hugging Face folder with a tokenizer;"
        " by default the model's own where model.hf is given, else bytes",
    )
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.05, description="share of each source's tokens, at its end, that is evaluated on and not trained on"
    )
    packing: bool | None = Field(
        None,
        description="pack several conversations into a sample, each with its own positions and attention; by default if"
        " model.hf is given and cp is 1. Otherwise each conversation is a sample, cut or padded to seq_len",
    )
    separate_documents: bool = Field(
        default=False,
        description="start positions anew after each end-of-text token of texts, and do not let attention cross it",
    )
    streaming: bool = Field(
        default=False,
        description="tokenize texts during training, some files at a time, instead of all of them before it begins; the"
        " last files are held out",
    )
    workers: Annotated[int, Field(ge=0, le=256)] = Field(
        0,
        description="processes of each rank that read the samples of a spec ahead of training; 0: the rank reads them",
    )

    @property
    def sources(self) -> Sequence[MixedSection | DataSection]:
        """The sources of the mixture, or the only source."""
        return self.mix or (self,)


#: Types in configuration files, by the types of the plan's fields; every field has at least one of them.
_WRITTEN = {str: str, int: int, float: float, bool: bool, type(None): None, Mapping: dict, Sequence: list}


def _parallel_section() -> type[Section]:
    """Build the section with the fields, defaults and descriptions of ``ParallelPlan``, in types that files hold."""
    hints = typing.get_type_hints(ParallelPlan, localns={"Placements": Placements})
    text = inspect.getdoc(ParallelPlan) or ""
    words = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |^\S)", text, re.MULTILINE | re.DOTALL)
    described = {name: " ".join(text.split()).replace("``", "") for name, text in words}
    fields: dict[str, Any] = {}
    for each in dataclasses.fields(ParallelPlan):
        hint = hints[each.name]
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds = [_WRITTEN[kind] for part in parts if (kind := typing.get_origin(part) or part) in _WRITTEN]
        written = functools.reduce(operator.or_, kinds) if kinds else list[str]
        default = [] if each.default == () else each.default
        fields[each.name] = written, Field(default, description=described.get(each.name))
    return pydantic.create_model("ParallelSection", __base__=Section, **fields)


if TYPE_CHECKING:
    ParallelSection = Any
else:
    ParallelSection = _parallel_section()


class OptimizerSection(Section):
    """The optimizer. Weight decay acts on parameters with two or more dimensions only."""

    name: Literal["adamw", "adam", "sgd", "muon", "adamw8bit"] = Field(
        "adamw",
        description="muon: sw.Muon for hidden matrices, AdamW for embeddings, head, norms and biases. adamw8bit:"
        " torchao's AdamW with states in 8 bit; needs parallel.granularity: [block, 4096] where states are sharded",
    )
    lr: PositiveFloat = Field(3e-4, description="peak learning rate; with muon that of the matrices")
    betas: Annotated[tuple[Ratio, Ratio], Strict(False)] | None = Field(  # noqa: FBT003
        None, description="by default [0.9, 0.95]; not for sgd"
    )
    eps: PositiveFloat | None = Field(None, description="by default 1e-8; not for sgd")
    weight_decay: NonNegativeFloat = Field(0.1, description="weight decay of parameters with two or more dimensions")
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="by default 0.9 for sgd, 0.95 for muon"
    )
    adamw_lr: PositiveFloat | None = Field(
        None, description="muon: peak learning rate of the parameters that AdamW trains; by default lr"
    )
    adjust_lr: Literal["match_rms_adamw", "original"] | None = Field(
        None,
        description="muon: how lr depends on a matrix's shape. match_rms_adamw (default): times 0.2 sqrt(max(rows,"
        " columns)), for rates as AdamW's; original: times sqrt(max(1, rows / columns)), for rates near 0.02",
    )
    ns_steps: Annotated[int, Field(ge=1, le=99)] | None = Field(
        None, description="muon: Newton-Schulz iterations, by default 5"
    )
    fused_weights: dict[str, int | list[int]] | None = Field(
        None,
        description="muon: weights that are several matrices in one, by patterns of their names: how many equal ones,"
        " or their numbers of outputs, such as {'*.gate_up_proj.weight': 2}",
    )
    adamw_weights: list[str] | None = Field(None, description="muon: name patterns of matrices that AdamW trains")
    flat: bool = Field(
        default=True,
        description="one tensor per unit instead of one per name: faster, the same numbers. Not for muon and adamw8bit",
    )
    in_backward: bool = Field(
        default=False,
        description="update each unit inside backward: gradients exist for one unit at a time, and with offload_policy "
        "the host updates while backward continues; the same numbers. Needs train.clip_grad_norm: null, no fp16, not "
        "muon, and one microbatch per step (any number with offload_policy: cpu)",
    )


class LoraSection(Section):
    """Low-rank adapters, trained instead of the model of ``model.hf``. None unless ``rank`` or ``adapter`` is given."""

    rank: Positive | None = Field(None, description="rank of the adapters, such as 16")
    alpha: PositiveFloat | None = Field(None, description="adapters are scaled by alpha / rank; by default 2 * rank")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="dropout of an adapter's input")
    targets: str | list[str] = Field(
        "all-linear",
        description="layers that get an adapter: ends of their names, such as [q_proj, v_proj], or all-linear (in a "
        "mixture of experts: of attention)",
    )
    adapter: str | None = Field(
        None, description="folder of an adapter that peft saved, to continue from; it sets rank, alpha and targets"
    )

    @property
    def is_used(self) -> bool:
        """Whether there are adapters."""
        return self.rank is not None or self.adapter is not None


class ScheduleSection(Section):
    """The learning rate over the steps."""

    name: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = Field(
        "cosine", description="course of the rate after the warmup"
    )
    warmup_steps: Count = Field(0, description="steps over which the rate rises linearly from 0")
    min_lr_ratio: Ratio | None = Field(
        None, description="rate at the end over the peak rate, by default 0.1; not for constant"
    )
    decay_steps: Positive | None = Field(
        None, description="warmup-stable-decay: steps of the decay, by default a fifth of all steps"
    )

    @property
    def end_ratio(self) -> float:
        """The final learning rate divided by the peak rate."""
        return 0.1 if self.min_lr_ratio is None else self.min_lr_ratio

    def num_decay_steps(self, steps: int) -> int:
        """Return the number of final steps in which warmup-stable-decay lowers the rate; 0 for other schedules."""
        return (self.decay_steps or max(1, steps // 5)) if self.name == "warmup-stable-decay" else 0

    def ratio(self, step: int, steps: int) -> float:
        """Return the learning rate of ``step`` (from 0) of ``steps``, divided by the peak rate."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        decay, last, least = self.num_decay_steps(steps), steps - 1, self.end_ratio
        start = max(self.warmup_steps, last - decay) if decay else self.warmup_steps
        t = min(1.0, max(0.0, (step - start) / max(1, last - start)))
        if self.name == "cosine":
            return least + (1 - least) * (1 + math.cos(math.pi * t)) / 2
        return 1 - (1 - least) * t


class TrainSection(Section):
    """The length of the run, the sizes of batches, and the evaluations."""

    steps: Positive = Field(1000, description="optimizer steps; derived where epochs is given")
    epochs: PositiveFloat | None = Field(
        None,
        description="length of the run in place of steps: passes over all samples; an epoch of a mixture has as many"
        " samples as all its sources together",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="seed of weights, order of samples and dropout")
    micro_batch_size: Positive | None = Field(None, description="samples per forward on a rank that reads data")
    global_batch_size: Positive | None = Field(None, description="samples per step over all ranks")
    gradient_accumulation_steps: Positive | None = Field(
        None, description="forwards per step; two of the three sizes are given, the third follows"
    )
    clip_grad_norm: PositiveFloat | None = Field(
        1.0, description="largest global gradient norm; null: no clipping, the norm is still recorded"
    )
    eval_every: Positive | None = Field(
        100,
        description="steps between evaluations, which also come before the first and after the last step; null: none",
    )
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="evaluate a moving average of the weights, such as 0.999; checkpoints hold it too"
    )
    eval_batches: Positive = Field(8, description="global batches of held-out samples per evaluation")
    patience: Positive | None = Field(
        None, description="end the run after so many evaluations in a row that are no better than the best one"
    )
    sample_prompts: list[str] = Field(
        default_factory=list,
        description="prompts that the model continues at evaluations; printed, and written to samples.jsonl",
    )
    sample_tokens: Positive = Field(32, description="new tokens for each of sample_prompts")
    chunked_cross_entropy: bool = Field(
        default=False,
        description="compute the loss for some positions at a time, so that full logits are never stored (torch 2.13)",
    )
    non_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="if the loss or the gradient of a step is NaN or infinite: end the run, or skip the step. Neither"
        " updates the parameters",
    )
    max_skipped_steps: Positive = Field(
        5, description="with non_finite: skip, end the run after more than this many skipped steps in a row"
    )
    check_replicas_every: Positive | None = Field(
        100,
        description="steps between comparisons of values that several ranks hold copies of (ddp, zero1, zero2,"
        " dp_replicate, tp), also before each checkpoint; null: never",
    )
    check_memory: bool = Field(
        default=True, description="refuse a run that is predicted to need more memory than its devices have"
    )
    step_timeout_s: PositiveFloat | None = Field(
        None,
        description="end the run if a step makes no progress for this long; null: ten times the longest step so far, at"
        " least 60 s. Start, first step, saves, loads and evaluations have ten times as long, at least 1800 s",
    )
    grace_s: PositiveFloat = Field(
        30.0, description="time between a request to stop and the end of the processes; a scheduler's own, if shorter"
    )


class CheckpointSection(Section):
    """The checkpoints on disk."""

    every: Positive | None = Field(None, description="steps between checkpoints; null: only the final one")
    keep: Annotated[int, Field(ge=2, le=10**6)] = Field(
        3, description="number of newest checkpoints that are kept, at least 2"
    )
    asynchronous: bool = Field(
        default=False, description="write checkpoints during training; needs as much host memory again as a rank saves"
    )
    allow_non_finite: bool = Field(default=False, description="also save parameters that contain NaN or infinity")
    best: str | None = Field(
        None,
        description="metric whose best step is also kept, in best/ of the run's folder: eval_loss, or eval_NAME of a"
        " spec's metric",
    )
    best_is: Literal["least", "most"] = Field(
        "least", description="whether the least or the most is the best value of that metric"
    )
    allow_other_code: bool = Field(default=False, description="resume even if the code of the run's spec has changed")
    final: bool = Field(default=True, description="write a checkpoint after the last step")
    upload_to: Annotated[str, AfterValidator(_place)] | None = Field(
        None,
        description="copy each saved checkpoint to this place during training: s3://bucket/runs/NAME, gs://, az://, or"
        " a folder. --resume reads the newest checkpoint from there unless this machine has one as new",
    )


class LogSection(Section):
    """The output and records of a run."""

    every: Positive = Field(
        1,
        description="steps between printed lines, and between copies of losses and norms from the device; metrics.jsonl"
        " has every step. By default 10 on a machine with GPUs",
    )
    tensorboard: bool | Literal["auto"] = Field(
        "auto", description="write TensorBoard files; auto: if tensorboard is installed"
    )
    wandb: bool = Field(default=False, description="also send metrics to Weights & Biases (WANDB_* variables apply)")
    mlflow: bool = Field(default=False, description="also send metrics to MLflow (MLFLOW_* variables apply)")
    trackio: bool = Field(
        default=False,
        description="also send metrics to Trackio (TRACKIO_* variables apply; TRACKIO_PROJECT names the project)",
    )
    loss_spikes: PositiveFloat | None = Field(
        10.0,
        description="warn of a loss that is this many standard deviations above the median of the last 100 steps, and"
        " name its samples; null: never",
    )
    hardware: str | None = Field(
        None,
        description="GPU of which the time of a step is predicted: its name, or a file of `shardwise calibrate`; by"
        " default the device's name",
    )


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class Config(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=_NAME)] = Field(
        "run", description="name of the run: letters, digits, dot, dash, underscore; by default the file's name"
    )
    spec: str | None = Field(
        None,
        description="your own model, data or loss (sw.TrainSpec), as --spec: a file, mine.py or mine.py:NAME, or"
        " package.module:NAME",
    )
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    train: TrainSection = Field(default_factory=TrainSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    log: LogSection = Field(default_factory=LogSection)

    def to_yaml(self, without: Mapping[str, Collection[str]] | None = None) -> str:
        """Return a YAML text that reads back as the same configuration; leave out ``without``, fields by section."""
        data = self.model_dump(mode="json", exclude={name: set(keys) for name, keys in (without or {}).items()})
        data["model"] = {key: value for key, value in data["model"].items() if value is not None}
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


_SECTIONS: dict[str, Any] = {
    name: held.annotation for name, held in Config.model_fields.items() if name not in {"name", "spec"}
}


@dataclass(slots=True)
class RawConfig:
    """A configuration that has been read, with the mistakes found so far."""

    title: str  # the file's name, for messages
    document: Document  # all values with their places
    #: The values that are valid alone; an invalid value is replaced by its default
    config: Config = field(default_factory=Config)
    #: Place and message of each mistake, in the order in which they were found
    mistakes: dict[tuple[str, str], None] = field(default_factory=dict)

    def fail(self, section: str, key: str, message: str) -> None:
        """Record a mistake in a field."""
        self.fail_at((section, key), message)

    def fail_at(self, path: tuple[str, ...], message: str) -> None:
        """Record a mistake at the place where ``path``, or its closest written parent, was given."""
        places = dict(self.document.where)
        if len(path) > 1 and places.get(path[:1], "").startswith("--set ") and places[path[:1]] != f"--set {path[0]}":
            del places[path[:1]]  # where another key of the section was set
        at = next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), self.title)
        names_key = path[0] in Config.model_fields and not at.startswith("--set")
        self.mistakes[f"{at}: {'.'.join(path)}" if names_key else at, message] = None

    def refuse(self, section: str, key: str, message: str) -> NoReturn:
        """Record a mistake in a field, and raise because nothing else can be checked after it."""
        self.refuse_at((section, key), message)

    def refuse_at(self, path: tuple[str, ...], message: str) -> NoReturn:
        """As :meth:`refuse`, at the place where ``path`` was given."""
        self.fail_at(path, message)
        raise self._error()

    def raise_if_any(self) -> None:
        """Raise one ConfigError that lists every mistake."""
        if self.mistakes:
            raise self._error()

    def _error(self) -> ConfigError:
        count = len(self.mistakes)
        lines = [f"{count} mistake{'s' if count > 1 else ''} in {self.title}."]
        lines += [redacted(f"  {where}: {message}") for where, message in list(self.mistakes)[:40]]
        if count > 40:
            lines.append(f"  ... and {count - 40} more")
        advice = "Correct them and try again; `shardwise config-schema` lists all keys of this version"
        lines.append(f"  {advice}. Nothing was started.")
        return ConfigError("\n".join(lines))

    def given_keys(self, section: str) -> set[str]:
        """Return the keys of a section that were given in a file or by ``--set``."""
        fields = self.document.values.get(section)
        return set(fields) if isinstance(fields, dict) else set()

    def overridden_keys(self) -> frozenset[str]:
        """Return the keys given by ``--set``, as ``section.field``."""
        found = self.document.where.items()
        return frozenset(".".join(path) for path, at in found if len(path) == 2 and at.startswith("--set"))


def items(error: Exception) -> list[str]:
    """Return the list entries of a message; of a message without a list, the message in one line."""
    lines = [line.strip().rstrip(".:") for line in str(error).splitlines() if line.strip()]
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")] or ["; ".join(lines)]


def inline(error: Exception) -> str:
    """Return a message of several lines as one line."""
    return "; ".join(items(error))


def read_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, base: Mapping[str, Any] | None = None, title: str = ""
) -> RawConfig:
    """Read a file (or the mapping ``base``, called ``title``), merge ``--set`` values, and check each field alone.

    For a run's folder, its ``config.yaml`` is read. Wrong values are collected in the result; a ConfigError is raised
    only if the file cannot be read at all.
    """
    if path is not None and (Path(path) / CONFIG).is_file():
        path = Path(path) / CONFIG
    document = Document(dict(base or {})) if path is None else _read_chain(Path(path), ())
    title = (title or "the configuration") if path is None else str(path)
    raw = RawConfig(title, document)
    for override in overrides:
        try:
            _merge_override(document, override)
        except Problem as problem:
            raw.mistakes[problem.where, problem.message] = None
    stem = "run" if path is None else Path(path).stem
    document.values = {"name": stem if re.fullmatch(_NAME, stem) else "run", **document.values}
    raw.config = _check_fields(raw)
    return raw


def _read_chain(path: Path, seen: tuple[Path, ...]) -> Document:
    """Read a file merged onto the one that it extends, which must be in the first file's or the current folder."""
    document = read_document(path)
    check_is_ours(path, document.values)
    where, name = document.where.get(("extends",)), document.values.pop("extends", None)
    if name is None:
        return document
    if not isinstance(name, str):
        raise ConfigError(f"{where}: extends takes the path of one file.\n  Correct the file.")
    base, chain = (path.parent / name).resolve(), (*seen, path.resolve())
    if base in chain:
        path_shown = " -> ".join(str(step.name) for step in (*chain[chain.index(base) :], base))
        raise ConfigError(f"{where}: extends goes in a circle: {path_shown}.\n  Take one of them out.")
    first = chain[0].parent
    inside = (first, Path.cwd()) if first.is_relative_to(Path.cwd()) else (first,)
    if not any(base.is_relative_to(folder) for folder in inside):
        raise ConfigError(
            f"{where}: extends names {name!r}, which lies outside of {' and '.join(map(str, inside))}.\n"
            "  Copy it there, or start from a folder that holds both files."
        )
    if not base.is_file():
        raise ConfigError(
            f"{where}: extends names {name!r}, which is not a file.\n  The path is relative to {path.name}."
        )
    below = _read_chain(base, chain)
    _merge(below, document)
    return below


#: Pairs of keys that set the same thing in two ways, by section.
_RIVALS = (("train", "steps", "epochs"), ("data", "source", "mix"), ("model", "preset", "hf"))


def _merge(document: Document, over: Document) -> None:
    """Merge ``over`` into a document; a key in ``over`` also replaces the key's rival.

    A rival given by another ``--set`` is kept, because then the command contradicts itself and must be refused.
    """
    for section, first, second in _RIVALS:
        new, old = over.values.get(section), document.values.get(section)
        if not isinstance(new, dict) or not isinstance(old, dict):
            continue
        for key, rival in ((first, second), (second, first)):
            is_set = document.where.get((section, rival), "").startswith("--set ")
            if new.get(key) is not None and rival not in new and not is_set:
                old.pop(rival, None)
    document.merge(over)


def _merge_override(document: Document, text: str) -> None:
    key, equals, written = text.partition("=")
    path = tuple(key.strip().split("."))
    where = f"--set {key.strip()}"
    if not equals or not all(path):
        raise Problem(f"--set {text}", "expected section.field=value")
    if path == ("extends",):
        raise Problem(where, "extends can only be written in a file")
    try:
        parsed = parse_yaml(written, "--set")
    except Problem as problem:
        raise Problem(where, problem.message) from None
    value = parsed.values
    for part in reversed(path):
        value = {part: value}
    keys = [path[:n] for n in range(min(2, len(path)), len(path) + 1)] + [path + inner for inner in parsed.where]
    texts = {path + inner: text for inner, text in parsed.texts.items()}
    _merge(document, Document(value, dict.fromkeys(keys, where), texts))
    document.where.setdefault(path[:1], where)


#: A list of sections, whose mistakes are reported by entry and field.
_MIX = ("data", "mix")


def _check_fields(raw: RawConfig) -> Config:
    """Return the values that are valid alone; report the others and replace them with their defaults."""
    values = copy.deepcopy(raw.document.values)
    values |= {key: {} for key, fields in values.items() if fields is None and key in _SECTIONS}
    if isinstance(model := values.get("model"), dict):
        keys = [*ModelSection.model_fields, *_override_schema()]
        for key in [key for key in model if key not in keys]:
            raw.fail("model", key, f"unknown key.{did_you_mean(key, keys)}")
            del model[key]
    while True:
        try:
            return Config.model_validate(values)
        except pydantic.ValidationError as error:
            details: dict[tuple[str, ...], list[Any]] = {}
            wrong: set[tuple[str, ...]] = set()
            for detail in error.errors(include_url=False):
                depth = 4 if detail["loc"][:2] == _MIX else 2
                details.setdefault(tuple(str(part) for part in detail["loc"][:depth]), []).append(detail)
            for path, found in details.items():
                *above, key = path
                section = functools.reduce(_child, above, values)
                text = raw.document.texts.get(path)
                takes_text = any(detail["type"] == "string_type" for detail in found)
                if takes_text and text is not None and not isinstance(section[key], str):
                    section[key] = text  # the field is a text: an unquoted word or number is used as text
                    continue
                raw.fail_at(path, _explain(path, found, _child(section, key) if text is None else text))
                wrong.add(path[:2])
            for *above, key in wrong:
                del functools.reduce(_child, above, values)[key]


def _child(container: Any, key: str) -> Any:
    """Return the value of a key in a mapping, or of an index in a list; ``None`` if a mapping lacks the key."""
    return container[int(key)] if isinstance(container, list) else container.get(key)


def _explain(path: tuple[str, ...], details: Sequence[Any], got: Any) -> str:
    """Describe the values expected instead of ``got``; each branch of a union has reported a mismatch."""
    key, kind = path[-1], details[0]["type"]
    if kind in {"missing", "value_error"}:  # the message is complete; the given value may be secret
        return f"it has no {key}; name one" if kind == "missing" else str(details[0]["ctx"]["error"])
    if kind == "extra_forbidden" and path[:2] == _MIX:
        return f"unknown key.{did_you_mean(key, MixedSection.model_fields)}"
    if kind == "extra_forbidden":
        homes = [f"{name}.{key}" for name, section in _SECTIONS.items() if key in section.model_fields]
        names = Config.model_fields if len(path) == 1 else _SECTIONS[path[0]].model_fields
        near = did_you_mean(key, [*names, "extends"])
        hint = f" Did you mean {homes[0]}?" if homes and (len(path) == 1 or not near) else near
        return f"unknown key.{hint}" if len(path) > 1 else f"unknown section {key!r}.{hint}"
    if kind == "model_type":
        return f"expected the fields of {'a source' if path[:2] == _MIX else f'section {key}'}, got {got!r}"
    if path == ("name",):
        return f"{got!r} is not a name of a run: 1 to 100 letters, digits, dots, dashes or underscores"
    choices = re.findall("'(.*?)'", " ".join(detail.get("ctx", {}).get("expected", "") for detail in details))
    expected = " or ".join(dict.fromkeys(detail["msg"].removeprefix("Input should be ") for detail in details))
    return f"expected {expected}, got {got!r}.{did_you_mean(str(got), choices)}"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file."""
    result = Config.model_json_schema()
    result["properties"]["extends"] = {
        "type": "string",
        "description": "another file, relative to this one, to build on",
    }
    definition = result["$defs"]["ModelSection"]
    definition["additionalProperties"] = False
    definition["properties"].update(_override_schema())
    return result


@functools.cache
def _override_schema() -> dict[str, Any]:
    """Return the JSON schema of the fields of a built-in model."""
    return {
        name: {**pydantic.TypeAdapter(hint).json_schema(), "description": "replaces the preset's value"}
        for name, hint in typing.get_type_hints(GPTConfig).items()
    }
