"""``convert``: a configuration of Accelerate, DeepSpeed or torchtitan as one for ``train``, with a comment per key.

``data/conversion.yaml`` maps single keys. This module has the rules for combinations of keys, a function per project.
"""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.output import check_writable, show, write
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.spec.text import first_line, printable

#: The dtype to compute in.
_COMPUTES_IN = "parallel.mp_policy.param_dtype"
#: Settings that DeepSpeed's optimizers have if a file leaves them out.
_DEEPSPEED_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0},
    "muon": {"lr": 0.02, "weight_decay": 0},
}
#: Fields of a plan that do not change results. They are left out if they do not combine with the others.
_OPTIONAL = ("compile", "offload_activations", "sequence_parallel", "reshard_after_forward")
_TITLES = {
    "none": "No counterpart",
    "auto": "Filled in by the Trainer from its arguments",
    "automatic": "Nothing to set",
}


def convert(
    file: Annotated[Path, typer.Argument(help="The configuration of the other project.")],
    model: Annotated[str | None, typer.Option(help="Hugging Face folder, or preset, to train.")] = None,
    data: Annotated[str | None, typer.Option(help="Value of data.source.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the configuration here.")] = None,
) -> None:
    """Turn a configuration of Accelerate, DeepSpeed (JSON) or torchtitan (TOML) into one for `train`.

    Files of Accelerate (YAML or JSON) are converted with their FSDP, DeepSpeed or Megatron-LM plugin. A comment beside
    each key names the original key. The end lists keys that need nothing here, and keys without a counterpart, with
    what to do instead.

    Example: shardwise convert ds_config.json --model models/llama --data corpus/ --out run.yaml
    """
    check_writable(out)
    text = convert_file(file, model=model, data=data)
    if out is None:
        show(text.rstrip())
    else:
        write(out, text)
        show(f"{out}: check it with `shardwise validate {out}`")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of ``data/conversion.yaml``, which explains the fields: keys of the other project and their counterpart."""

    keys: str
    to: str
    values: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def sets(self) -> bool:
        """Whether the row sets a key of the run's configuration."""
        return self.to not in _TITLES

    def matches(self, key: str) -> bool:
        """Whether ``key`` matches one of the row's patterns."""
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self.keys.split())

    def value(self, old: Any) -> Any:
        """Return the value in the run's configuration, or ``"default"``.

        Raises:
            KeyError: The value has no counterpart.
        """
        word = str(old).lower() if isinstance(old, bool | str) else f"{old:g}" if _is_number(old) else ""
        is_open = all(value is None or value == "default" or _is_number(value) for value in self.values.values())
        return old if self.sets and is_open and word not in self.values else self.values[word]


@functools.cache
def tables() -> dict[str, tuple[dict[str, Any], list[Row]]]:
    """Return, by project, its defaults and the rows of its keys."""
    from shardwise.train.config.document import parse_yaml

    text = (Path(__file__).parent / "data" / "conversion.yaml").read_text("utf-8")
    projects = parse_yaml(text, "conversion.yaml").values
    return {kind: (table["defaults"], [Row(**row) for row in table["rows"]]) for kind, table in projects.items()}


