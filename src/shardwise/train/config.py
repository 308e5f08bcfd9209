"""The configuration of a run: sections, fields, and a reader that reports every mistake at once.

Reading goes in three steps, none of which starts a process or imports torch:

1. files to a tree that remembers lines (``train.tree``), ``extends:`` and ``--set`` laid on top of each other;
2. the tree to the typed sections below (unknown keys are errors, values are taken by declared type);
3. checks across sections, against the world, the model and the data (``train.check``).
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, Strict

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import did_you_mean
from shardwise.train.tree import Node, Problem, merge, parse_yaml, read_tree, walk

Positive = Annotated[int, Field(ge=1, le=10**12)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(Section):
    """What is trained: a built-in GPT (``preset`` and overrides of its fields), or a Hugging Face folder."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    preset: str | None = Field(None, description="built-in model, for example gpt-tiny; gpt-tiny where hf is not given")
    hf: str | None = Field(None, description="folder of a Hugging Face model; read offline, its own code is never run")

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of the preset that the file replaces."""
        return dict(self.__pydantic_extra__ or {})


class DataSection(Section):
    """Where tokens come from and how they are cut into samples."""

    source: str = Field("stdlib", description="path, folder or glob of text; a token file; 'stdlib' or 'random'")
    seq_len: Annotated[int, Field(ge=1, le=10**7)] | None = Field(
        None, description="tokens per sample; the longest that the model takes, but at most 2,048"
    )
    tokenizer: str | None = Field(
        None,
        description="how text becomes tokens: 'bytes' (one token per byte), or a Hugging Face folder with a tokenizer;"
        " by default the model's own where model.hf is given, else bytes",
    )
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.05, description="last part of the tokens, not trained on"
    )
    max_bytes: Positive | None = Field(None, description="use the first bytes of the text only; stdlib: 4,000,000")


class ParallelSection(Section):
    """The fields of ``ParallelPlan``."""

    strategy: str = Field(
        "zero3",
        description="ddp, zero1, zero2, shard_grad_op, zero3, hsdp, hybrid_shard_grad_op, data_parallel (with one "
        "process), or an alias of these",
    )
    dp_replicate: int = Field(
        1, description="groups that each hold the model; for hsdp 1 means what dp_shard leaves, by default the machines"
    )
    dp_shard: int = Field(-1, description="ranks of a group; -1: what is left")
    cp: int = Field(1, description="ranks that each compute with a part of every sequence")
    tp: int = Field(1, description="ranks that each hold a part of the large weights and compute with it")
    pp: int = Field(1, description="ranks of a pipeline, which each hold some of the model's stages")
    ep: int = Field(1, description="ranks that each hold a part of the experts of every mixture, and exchange tokens")
    expert_capacity: float | None = Field(
        None, description="tokens that an expert takes of a rank's batch, times its even share; null: all"
    )
    tp_plan: dict[str, str] | None = Field(
        None, description="how tp cuts the model: styles by name pattern; null: as is known for its class"
    )
    sequence_parallel: bool = Field(
        default=False, description="with tp: norms, dropout and the residual stream are divided too, by positions"
    )
    auto_wrap_policy: str | dict[str, Any] = Field(
        "auto", description="auto, none, {by_class: [names]}, {by_size: numel} or {by_name: [globs]}"
    )
    ignored: list[str] = Field(
        default_factory=list, description="names of modules or parameters to leave alone, such as [blocks.*.experts]"
    )
    row_sharded: list[str] = Field(
        default_factory=list, description="names of embeddings whose rows are spread over all ranks"
    )
    reshard_after_forward: bool | int | Literal["auto"] = Field(
        "auto", description="auto: as the strategy says; a number: kept sharded over so many ranks"
    )
    mp_policy: dict[str, Any] | None = Field(
        None, description="mixed precision: the fields of PrecisionPolicy, such as {param_dtype: bf16}; null: no cast"
    )
    quantize_frozen: str = Field(
        "none", description="none, int8 or bf16: how frozen linear weights are held and gathered"
    )
    quantized_gather: str = Field("none", description="none or int8: how parameters are sent to be gathered")
    quantized_reduce: str = Field("none", description="none or int8: how gradients are sent to be added up")
    granularity: str | list[Any] = Field(
        "element", description="element, row, [block, n] or tensor: what a cut never divides, for the optimizer's sake"
    )
    offload_policy: str | dict[str, Any] = Field(
        "none", description="none, cpu, or the fields of OffloadPolicy such as {ratio: 0.5}: what is kept on the host"
    )
    activation_checkpointing: str | dict[str, Any] = Field(
        "none",
        description="none, full, selective, a wrap policy such as {by_class: [Block]}, or RecomputePolicy's fields",
    )
    accumulation: str = Field("auto", description="auto, sharded, unsharded or defer_replicate")
    pipeline: str | dict[str, Any] | None = Field(
        None,
        description="with pp: gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v, or PipelinePolicy's fields, such as"
        " {schedule: zb-h1, num_microbatches: 8}",
    )
    merge_units: int | bool | Literal["auto"] = Field(
        "auto", description="small units that follow one another travel together up to so many bytes; false: never"
    )
    gradient_buffers: int = Field(2, description="full-size gradient buffers per size of unit; 1: least memory")
    keep_buffers: bool = Field(
        default=True, description="buffers stay allocated from step to step; false: less memory, slower on the CPU"
    )
    sync: str = Field("warn", description="warn, error or rank0: what to do where ranks hold different weights")
    sync_buffers: str = Field(
        "auto", description="auto, broadcast, mean or none: buffers that training changes, such as batch norm's"
    )
    compile: bool = Field(default=False, description="compile the model unit by unit")


class OptimizerSection(Section):
    """The optimizer. Weight decay acts on parameters with two or more dimensions only."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: PositiveFloat = Field(3e-4, description="peak learning rate")
    betas: Annotated[tuple[Ratio, Ratio], Strict(False)] | None = Field(None, description="adamw, adam: [0.9, 0.95]")  # noqa: FBT003
    eps: PositiveFloat | None = Field(None, description="adamw, adam: 1e-8")
    weight_decay: NonNegativeFloat = 0.1
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(None, description="sgd: 0.9")
    flat: bool = Field(
        default=True, description="one tensor per unit instead of one per name: faster, the same numbers"
    )
    in_backward: bool = Field(
        default=False,
        description="update each unit inside backward, so that gradients exist for one unit at a time; the same "
        "numbers. Needs train.clip_grad_norm: null, one microbatch per step, no fp16 and no offload",
    )


