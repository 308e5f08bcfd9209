"""``plan``: rank the plans that fit by speed, and explain them. Uses torch only to ask for a GPU's name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.measured_run import read_fixed, rescale_cluster
from shardwise.cli.output import CONFIG_ENDINGS, check_writable, show, write
from shardwise.spec.errors import ConfigError
from shardwise.spec.gc_pause import gc_paused
from shardwise.spec.text import did_you_mean

if TYPE_CHECKING:
    from shardwise.cost.hardware import Gpu
    from shardwise.planner import Cluster, Workload
    from shardwise.spec.shape import ModelShape
    from shardwise.spec.shape.gpt import GPTConfig

#: The model whose proportions (GPT-3's) ``--largest`` scales if none is named.
_LARGEST = "gpt-175b"

#: Tokens per GPU and step without ``--global-batch``.
_TOKENS_PER_GPU = 1 << 14


def plan(
    model: Annotated[
        str | None, typer.Argument(help="Well-known name, Hugging Face folder, config.json, or configuration.")
    ] = None,
    spec: Annotated[
        str | None, typer.Option(metavar="FILE[:NAME]|MODULE:NAME", help="Any model of your own: an sw.TrainSpec.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPU, or a file of `shardwise calibrate`; by default this machine's.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs in all; by default one node's.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of one node.")] = 8,
    network: Annotated[float | None, typer.Option(help="Gbit/s of a node's network; by default what is usual.")] = None,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; by default the model's, at most 2,048.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Sequences of a step over all GPUs; by default the configuration's, or 16,384 tokens a GPU."),
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Only microbatches of this many sequences.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="What products compute in: bf16, fp16, fp32; by default the first that the GPU has."),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw (default), adam, sgd, sgd-momentum, muon or adamw8bit.")
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(help="Train adapters of this rank on the linear layers of blocks (in a mixture, of attention)."),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="Only this strategy.")] = None,
    tp: Annotated[int | None, typer.Option(help="Only this many tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(help="Only this many pipeline ranks.")] = None,
    activation_checkpointing: Annotated[str | None, typer.Option(help="Only none, selective or full.")] = None,
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="Compute the loss in chunks (train.chunked_cross_entropy).")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Assume compiled units.")] = False,
    fix: Annotated[
        list[str] | None, typer.Option(help="field=value that every proposed plan must have; repeatable.")
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS/S[,FIELD=VALUE...]|FOLDER",
            help="Scale the predictions by a run of your own: its tokens/s over all GPUs and, unless it ran plan 1, its"
            " fields as for --fix, gpus, seq or global_batch; or the folder of a run of `train`. Once or twice.",
        ),
    ] = None,
    save_hardware: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write what --measured found, for --gpu and log.hardware.")
    ] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Print the largest model that each strategy can hold.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the best plan as a configuration for `train`.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write one page of HTML that compares the plans.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the best plan's simulated step as a Chrome trace, for ui.perfetto.dev.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Rank the plans for a model on a cluster: which fit, how fast they are, and why. Needs neither GPUs nor torch.

    MODEL is a well-known name (llama-3-8b, gpt-175b, ...), a Hugging Face folder or config.json, or a run
    configuration. Every proposed plan keeps what a configuration's parallel and train sections set.

    Examples:

      shardwise plan llama-3-8b --gpus 8 --gpu H100-80GB-SXM --seq 8192 --global-batch 64

      shardwise plan gpt-175b --gpus 128 --gpu A100-40GB-SXM --global-batch 1024 --fix strategy=zero3 --out plan.yaml

      shardwise plan llama-3-8b --gpus 8 --gpu H100-80GB-SXM --measured
      41000,strategy=zero3,micro_batch=1,recompute=full

      shardwise plan --largest --gpus 8 --gpu A100-40GB-SXM
    """
    from shardwise.cost.workload import OPTIMIZERS, Workload

    if lora is not None and lora < 1:
        raise ConfigError(f"--lora {lora}: expected a rank of at least 1.\n  Set for example --lora 16.")
    if measured and largest:
        raise ConfigError("--measured with --largest: no plan is the one that ran.\n  Leave one of the two out.")
    if spec is not None and largest:
        raise ConfigError("--largest with --spec: a traced model has no sizes to scale.\n  Leave one of the two out.")
    if save_hardware is not None and not measured:
        raise ConfigError(
            f"--save-hardware {save_hardware}: there is no measured run to take figures from.\n"
            "  Add for example --measured 41000."
        )
    check_writable(out)
    check_writable(report)
    check_writable(trace)
    check_writable(save_hardware)
    cluster = _cluster(gpu, gpus, gpus_per_node, network)
    subject = find_subject(model or _LARGEST if largest else model, spec)
    rank = subject.lora_rank if lora is None else lora
    if rank is not None and out is not None and "preset" in (subject.model or {}):
        raise ConfigError(
            f"--lora {rank} with --out: `train` puts adapters into Hugging Face models.\n  Leave --out out, or name the"
            " folder of one."
        )
    fixed = {**subject.fixed, **read_fixed(fix or [])}
    options = {
        "strategy": strategy,
        "tp": tp,
        "pp": pp,
        "recompute": activation_checkpointing,
        "micro_batch": micro_batch,
        "compile": compiled or None,
    }
    fixed |= {name: value for name, value in options.items() if value is not None}
    tokens = (subject.seq_len or min(subject.shape.seq_len, 2048)) if seq is None else seq
    _check_length(tokens, subject.shape)
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"--optimizer {optimizer}: expected {', '.join(OPTIMIZERS)}.\n  The states of others are not known."
        )
    workload = Workload(
        seq_len=tokens,
        global_batch=_first_given(global_batch, subject.global_batch, _default_batch(cluster.num_gpus, fixed, tokens)),
        precision=precision or subject.precision or _precision_of(cluster.device),
        optimizer=optimizer or subject.optimizer,
        compile=bool(fixed.get("compile", False)),
        lora_rank=rank,
        chunked_loss=chunked_loss or subject.chunked_loss,
        has_average=subject.has_average,
    )
    if largest:
        _show_largest(subject.shape, cluster, workload, fixed, is_json=json_output)
    else:
        files = {"out": out, "report": report, "trace": trace, "save_hardware": save_hardware}
        _show_plans(subject, cluster, workload, fixed, measured or [], is_json=json_output, **files)