@dataclass
class Draft:
    """The configuration under construction."""

    original: dict[str, Any]  # the other project's values, by key with its sections
    result: dict[str, Any] = field(default_factory=dict)  # values of the run's configuration, by key with its section
    why: dict[str, list[str]] = field(default_factory=dict)  # origins of each key in ``result``
    #: Original keys without a value in ``result``, by group (``automatic``, ``none`` or ``auto``) and explanation.
    notes: dict[str, dict[str, list[str]]] = field(default_factory=lambda: {title: {} for title in _TITLES})

    def put(self, key: str, value: Any, reason: str) -> None:
        """Set a key of the run's configuration. Replaces an earlier value, but keeps its reason."""
        self.result[key] = value
        self.why.setdefault(key, []).append(reason)

    def drop(self, key: str, reason: str) -> None:
        """Remove a key of the run's configuration."""
        if key in self.result:
            del self.result[key]
            for source in self.why.pop(key):
                self.note("none", source, reason)

    def take(self, kind: str) -> None:
        """Apply the rows of a project, and its defaults for missing keys."""
        defaults, rows = tables()[kind]
        unknown, defaults = dict(self.original), dict(defaults)
        for row in rows:
            matches = (key for pattern in row.keys.split() for key in fnmatch.filter(list(unknown), pattern))
            found = {key: unknown.pop(key) for key in matches}  # in the row's order: the last one counts
            others = {key: defaults.pop(key) for key in list(defaults) if row.matches(key)}
            for key, value in (found or others).items():
                self._apply(row, key, value, "" if found else f" ({kind}'s default)")
        for key, value in unknown.items():
            self.note("none", _format(key, value), "`shardwise convert` does not know this key")

    def note(self, group: str, shown: str, text: str) -> None:
        """Add an explanation of an original key that sets nothing."""
        self.notes[group].setdefault(text, []).append(shown)

    def _apply(self, row: Row, key: str, value: Any, origin: str = "") -> None:
        shown = _format(key, value) + origin
        if row.sets and value == "auto":
            self.note("auto", shown, f"set {row.to}")
            return
        try:
            here = row.value(value)
        except KeyError:
            is_off = value in (None, False, "no", "none", [], "") or row.to == "automatic"
            text = "; ".join(filter(None, [row.text, f"set {row.to} by hand" * row.sets]))
            self.note("automatic" if is_off else "none", shown, "off" if is_off and row.sets else text)
            return
        if here != "default":
            self.put(row.to, here, shown)
        elif not origin:
            self.note("automatic", shown, "as here")

    def parallel(self) -> dict[str, Any]:
        """Return the ``parallel`` section."""
        return _nest(self.result).get("parallel", {})