class ScheduleSection(Section):
    """The learning rate over the steps."""

    name: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = "cosine"
    warmup_steps: Count = Field(0, description="steps over which the rate rises linearly from 0")
    min_lr_ratio: Ratio | None = Field(None, description="rate at the end over peak rate; 0.1 (not for constant)")
    decay_steps: Positive | None = Field(None, description="warmup-stable-decay: steps of the decay; a fifth of all")


class TrainSection(Section):
    """How long, how much at once, and how often the held-out loss is taken."""

    steps: Positive = 1000
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    micro_batch_size: Positive | None = Field(None, description="samples per rank and forward")
    global_batch_size: Positive | None = Field(None, description="samples per step over all ranks")
    gradient_accumulation_steps: Positive | None = Field(None, description="forwards per step; two of the three given")
    clip_grad_norm: PositiveFloat | None = Field(
        1.0, description="null: no clipping, the norm is recorded all the same"
    )
    eval_every: Positive | None = Field(100, description="steps between evaluations, also at both ends; null: none")
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="evaluate a moving average of the weights, such as 0.999; checkpoints hold it too"
    )
    eval_batches: Positive = Field(8, description="global batches of held-out samples per evaluation")


class CheckpointSection(Section):
    """What is kept on disk."""

    every: Positive | None = Field(None, description="steps between checkpoints; null: none on the way")
    keep: Annotated[int, Field(ge=2, le=10**6)] = Field(3, description="newest checkpoints kept, at least 2")
    final: bool = Field(default=True, description="a checkpoint after the last step")


class LogSection(Section):
    """What is shown and recorded."""

    every: Positive = Field(
        1,
        description="steps between lines, and between readings of what steps leave on the device; metrics.jsonl has"
        " every step. Where it is not given, 10 on a machine with GPUs",
    )
    tensorboard: bool | Literal["auto"] = Field("auto", description="auto: where tensorboard is installed")
    wandb: bool = Field(default=False, description="also send metrics to Weights & Biases (WANDB_* variables apply)")


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "parallel": ParallelSection,
    "optimizer": OptimizerSection,
    "schedule": ScheduleSection,
    "train": TrainSection,
    "checkpoint": CheckpointSection,
    "log": LogSection,
}