def _precision_of(device: Gpu) -> str:
    """Return the default dtype of products: the first that the device has units for, or was calibrated with."""
    return next((name for name in ("bf16", "fp16") if name in device.peaks), "fp32")


def _default_batch(num_gpus: int, fixed: Mapping[str, Any], tokens: int) -> int:
    """Return the default sequences of a step: those of fixed microbatches as `train` counts them, else by tokens."""
    micro, accumulation = fixed.get("micro_batch"), fixed.get("accumulation_steps")
    if micro is None or accumulation is None:
        return num_gpus * _samples_of(tokens)
    return micro * accumulation * max(1, num_gpus // math.prod(fixed.get(axis, 1) for axis in ("tp", "pp", "cp")))


def _samples_of(tokens: int) -> int:
    """Return the default samples per GPU and step, a power of two; 8 for samples other than token sequences."""
    return 1 << max(0, round(math.log2(_TOKENS_PER_GPU / tokens))) if tokens > 1 else 8


def _show_plans(
    subject: Subject,
    cluster: Cluster,
    workload: Workload,
    fixed: dict[str, Any],
    measured: list[str],
    *,
    out: Path | None,
    report: Path | None,
    trace: Path | None,
    save_hardware: Path | None,
    is_json: bool,
) -> None:
    from shardwise.cli import plan_file
    from shardwise.planner import screen
    from shardwise.planner.estimate import simulated
    from shardwise.planner.explain import table_rows
    from shardwise.planner.fit import remedies
    from shardwise.planner.rescale import ranking
    from shardwise.planner.search import search
    from shardwise.report import plan_report
    from shardwise.sim.chrome import step_trace

    shape = subject.shape
    with gc_paused():
        plans = search(shape, cluster, workload, **fixed)
        lines: list[str] = []
        if measured:
            cluster, lines = rescale_cluster(measured, plans[0], workload, fixed)
            first, plans = plans[0], search(shape, cluster, workload, **fixed)
            lines.append(ranking(first, plans[0]))
        best = plans[0]
        found = [] if best.fits else remedies(shape, cluster, workload, fixed)
    if report is not None:
        write(report, plan_report(table_rows(plans), remedies=[remedy.change for remedy in found]))
    if trace is not None:
        write(trace, step_trace(simulated(best)))
    if save_hardware is not None:
        write(save_hardware, json.dumps(cluster.device.as_dict(), indent=1) + "\n")
    line = ""
    if best.fits and out is not None:
        line = plan_file.write_plan(out, best, subject.written(out), subject.base)
    elif best.fits and not shape.patch_numel and (workload.lora_rank is None or "preset" not in (subject.model or {})):
        line = f"next: add --out plan.yaml, then\n  {plan_file.command(best, 'plan.yaml')}"
    if is_json:
        content = screen.as_json(shape, cluster, workload, plans, found)
        content["command"] = plan_file.command(best, str(out or "plan.yaml")) if line else None
        content |= {"measured": {"speeds": dict(cluster.device.speeds), "lines": lines}} if lines else {}
        show(json.dumps(content, indent=1))
        return
    show(screen.screen(shape, cluster, workload, plans, found=found, command=line, measured=lines))


def _show_largest(
    shape: ModelShape, cluster: Cluster, workload: Workload, fixed: dict[str, Any], *, is_json: bool
) -> None:
    from shardwise.planner import screen
    from shardwise.planner.fit import largest
    from shardwise.planner.legal import STRATEGIES

    strategies = (fixed["strategy"],) if "strategy" in fixed else STRATEGIES[:5]
    with gc_paused():
        found = list(largest(shape, cluster, workload, strategies, fixed))
    if is_json:
        rows = [
            {
                "strategy": each.strategy,
                "saving": each.saving,
                "parameters": each.plan and each.plan.shape.num_parameters,
                "layers": each.plan and each.plan.shape.num_layers,
                "hidden": each.plan and each.plan.shape.hidden,
                "plan": each.plan and screen.plan_as_json(each.plan),
            }
            for each in found
        ]
        show(json.dumps(rows, indent=1))
        return
    show("\n".join(screen.largest_page(shape, cluster, workload, found)))


# -- the subject


@dataclass(frozen=True, slots=True)
class Subject:
    """The model to plan for, and settings of its configuration."""

    shape: ModelShape
    #: The ``model`` section of a configuration; ``None`` for a well-known model, of which only the sizes are known.
    model: dict[str, Any] | None = None
    config: dict[str, Any] | None = None  # the ``config.json`` of a well-known model
    base: dict[str, Any] | None = None  # the run configuration that was given
    fixed: dict[str, Any] = field(default_factory=dict)  # fields of a plan that the configuration sets
    seq_len: int | None = None  # tokens of a sequence in the configuration
    global_batch: int | None = None  # sequences of a step in the configuration
    precision: str | None = None  # dtype of products; ``None``: that of the GPU
    optimizer: str = "adamw"
    lora_rank: int | None = None  # rank of its adapters; ``None``: the model itself is trained
    chunked_loss: bool = False  # ``train.chunked_cross_entropy``
    has_average: bool = False  # ``train.ema_decay``

    def written(self, out: Path) -> dict[str, Any]:
        """Return the ``model`` section for a configuration at ``out``. Writes a well-known model's folder beside it."""
        from shardwise.cli.plan_file import write_model_folder

        if self.model is not None:
            return self.model
        folder = out.parent / self.shape.name
        write_model_folder(folder, self.config or {})
        return {"hf": str(folder.resolve())}


def find_subject(model: str | None, spec: str | None = None) -> Subject:
    """Find the subject that MODEL names: a model or a configuration file. MODEL may be missing if a spec is given."""
    from shardwise.spec.hf_cache import how_to_fetch, is_hub_name, local_folder
    from shardwise.spec.shape.gpt import PRESETS
    from shardwise.spec.shape.names import KNOWN, is_known, plain_name

    if spec is not None:
        if model is not None and not model.lower().endswith(CONFIG_ENDINGS):
            raise ConfigError(f"--spec {spec}: the spec brings the model.\n  Leave {model!r} out, or name a run.yaml.")
        return _from_file(None if model is None else local_folder(model), spec)
    if model is None:
        raise ConfigError(
            f"plan: no model was named.\n  Name one of {', '.join([*list(KNOWN)[:6], *PRESETS])}, ..., a folder with a"
            " config.json, or a run configuration."
        )
    path = local_folder(model)
    if model.lower().endswith(CONFIG_ENDINGS):
        return _from_file(path)
    if path.is_dir() or path.suffix == ".json":
        folder = path if path.is_dir() else path.parent
        return Subject(_shape(path), {"hf": str(folder.resolve())})
    if model in PRESETS:
        return Subject(_shape(model), {"preset": model})
    if is_known(model):
        return Subject(_shape(model), config=KNOWN[plain_name(model)])
    known = [*KNOWN, *PRESETS]
    hint = did_you_mean(plain_name(model), known) or f" Known are: {', '.join(known)}."
    other = f" ({how_to_fetch(model)})" if is_hub_name(model) else ""
    raise ConfigError(
        f"{model!r} is not a model that is known, and no file or folder that is there.\n {hint}\n"
        f"  Any other model: the path of its folder with a config.json, or its name on the Hugging Face hub{other}."
    )


def _shape(source: str | Path | GPTConfig) -> ModelShape:
    from shardwise.spec.shape import ModelShape

    return ModelShape.from_config(source)


#: Fields of the ``train`` section, and the fields of a plan that they fix.
_TRAIN = {"micro_batch_size": "micro_batch", "gradient_accumulation_steps": "accumulation_steps"}


def _from_file(path: Path | None, spec: str | None = None) -> Subject:
    from shardwise.spec.policies import PrecisionPolicy
    from shardwise.spec.precision import item_bytes
    from shardwise.spec.shape.gpt import gpt_config
    from shardwise.train.config.hf import stored_dtype
    from shardwise.train.config.sections import read_config
    from shardwise.train.predicted.workload import optimizer_of

    overrides = [] if spec is None else [f"spec={spec}"]
    raw = read_config(path, overrides, base=None if path is not None else {}, title="the spec's run")
    raw.raise_if_any()
    config, train, parallel = raw.config, raw.given_keys("train"), raw.given_keys("parallel")
    section = config.model
    stored = own_optimizer = None
    model: dict[str, Any]
    if config.spec is not None:
        from shardwise.train.config.resolve import resolve
        from shardwise.train.predicted.workload import trace_model

        resolved = resolve(raw, 1)
        own_optimizer = resolved.spec.optimizer
        shape, model = trace_model(resolved, reads_iterables=True), dict(raw.document.values.get("model") or {})
    elif section.hf is not None:
        folder = Path(section.hf).expanduser()
        shape, stored = _shape(folder), stored_dtype(folder)
        model = {"hf": section.hf}
    else:
        preset = section.preset or "gpt-tiny"
        shape = _shape(gpt_config(preset, **section.overrides))
        model = {"preset": preset, **section.overrides}
    fixed = {name: getattr(config.parallel, name) for name in parallel}
    if fixed.get("dp_shard") == -1:
        del fixed["dp_shard"]
    fixed |= {
        meant: getattr(config.train, name)
        for name, meant in _TRAIN.items()
        if name in train and getattr(config.train, name)
    }
    if "in_backward" in raw.given_keys("optimizer"):
        fixed["in_backward"] = config.optimizer.in_backward
    policy = PrecisionPolicy.parse(fixed["mp_policy"]).param_dtype if fixed.get("mp_policy") else None
    unsaid = "auto" if path is None else "fp32"  # a spec alone leaves the dtype to the plan, as a model's name does
    computed = policy or (stored if stored is not None and item_bytes(stored) == 2 else unsaid)
    return Subject(
        shape,
        model,
        base=raw.document.values,
        fixed=fixed,
        seq_len=config.data.seq_len or (shape.seq_len or 1 if config.spec is not None else None),
        global_batch=config.train.global_batch_size,
        precision=None if computed == "auto" else str(computed),
        optimizer=optimizer_of(config.optimizer, own_optimizer),
        lora_rank=config.lora.rank,
        chunked_loss=config.train.chunked_cross_entropy,
        has_average=config.train.ema_decay is not None,
    )


def _first_given(*values: int | None) -> int:
    """Return the first value that is not ``None``."""
    return next(value for value in values if value is not None)


def _check_length(tokens: int, shape: ModelShape) -> None:
    from shardwise.planner.estimate import check_positions

    if tokens < 1:
        raise ConfigError(
            f"--seq {tokens}: expected a whole number of at least 1.\n  Set --seq {shape.seq_len} or less."
        )
    check_positions(shape, tokens, f"--seq {tokens}", "--seq ")


# -- the cluster


def _cluster(gpu: str | None, num_gpus: int | None, per_node: int, network: float | None) -> Cluster:
    from shardwise.cost.hardware import Cluster

    numbers = {"--gpus": (num_gpus, 8), "--gpus-per-node": (per_node, 8), "--network": (network, 400)}
    for name, (number, default) in numbers.items():
        if number is not None and number <= 0:
            raise ConfigError(f"{name} {number}: expected a number above 0.\n  Set for example {name} {default}.")
    if num_gpus is not None and num_gpus > per_node and num_gpus % per_node:
        below = num_gpus // per_node * per_node
        raise ConfigError(
            f"--gpus {num_gpus}: {num_gpus} GPUs do not fill nodes of {per_node}.\n"
            f"  Set --gpus {below} or {below + per_node}, or --gpus-per-node to a divisor of {num_gpus}."
        )
    num_devices = 0
    if gpu is None:
        gpu, num_devices = this_gpu()
    return Cluster(
        gpu=gpu,
        num_gpus=(num_devices or per_node) if num_gpus is None else num_gpus,
        gpus_per_node=per_node,
        inter_gbits_per_s_per_node=network,
    )


def this_gpu() -> tuple[str, int]:
    """Return the name of this machine's GPUs in the hardware table, and their number."""
    from shardwise.cost.hardware import gpu_of_device, gpus
    from shardwise.launch.process import num_gpus

    known = (
        f"  Name one with --gpu: {', '.join(gpus())}.\n  `shardwise calibrate` measures a machine that is not listed."
    )
    count = num_gpus()
    if not count:
        raise ConfigError(f"torch sees no GPU on this machine, and no --gpu was given.\n{known}")
    import torch

    name = torch.cuda.get_device_name(0)
    found = gpu_of_device(name)
    if found is None:
        raise ConfigError(f"the GPU of this machine, {name!r}, is not in the hardware table.\n{known}")
    return found.name, count