def convert_file(file: Path, *, model: str | None = None, data: str | None = None) -> str:
    """Return the text of a run's configuration, converted from another project's file."""
    from shardwise.train.config.document import MARKS, kind_of, read_document

    values = read_document(file, takes_toml=True).values
    kind = kind_of(values)
    if kind is None:
        projects = "; ".join(f"{name}: {', '.join(sorted(marks))}" for name, (_, marks) in MARKS.items())
        raise ConfigError(
            f"{printable(file)} is not a configuration of {', '.join(MARKS)}.\n  Their keys are {projects}."
            f"\n  One of shardwise needs no conversion: shardwise validate {printable(file)}"
        )
    draft = Draft(dict(_flat(values)))
    draft.take(kind)
    _FINISH[kind](draft)
    if kind == "Accelerate" and (other := draft.original.get("deepspeed_config.deepspeed_config_file")):
        path = next((path for path in (file.parent / str(other), Path(str(other))) if path.is_file()), None)
        if path is None:
            draft.note("none", _format("deepspeed_config_file", other), "there is no such file: convert it separately")
        else:
            inner = Draft(dict(_flat(read_document(path).values)), draft.result, draft.why, draft.notes)
            inner.take("DeepSpeed")
            _finish_deepspeed(inner)
    _finish(draft, file)
    _put_model_and_data(draft, model, data)
    return _text(draft, kind, file)


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    from shardwise.train.config.document import plain_scalar

    for key, value in values.items():
        name = key if not above.startswith("fsdp_config.") or key.startswith("fsdp_") else f"fsdp_{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            scalar = plain_scalar(value) if isinstance(value, str) else value
            yield above + name, int(scalar) if isinstance(scalar, float) and scalar.is_integer() else scalar


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format(key: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    return printable(f"{key}: {text if len(text) <= 60 else text[:57] + '...'}")


# -- several keys at once


def _finish_accelerate(draft: Draft) -> None:
    computed = draft.result.get(_COMPUTES_IN)
    if str(draft.original.get("distributed_type")).upper() == "FSDP" and computed:
        draft.put("parallel.mp_policy.reduce_dtype", computed, "FSDP reduces in the dtype of mixed_precision")
    if "deepspeed_config.zero_stage" in draft.original and "deepspeed_config.gradient_clipping" not in draft.original:
        draft.put("train.clip_grad_norm", None, "DeepSpeed's default")
    if "size" not in str(draft.original.get("fsdp_config.fsdp_auto_wrap_policy")).lower():
        draft.drop("parallel.auto_wrap_policy.by_size", "only with SIZE_BASED_WRAP")
    if draft.result.get("parallel.dp_replicate", 1) > 1 and draft.result.get("parallel.dp_shard", 1) > 1:
        _make_hybrid(draft, "two sizes of data parallelism")
    elif draft.result.get("parallel.strategy") in {"hsdp", "hybrid_shard_grad_op"}:
        machines, count = draft.original.get("num_machines", 1), draft.original.get("num_processes")
        if machines > 1:
            draft.put("parallel.dp_replicate", machines, "one group for each of num_machines")
        elif count:
            draft.put("parallel.dp_shard", count, "num_processes of one machine")


def _make_hybrid(draft: Draft, reason: str) -> None:
    keeps_parameters = draft.result.get("parallel.strategy") == "shard_grad_op"
    draft.put("parallel.strategy", "hybrid_shard_grad_op" if keeps_parameters else "hsdp", reason)


def _finish_deepspeed(draft: Draft) -> None:
    original = {key.removeprefix("optimizer.params."): value for key, value in draft.original.items()}
    if "parallel.dp_shard" in draft.result:
        _make_hybrid(draft, "mics_shard_size")
    name = draft.result.get("optimizer.name")
    if str(original.get("optimizer.type")).lower() == "adam" and original.get("adam_w_mode") is False:
        draft.put("optimizer.name", "adam", "adam_w_mode: false")
    for key, value in _DEEPSPEED_OPTIMIZERS.get(str(name), {}).items():
        if key not in original and f"optimizer.{key}" not in draft.result:
            draft.put(f"optimizer.{key}", value, "DeepSpeed's default")
    if name == "muon" and "adam_lr" not in original and original.get("lr") != "auto":
        draft.put("optimizer.adamw_lr", original.get("lr", 3e-4), "DeepSpeed's default of adam_lr")
    if not original.get("torch_autocast.enabled") and "torch_autocast" in draft.why.get(_COMPUTES_IN, [""])[-1]:
        draft.drop(_COMPUTES_IN, "off: torch_autocast.enabled is false")
    train = [f"train.{key}" for key in ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")]
    if all(key in draft.result for key in train):
        draft.drop(train[2], "micro batch x accumulation x ranks")
    _finish_schedule(draft)
    lowest = {"linear": 0.0, "cosine": 0.0001}.get(draft.result.get("schedule.name", ""))
    if lowest is not None and "schedule.min_lr_ratio" not in draft.result:
        draft.put("schedule.min_lr_ratio", lowest, "DeepSpeed's default")
    if lowest is None:
        draft.drop("schedule.min_lr_ratio", "the schedule has no end rate")


def _finish_schedule(draft: Draft) -> None:
    """Apply defaults of DeepSpeed's schedules: 1,000 warm-up steps, logarithmic, to a learning rate of 0.001."""
    params, name = "scheduler.params.", draft.result.get("schedule.name")
    if name is None:
        return
    if params + "warmup_num_steps" not in draft.original:
        draft.put("schedule.warmup_steps", 1000, "DeepSpeed's default")
    if name != "cosine" and params + "warmup_max_lr" not in draft.original:
        draft.put("optimizer.lr", 1e-3, "DeepSpeed's default of warmup_max_lr, whatever optimizer.params.lr is")
    if (steps := draft.result.get("schedule.warmup_steps")) and draft.original.get(params + "warmup_type") != "linear":
        reason = "linear, where DeepSpeed's rate rises by the logarithm unless warmup_type is linear"
        draft.put("schedule.warmup_steps", steps, reason)


def _finish_torchtitan(draft: Draft) -> None:
    result, original = draft.result, draft.original
    replicas, shards = result.get("parallel.dp_replicate", 1), result.get("parallel.dp_shard", -1)
    strategy = "zero3" if replicas == 1 else "hsdp"
    if shards == 1:
        strategy = "ddp"
    result["parallel.strategy"] = strategy
    draft.why["parallel.strategy"] = [
        f"data parallelism of {replicas} x {'the rest' if shards == -1 else shards} ranks"
    ]
    if result.get("parallel.tp", 1) > 1:
        draft.put("parallel.sequence_parallel", value=True, reason="torchtitan's tp divides positions too")
    if "optimizer.betas" in result:
        result["optimizer.betas"] = [original.get("optimizer.beta1", 0.9), original.get("optimizer.beta2", 0.95)]
    if result.get("optimizer.in_backward"):
        draft.put("train.clip_grad_norm", None, "early_step_in_backward")
    if (ratio := result.get("schedule.decay_steps")) is not None:
        steps, warmup = result["train.steps"], result["schedule.warmup_steps"]
        result["schedule.decay_steps"] = max(1, min(round(steps * ratio), steps - warmup))
        draft.put("schedule.name", "warmup-stable-decay", "decay_ratio")
    if not result["checkpoint.final"]:
        for key in ("every", "keep", "asynchronous"):
            draft.drop(f"checkpoint.{key}", "off: checkpoint.enable is false")
    elif "checkpoint.every" not in result:
        draft.put("checkpoint.every", 500, "torchtitan's default")
    if not (original.get("validation.enable") or original.get("validation.enabled")):
        draft.drop("train.eval_batches", "off: validation.enable is false")
        result["train.eval_every"] = None
    _divide_batch(draft)


def _divide_batch(draft: Draft) -> None:
    """Set the microbatch size. With a pipeline, torchtitan's microbatches of the local batch become accumulation."""
    local = draft.original.get("training.local_batch_size", draft.original.get("training.batch_size", 8))
    micro = draft.original.get("parallelism.pipeline_parallel_microbatch_size", 1)
    if draft.result.get("parallel.pp", 1) == 1:
        draft.drop("parallel.pipeline.schedule", "only with a pipeline")
        draft.result["train.micro_batch_size"] = local
        return
    draft.put("train.micro_batch_size", micro, "a microbatch of the pipeline")
    if "train.global_batch_size" not in draft.result:
        reason = f"{local} samples in microbatches of {micro}"
        draft.put("train.gradient_accumulation_steps", max(1, local // micro), reason)


_FINISH: dict[str, Callable[[Draft], None]] = {
    "Accelerate": _finish_accelerate,
    "DeepSpeed": _finish_deepspeed,
    "torchtitan": _finish_torchtitan,
}


def _finish(draft: Draft, file: Path) -> None:
    """Apply the rules common to all projects. Options that do not combine here are left out, with a note."""
    if "parallel.mp_policy.reduce_dtype" in draft.result and _COMPUTES_IN not in draft.result:
        draft.put(_COMPUTES_IN, None, "no dtype to compute in is given")
    steps, warmup = draft.result.get("train.steps", 1000), draft.result.get("schedule.warmup_steps", 0)
    if warmup > steps:
        draft.put("train.steps", 10 * warmup, f"a stand-in: {warmup} warm-up steps do not fit in {steps}")
    plan = draft.parallel()
    without = {key: value for key, value in plan.items() if key != "activation_checkpointing"}
    recomputes_twice = plan.get("compile") and plan.get("activation_checkpointing") == "selective"
    if recomputes_twice and _problem(without) is None:
        reason = "left out: a compiled unit keeps products and attention, and recomputes the rest by itself"
        draft.drop("parallel.activation_checkpointing", reason)
    while (problem := _problem(plan := draft.parallel())) is not None:
        each = {name: {key: plan[key] for key in plan if key != name} for name in _OPTIONAL if name in plan}
        helps = [name for name, others in each.items() if _problem(others) != problem]
        if not helps:
            raise ConfigError(
                f"{printable(file)} asks for a plan that is refused here: {problem}\n"
                "  Change it there and convert it again, or start from `shardwise plan`."
            )
        draft.drop(f"parallel.{helps[0]}", f"left out: {problem}")


def _problem(plan: Mapping[str, Any]) -> str | None:
    from shardwise.spec.plan import ParallelPlan, check_plan

    try:
        check_plan(ParallelPlan(**plan))
    except ShardwiseError as error:
        return first_line(error)
    return None


def _put_model_and_data(draft: Draft, model: str | None, data: str | None) -> None:
    """Set model and data, which the other projects' files do not name: the given ones, or placeholders."""
    from shardwise.spec.shape.gpt import PRESETS

    result, length = draft.result, draft.result.pop("data.seq_len", None)
    if model is not None:
        draft.put("model.preset" if model in PRESETS else "model.hf", model, "--model")
    else:
        draft.put(
            "model.preset", "gpt-tiny", "A STAND-IN: write `hf: FOLDER` of your model instead, or convert --model"
        )
        sizes = {"seq_len": length, "num_heads": _above(result, 4, "tp", "cp"), "num_layers": _above(result, 6, "pp")}
        for name in [name for name, size in sizes.items() if size]:
            draft.put(f"model.{name}", sizes[name], "of the stand-in")
    reason = "--data" if data else "A STAND-IN, random tokens: name your data, or convert --data PATH"
    draft.put("data.source", data or "random", reason)
    if length is not None:
        result["data.seq_len"] = length


def _above(result: Mapping[str, Any], default: int, *axes: str) -> int | None:
    """Number of heads or layers of the placeholder, if degrees need more: a head per rank, or two stages per rank."""
    needed = 2 if axes == ("pp",) else 1
    for axis in axes:
        needed *= result.get(f"parallel.{axis}", 1)
    return needed if needed > default or default % needed else None


# -- the text


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values nested by section, key and, for policies, field."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        target = result
        for name in above:
            target = target.setdefault(name, {})
        target[last] = value
    return result


def _text(draft: Draft, kind: str, file: Path) -> str:
    from shardwise.train.config.sections import Config

    sections = _nest(draft.result)
    names = [name for name in Config.model_fields if name not in {"name", "lora"}]
    lines = [f"# {printable(file.name)}, a configuration of {kind}, converted by `shardwise convert`."]
    count, machines = draft.original.get("num_processes"), draft.original.get("num_machines") or 1
    if isinstance(count, int) and count > 0:
        nodes = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
        lines.append(f"# start: torchrun {nodes}--nproc-per-node {count // machines} -m shardwise train THIS_FILE")
    lines += ["# Keys that are not here have the defaults of `shardwise train`; `shardwise validate` prints them."]
    if others := [name for name in names if name not in sections]:
        lines.append(f"# The file says nothing of {', '.join(others)}.")
    for name in [name for name in names if name in sections]:
        lines += ["", f"{name}:", *_entries(sections[name], draft.why, name)]
    for group, title in _TITLES.items():
        lines += ["", f"# {title}:"] if draft.notes[group] else []
        for text, keys in draft.notes[group].items():
            lines += [*(f"#   {key}" for key in keys), f"#     -> {text}"]
    return "\n".join(lines) + "\n"


def _entries(values: Mapping[str, Any], why: Mapping[str, list[str]], above: str, depth: int = 1) -> Iterator[str]:
    import yaml

    for key, value in values.items():
        path = f"{above}.{key}"
        if isinstance(value, dict):
            yield f"{'  ' * depth}{key}:"
            yield from _entries(value, why, path, depth + 1)
            continue
        written = yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()
        reasons = "; ".join(why.get(path, []))
        yield f"{'  ' * depth}{key}: {written}" + (f"  # {reasons}" if reasons else "")