class Config(BaseModel):
    """A whole run."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        "run", description="of the run: letters, digits, dot, dash, underscore. The file's own name where not given"
    )
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    train: TrainSection = Field(default_factory=TrainSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    log: LogSection = Field(default_factory=LogSection)

    def to_yaml(self) -> str:
        """The configuration as a file that reads back to the same configuration."""
        data = self.model_dump(mode="json")
        data["model"] = {key: value for key, value in data["model"].items() if value is not None}
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


@dataclass(slots=True)
class ConfigErrors:
    """Mistakes found so far, in the order of the file."""

    title: str
    found: list[tuple[str, str]] = field(default_factory=list)

    def add(self, where: str, message: str) -> None:
        """Record one mistake."""
        if (where, message) not in self.found:
            self.found.append((where, message))

    def raise_if_any(self) -> None:
        """Raise one ConfigError that lists everything."""
        if not self.found:
            return
        count = len(self.found)
        lines = [f"{count} mistake{'s' if count > 1 else ''} in {self.title}."]
        lines += [f"  {where}: {message}" for where, message in self.found[:40]]
        if count > 40:
            lines.append(f"  ... and {count - 40} more")
        lines.append("  Correct them and try again; `shardwise config-schema` lists all keys. Nothing was started.")
        raise ConfigError("\n".join(lines))


@dataclass(slots=True)
class RawConfig:
    """A configuration that has been read, with what is needed to report further mistakes at the right line.

    Attributes:
        title: The file's name, for messages.
        folder: Relative paths in the configuration are relative to the current folder; this is where the file lies.
        sections: Those sections that are valid by themselves; ``name`` too.
        problems: What was wrong with the others.
        tree: All values with their places.
    """

    title: str
    folder: Path
    sections: dict[str, Any]
    problems: ConfigErrors
    tree: Node

    def where(self, *path: str) -> str:
        """Where ``path`` (or the nearest thing that holds it) was written, with the dotted name of the key."""
        node, at = self.tree, self.title
        for key in path:
            if node.kind != "map" or key not in node.value:
                break
            at = node.keys_at.get(key, at)
            node = node.value[key]
        return at if at.startswith("--set") else f"{at}: {'.'.join(path)}"

    def given(self, section: str) -> set[str]:
        """The keys of a section that somebody wrote."""
        node = self.tree.value.get(section)
        return set(node.value) if node is not None and node.kind == "map" else set()

    def asked(self) -> frozenset[str]:
        """The keys, as ``section.field``, that ``--set`` gave."""
        given = {
            (name, key): node.keys_at.get(key, "")
            for name, node in self.tree.value.items()
            if node.kind == "map"
            for key in node.value
        }
        return frozenset(f"{name}.{key}" for (name, key), where in given.items() if where.startswith("--set"))

    def config(self) -> Config:
        """The whole configuration.

        Raises:
            ConfigError: Something is wrong; all mistakes are listed.
        """
        self.problems.raise_if_any()
        return Config(**self.sections)


def read_draft(
    path: str | Path | None, overrides: Sequence[str] = (), *, base: Mapping[str, Any] | None = None, title: str = ""
) -> RawConfig:
    """Read a configuration file (or the mapping ``base``), lay ``--set`` values on it, and take it apart by section.

    Args:
        path: A YAML or TOML file; ``None`` reads ``base``.
        overrides: ``section.field=value`` each, the value written as in YAML.
        base: What a run without a file starts from.
        title: Name of ``base`` in messages.

    Raises:
        ConfigError: The file cannot be read at all. Wrong values are collected in the draft instead.
    """
    if path is None:
        tree = parse_yaml(yaml.safe_dump(dict(base or {})), title, where=title)
        folder, stem = Path.cwd(), "run"
        if tree.kind != "map":
            tree = Node("map", title, {})
    else:
        path = Path(path)
        tree, folder, stem, title = _read_chain(path, ()), path.parent, path.stem, str(path)
    problems = ConfigErrors(title or "the configuration")
    for override in overrides:
        try:
            tree = merge(tree, _override(override))
        except Problem as problem:
            where, _, message = str(problem).partition(": ")
            problems.add(where, message)
    sections = _sections(tree, problems, RawConfig(problems.title, folder, {}, problems, tree))
    sections.setdefault("name", stem if _is_name(stem) else "run")
    return RawConfig(problems.title, folder, sections, problems, tree)


def schema() -> dict[str, Any]:
    """The JSON schema of a configuration file."""
    result = Config.model_json_schema()
    result["properties"]["extends"] = {
        "type": "string",
        "description": "another file, relative to this one, to build on",
    }
    definition = result["$defs"]["ModelSection"]
    definition["additionalProperties"] = False
    definition["properties"].update(_override_schema())
    return result


def _is_name(stem: str) -> bool:
    return (
        bool(stem)
        and stem[0].isalnum()
        and stem.isascii()
        and len(stem) <= 100
        and all(c.isalnum() or c in "._-" for c in stem)
    )


def _read_chain(path: Path, seen: tuple[Path, ...]) -> Node:
    tree = read_tree(path)
    node = tree.value.pop("extends", None)
    if node is None:
        return tree
    if node.kind != "scalar" or not isinstance(node.value, str):
        raise ConfigError(f"{node.where}: extends takes the path of one file.\n  Correct the file.")
    base = (path.parent / node.value).resolve()
    chain = (*seen, path.resolve())
    if base in chain:
        shown = " -> ".join(str(step.name) for step in (*chain[chain.index(base) :], base))
        raise ConfigError(f"{node.where}: extends goes in a circle: {shown}.\n  Take one of them out.")
    if len(chain) > 16:
        raise ConfigError(f"{node.where}: extends goes through more than 16 files.\n  Flatten them.")
    if not base.is_file():
        raise ConfigError(
            f"{node.where}: extends names {node.value!r}, which is no file.\n  The path is relative to {path.name}."
        )
    return merge(_read_chain(base, chain), tree)


def _override(text: str) -> Node:
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    where = f"--set {key.strip()}"
    if not equals or not all(path):
        raise Problem(f"--set {text}", "expected section.field=value")
    if path == ["extends"]:
        raise Problem(where, "extends can only be written in a file")
    node = parse_yaml(value, "--set", where=where)
    for part in reversed(path):
        node = Node("map", where, {part: node}, keys_at={part: where})
    return node


def _sections(tree: Node, problems: ConfigErrors, draft: RawConfig) -> dict[str, Any]:
    good: dict[str, Any] = {}
    known = ["name", "extends", *SECTIONS]
    for key, node in tree.value.items():
        if key == "name":
            try:
                good["name"] = Config(name=_lower(node, str)).name
            except pydantic.ValidationError:
                problems.add(
                    draft.where("name"),
                    f"{node.value!r} is no name of a run: 1 to 100 letters, digits, dots, dashes or underscores",
                )
                good["name"] = "run"
        elif key not in SECTIONS:
            fields = [(name, f) for name, section in SECTIONS.items() for f in section.model_fields if f == key]
            hint = f" Did you mean {fields[0][0]}.{key}?" if fields else did_you_mean(key, known)
            problems.add(tree.keys_at.get(key, draft.title), f"unknown section {key!r}.{hint}")
    for name, section in SECTIONS.items():
        node = tree.value.get(name)
        if node is None or (node.kind == "scalar" and node.value is None):
            node = Node("map", draft.title, {})
        if node.kind != "map":
            problems.add(draft.where(name), f"expected the fields of section {name}, got {node.value!r}")
            continue
        good[name] = _section(name, section, node, problems, draft)
    return good


def _section(name: str, section: type[Section], node: Node, problems: ConfigErrors, draft: RawConfig) -> Section:
    hints = typing.get_type_hints(section, include_extras=True)
    data = {key: _lower(item, hints.get(key, Any)) for key, item in node.value.items()}
    if name == "model":
        known = _override_schema()
        for key in [key for key in data if key not in section.model_fields and key not in known]:
            hint = did_you_mean(key, [*section.model_fields, *known])
            problems.add(draft.where(name, key), f"unknown key.{hint}")
            del data[key]
    try:
        return section(**data)
    except pydantic.ValidationError as error:
        wrong: set[str] = set()
        for detail in error.errors(include_url=False):
            key = str(detail["loc"][0]) if detail["loc"] else ""
            if key in wrong:
                continue  # each branch of a union reports its own mismatch; the first says enough
            wrong.add(key)
            problems.add(draft.where(name, key), _explain(key, detail, section, node))
    # What is right is kept, so that checks across sections report their mistakes in the same go.
    return section(**{key: value for key, value in data.items() if key not in wrong})


def _override_schema() -> dict[str, Any]:
    import dataclasses

    from shardwise.models.shape import GPTConfig

    hints = typing.get_type_hints(GPTConfig)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(GPTConfig) if f.init}
    fields.pop("name", None)
    return {
        name: {**pydantic.TypeAdapter(hint).json_schema(), "description": "replaces the preset's value"}
        for name, hint in fields.items()
    }


def _lower(node: Node, declared: Any) -> Any:
    """The plain value of ``node`` for a field of type ``declared``: unquoted text stays text where text is declared."""
    if node.kind == "map":
        return {key: _lower(item, Any) for key, item in node.value.items()}
    if node.kind == "list":
        return [_lower(item, Any) for item in node.value]
    takes = set(_leaves(declared))
    if node.text is not None and str in takes and type(node.value) not in takes:
        return node.text
    return node.value


def _leaves(declared: Any) -> Iterable[type]:
    origin = typing.get_origin(declared)
    if origin is Annotated:
        yield from _leaves(typing.get_args(declared)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(declared):
            yield from _leaves(part)
    elif origin is Literal:
        for value in typing.get_args(declared):
            yield type(value)
    elif isinstance(declared, type):
        yield declared


def _explain(key: str, detail: Any, section: type[Section], node: Node) -> str:
    kind, got = detail["type"], detail.get("input")
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        home = [other for other, held in SECTIONS.items() if key in held.model_fields]
        hint = did_you_mean(key, section.model_fields) or (f" Did you mean {home[0]}.{key}?" if home else "")
        return f"unknown key.{hint}"
    item = node.value.get(key)
    shown = repr(item.text) if item is not None and item.text is not None else repr(item.plain() if item else got)
    declared = typing.get_type_hints(section, include_extras=True).get(key, Any)
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    if kind in bounds:
        return f"expected {words[bounds[kind]]} {context[bounds[kind]]:,}, got {shown}"
    if kind == "finite_number":
        return f"expected a finite number, got {shown}"
    if (
        kind == "literal_error"
        and {type(value) for value in _literals(declared)} == {str}
        and bool not in set(_leaves(declared))
    ):
        choices = [str(value) for value in _literals(declared)]
        hint = did_you_mean(str(got), choices)
        return f"expected one of {', '.join(choices)}, got {shown}.{hint}"
    return f"expected {_describe(declared)}, got {shown}"


def _literals(declared: Any) -> list[Any]:
    origin = typing.get_origin(declared)
    if origin is Literal:
        return list(typing.get_args(declared))
    if origin in (typing.Union, types.UnionType):
        return [value for part in typing.get_args(declared) for value in _literals(part)]
    return []


def _describe(declared: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    names |= {tuple: "a list of two numbers from 0 to 1", type(None): "null"}
    parts: list[str] = []

    def collect(kind: Any) -> None:
        origin = typing.get_origin(kind)
        if origin is Annotated:
            collect(typing.get_args(kind)[0])
        elif origin in (typing.Union, types.UnionType):
            for part in typing.get_args(kind):
                collect(part)
        elif origin is Literal:
            parts.extend(str(value) for value in typing.get_args(kind))
        else:
            parts.append(names.get(origin or kind, str(kind)))

    collect(declared)
    if "true or false" in parts and len(parts) > 1:
        parts[parts.index("true or false") : parts.index("true or false") + 1] = ["true", "false"]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted key, old value and new value of everything that differs between two nested mappings."""
    result: list[tuple[str, Any, Any]] = []
    for key in [*old, *(k for k in new if k not in old)]:
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            result += differences(left, right, f"{prefix}{key}.")
        elif left != right and not (
            isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
        ):
            result.append((f"{prefix}{key}", left, right))
    return result


__all__ = ["SECTIONS", "Config", "ConfigErrors", "RawConfig", "differences", "read_draft", "schema", "walk"]
