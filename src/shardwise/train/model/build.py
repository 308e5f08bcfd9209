"""Builds model, objective and optimizer from a configuration."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import shardwise as sw
from shardwise import torch_private
from shardwise.checkpoint.weights import WeightFiles
from shardwise.engine.storage.attachment import attachment_of
from shardwise.engine.storage.flat_parameters import group_of
from shardwise.parallel.pipeline.batch import arguments_of, call_model, scalar_loss
from shardwise.parallel.tensor.loss import has_divided_logits
from shardwise.spec.errors import ConfigError, StateError
from shardwise.spec.text import first_line
from shardwise.train.config.resolve import RunConfig, data_of
from shardwise.train.config.sections import LoraSection, OptimizerSection
from shardwise.train.data.rows import Samples
from shardwise.train.data.source import is_indexed, is_loader
from shardwise.train.data.user_data import UserSamples
from shardwise.train.model.lora import adapt, rename_files
from shardwise.train.model.pretrained import NotNamedError, deferred_from_folder, model_from_folder, warn_of_full_load
from shardwise.train.spec import Mean, accepts
from shardwise.train.task import ANSWER, CAUSAL, CLASS, Task

OptimizerFactory = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
#: Key for the peak learning rate in a group of a user's optimizer; torch's schedulers use the same key.
PEAK = "initial_lr"


class TokenBatch(NamedTuple):
    """A microbatch."""

    inputs: Tensor  # (B, T), int64
    targets: Tensor  # (B, T), int64; -100 for tokens that are not learned
    positions: Tensor | None = None  # (B, T), int64, if a row has several separate documents; else ``None``
    #: Divisor of the sum of this microbatch's losses, chosen so that the mean over microbatches and ranks equals the
    #: mean
    #: over all learned tokens of the step; ``None``: all tokens are learned
    num_targets: float | None = None
    mask: Tensor | None = None  # (B, T), int64, 0 for padding; ``None``: no padding


def build_model(resolved: RunConfig, device: torch.device) -> nn.Module:
    """Build the full model on ``device``, with weights from its folder or from the current random state."""
    section, lora = resolved.config.model, resolved.config.lora
    if resolved.spec.model is not None:
        try:
            with device:
                return resolved.spec.model()
        except RuntimeError:
            if device.type != "meta":
                raise
            return sw.deferred_init(lambda: build_model(resolved, torch.device("cpu")))  # from_pretrained refuses meta
    if section.hf is not None:
        folder = Path(section.hf).expanduser()
        model = model_from_folder(folder, reads_weights=device.type != "meta")
        if lora.is_used:
            model = adapt(model, lora, folder, draws=device.type != "meta")
        model = _with_loss(resolved, model)
        return model if device.type == "cpu" else model.to(device)  # fake tensors cannot be moved
    from shardwise.models import gpt

    return _with_loss(resolved, gpt(section.preset or "gpt-tiny", device=device, **section.overrides))


def _with_loss(resolved: RunConfig, model: nn.Module) -> nn.Module:
    """Return the model with chunked cross-entropy if the run uses it."""
    if not resolved.config.train.chunked_cross_entropy:
        return model
    try:
        return sw.chunk_cross_entropy(model)
    except StateError as error:
        raise ConfigError(f"train.chunked_cross_entropy: {error}") from None


def defer_model(resolved: RunConfig, device: torch.device) -> tuple[nn.Module, WeightFiles | None]:
    """Return the model on meta and the files of its weights, for ``sw.parallelize(init=)``.

    Every rank then initializes or reads only the values that it owns, equal to those of :func:`build_model` on the CPU
    under the same random state. The files are ``None`` if weights are initialized. Files that transformers rearranges
    at loading are loaded in full on every rank; this is printed.
    """
    section, lora, generator = resolved.config.model, resolved.config.lora, torch.get_rng_state()
    if section.hf is None:
        return sw.deferred_init(lambda: build_model(resolved, torch.device("cpu"))), None
    try:
        model, files = _deferred_hf(Path(section.hf).expanduser(), lora, device)
        return _with_loss(resolved, model), files
    except NotNamedError as error:
        warn_of_full_load(f"model.hf={section.hf}", error)
        torch.set_rng_state(generator)
        return build_model(resolved, device), None


def _deferred_hf(folder: Path, lora: LoraSection, device: torch.device) -> tuple[nn.Module, WeightFiles | None]:
    """Return a folder's model on meta; adapters, which are trained, are on ``device``."""
    model, files = deferred_from_folder(folder)
    if not lora.is_used:
        return model, files
    if files is None:
        raise NotNamedError("an adapter is put beside weights, and the folder has none")
    before = dict(model.named_parameters(remove_duplicate=False))
    model = adapt(model, lora, folder)
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    return model, rename_files(files, before, model)


@dataclass(frozen=True, slots=True)
class Objective:
    """The call of a model with a batch, and the loss of its output, as for ``sw.train_step``."""

    forward: Callable[[nn.Module, Any], Any]  # returns the model's output
    #: Returns the mean loss over tokens from the output and the microbatch
    loss_fn: Callable[[Any, Any], Tensor | Mean]

    def scalar(self, output: Any, batch: Any) -> Tensor:
        """Return the loss; of an ``sw.Mean`` its sum."""
        found = self.loss_fn(output, batch)
        return found.total if isinstance(found, Mean) else found

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a plain model."""
        return self.scalar(self.forward(model, batch), batch)


def objective(
    *, is_from_hf: bool, cp: int, task: Task = CAUSAL, in_chunks: bool = False, reads_logits: bool = False
) -> Objective:
    """Return the objective. Our GPT computes the loss itself; a Hugging Face model's logits are compared in fp32.

    Under ``cp``, and under ``tp`` unless the caller ``reads_logits``, a Hugging Face model computes the loss itself,
    because otherwise every rank would gather all logits.
    """
    if in_chunks and is_from_hf:
        return Objective(_call_for_loss, lambda output, _batch: output.loss)
    if in_chunks:
        return Objective(lambda model, batch: model(batch.inputs, batch.targets), _shared_out)
    if not is_from_hf:
        return Objective(
            lambda model, batch: model(batch.inputs, batch.targets if batch.num_targets is None else None),
            lambda output, batch: output if batch.num_targets is None else _cross_entropy(output, batch),
        )
    if cp > 1:
        return Objective(_call_divided, lambda output, _batch: output.loss)
    if task.name == ANSWER:
        return Objective(_call_with_decoder, _loss_of_hf)
    return Objective(functools.partial(_call_hf, reads_logits=reads_logits), _loss_of_hf)


def _call_divided(model: nn.Module, batch: TokenBatch) -> Any:
    """Call a model under ``cp`` for its loss. Padding is at the end of rows, so that no mask is needed."""
    number = batch.num_targets
    return model(input_ids=batch.inputs, labels=batch.targets, shift_labels=batch.targets, num_items_in_batch=number)


def _loss_of_hf(output: Any, batch: TokenBatch) -> Tensor:
    """Return the model's own loss if :func:`_call_hf` requested it, else cross-entropy of its logits."""
    loss = getattr(output, "loss", None)
    return _cross_entropy(output.logits, batch) if loss is None else loss


def _shared_out(mean: Tensor, batch: TokenBatch) -> Tensor:
    """Scale a microbatch's mean loss by its share of the step's learned tokens."""
    return mean if batch.num_targets is None else mean * (batch.targets != -100).sum() / batch.num_targets


def _call_for_loss(model: nn.Module, batch: TokenBatch) -> Any:
    """Call the model so that it computes the loss inside its forward."""
    arguments = {"attention_mask": batch.mask, "position_ids": batch.positions}
    return model(
        input_ids=batch.inputs,
        labels=batch.targets,
        shift_labels=batch.targets,
        num_items_in_batch=batch.num_targets,
        use_cache=False,
        **{name: value for name, value in arguments.items() if value is not None},
    )


def _call_hf(model: nn.Module, batch: TokenBatch, *, reads_logits: bool) -> Any:
    """Call a Hugging Face model. Without a mask, positions that restart at 0 separate the documents of a row.

    A mixture of experts that balances its load (``output_router_logits``) computes its loss with the routers' loss.
    """
    divides_logits = has_divided_logits(model) and not reads_logits
    if divides_logits or getattr(getattr(model, "config", None), "output_router_logits", False):
        return _call_for_loss(model, batch)
    arguments: dict[str, Any] = {"attention_mask": batch.mask, "position_ids": batch.positions}
    if "use_cache" in inspect.signature(type(model).forward).parameters:  # a cache would copy all keys and values
        arguments["use_cache"] = False
    return model(input_ids=batch.inputs, **{name: value for name, value in arguments.items() if value is not None})


def _call_with_decoder(model: Any, batch: TokenBatch) -> Any:
    """Call an encoder-decoder model with the answer shifted by one token; without labels it computes no loss."""
    return model(
        input_ids=batch.inputs,
        attention_mask=batch.mask,
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(batch.targets),
        use_cache=False,
    )


def _cross_entropy(logits: Tensor, batch: TokenBatch) -> Tensor:
    """Cross-entropy of logits (B, T, V) and targets (B, T), or (B, V) and (B,)."""
    logits, targets = logits.float().flatten(0, -2), batch.targets.flatten()
    if batch.num_targets is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / batch.num_targets


def objective_of(resolved: RunConfig) -> Objective:
    """Return the objective of a run, with the spec's forward and loss if it has them."""
    config, spec = resolved.config, resolved.spec
    if spec.data is not None:
        default = Objective(_call_own, _own_loss)
    elif spec.model is not None or (config.model.hf is None and (spec.loss is not None or spec.metrics)):
        default = Objective(lambda model, batch: model(batch.inputs), _of_logits)
    else:
        in_chunks = config.train.chunked_cross_entropy
        is_from_hf, cp = config.model.hf is not None, config.parallel.cp
        reads_logits = spec.loss is not None or bool(spec.metrics)
        default = objective(
            is_from_hf=is_from_hf, cp=cp, task=resolved.task, in_chunks=in_chunks, reads_logits=reads_logits
        )
    loss = None if spec.loss is None else functools.partial(_call_loss, spec.loss)
    return Objective(spec.forward or default.forward, loss or default.loss_fn)


def _call_own(model: nn.Module, batch: Any) -> Any:
    """Call a spec's model with a batch as ``call_model`` does; say what to write where it takes other arguments."""
    try:
        return call_model(model, batch)
    except TypeError:
        (args, kwargs), forward = arguments_of(batch), types.MethodType(type(model).forward, model)
        if accepts(forward, *args, **kwargs):
            raise
        names = ", ".join([f"batch[{index}]" for index in range(len(args))] + [f"{key}=..." for key in kwargs])
        first = "batch[0]" if args else f"batch[{next(iter(kwargs), 'x')!r}]"
        raise ConfigError(
            f"{type(model).__name__} is called with all of a batch, as model({names}), but takes"
            f" {inspect.signature(forward)}.\n"
            f"  Say what it gets: sw.TrainSpec(..., forward=lambda model, batch: model({first}))."
        ) from None


def _call_loss(loss: Callable[[Any, Any], Any], output: Any, batch: Any) -> Any:
    """Call a spec's loss; say what to write where it is one of torch's, which take tensors and no batch."""
    try:
        return loss(output, batch)
    except (AttributeError, TypeError) as error:
        if isinstance(batch, Tensor) or not str(getattr(loss, "__module__", "")).startswith("torch.nn"):
            raise
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ConfigError(
            f"the loss of the spec, torch's {name}, is called with the output and all of a batch, a"
            f" {type(batch).__name__}: {first_line(error)}\n"
            "  Say what it gets: sw.TrainSpec(..., loss=lambda output, batch: criterion(output, batch[1]))."
        ) from error


def _of_logits(output: Any, batch: TokenBatch) -> Tensor:
    """Cross-entropy of a model's output, which is logits or has an attribute ``logits``."""
    return _cross_entropy(getattr(output, "logits", output), batch)


def _own_loss(output: Any, _batch: Any) -> Tensor:
    """Return the loss that a model computes itself: ``output.loss``, else an output without dimensions."""
    return scalar_loss(getattr(output, "loss", output), "the model", "Give sw.TrainSpec(loss=...)")


def parameter_groups(section: OptimizerSection, model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, with weight decay only for ``p.dim() >= 2``; of a parallelized model as flat tensors if set.

    For Muon, return the groups of ``sw.muon_groups``.
    """
    if section.name == "muon":
        return sw.muon_groups(
            model,
            lr=section.lr,
            adamw_lr=section.adamw_lr or section.lr,
            weight_decay=section.weight_decay,
            betas=section.betas or (0.9, 0.95),
            eps=section.eps or 1e-8,
            fused=section.fused_weights,
            adamw=section.adamw_weights or (),
            momentum=0.95 if section.momentum is None else section.momentum,
            ns_steps=section.ns_steps or 5,
            adjust_lr_fn=section.adjust_lr or "match_rms_adamw",
        )
    if section.flat and attachment_of(model) is not None:
        return sw.flat_parameters(model, decay=lambda _, p: p.dim() >= 2)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def num_states(section: OptimizerSection, factory: OptimizerFactory) -> float:
    """Return the state tensors per matrix of a spec's optimizer, measured in a step of a small one; 2 if that fails."""
    matrix, vector = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))
    matrix.grad, vector.grad = torch.zeros(64, 64), torch.zeros(64)
    try:
        optimizer = build_optimizer(section, [{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}], factory)
        optimizer.step()
    except Exception:  # noqa: BLE001 - the user's code may need more than this
        return 2
    states = [each for each in tree_leaves(optimizer.state[matrix]) if isinstance(each, Tensor) and each.dim()]
    return sum(each.nbytes for each in states) / matrix.nbytes


def nothing_to_train(who: str) -> ConfigError:
    """Make the error for ranks whose stages have no adapter; ``who`` names them."""
    return ConfigError(
        f"{who} would have nothing to train: no adapter lies in its stage.\n"
        "  Lower parallel.pp, or give more layers an adapter (lora.targets)."
    )


def build_optimizer(
    section: OptimizerSection, groups: Iterable[Any], factory: OptimizerFactory | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer over :func:`parameter_groups`: with ``factory``, else by the section's name."""
    decay, groups = section.weight_decay, list(groups)
    if not groups:
        raise nothing_to_train("this rank")
    if factory is not None:
        built = factory([{"weight_decay": decay, **group} for group in groups], section.lr)
        if not isinstance(built, torch.optim.Optimizer):
            raise ConfigError(
                f"TrainSpec(optimizer=...) returned {type(built).__name__}, expected a torch.optim.Optimizer.\n"
                "  Return the optimizer of the groups that it was given; a schedule is TrainSpec(schedule=...)."
            )
        closure = inspect.signature(built.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"TrainSpec(optimizer=...) returned {type(built).__name__}, whose step() needs a closure.\n"
                '  Write a loop of your own, with sw.Run(..., checkpoint={"final": False}).'
            )
        for group in built.param_groups:
            group.setdefault(PEAK, float(group["lr"]))
        return built
    if section.name == "muon":
        return sw.Muon(groups)
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum or 0.0, weight_decay=decay)
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    betas, eps = section.betas or (0.9, 0.95), section.eps or 1e-8
    if section.name == "adamw8bit":
        adamw8bit = importlib.import_module("torchao.optim").AdamW8bit
        return adamw8bit(groups, lr=section.lr, betas=betas, eps=eps, weight_decay=decay)
    parameters = [parameter for group in groups for parameter in group["params"]]
    on_host = [parameter for parameter in parameters if _is_offloaded(parameter)]
    # One kernel reads and writes everything once: on a GPU see train.update, on the host python -m bench.host_adamw.
    is_fused = all(parameter.is_cuda or _is_offloaded(parameter) for parameter in parameters) or None
    optimizer = kind(groups, lr=section.lr, betas=betas, eps=eps, weight_decay=decay, fused=is_fused)
    if on_host:
        torch_private.read_scale_on_host(optimizer)
    return optimizer


def for_dry_run(
    resolved: RunConfig,
) -> tuple[Callable[[], nn.Module], Callable[[Iterable[Any]], torch.optim.Optimizer]]:
    """Return functions for ``sw.dry_run`` that build the model, and then its optimizer."""
    section = resolved.config.optimizer
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built[:] = [build_model(resolved, torch.device("meta"))]
        return built[0]

    def make_optimizer(_parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return build_optimizer(section, parameter_groups(section, built.pop()), resolved.spec.optimizer)

    return build, make_optimizer


def _is_offloaded(parameter: Tensor) -> bool:
    group = group_of(parameter)
    return group is not None and group.facts.is_offloaded and parameter.device.type == "cpu"


def peak_lr(section: OptimizerSection, group: Mapping[str, Any]) -> float:
    """Return the peak learning rate of one of the optimizer's groups."""
    if PEAK in group:
        return group[PEAK]
    return section.adamw_lr or section.lr if group.get("kind") == "adamw" else section.lr


def set_lr(optimizer: torch.optim.Optimizer, section: OptimizerSection, ratio: float) -> None:
    """Set the learning rates of the next step: ``ratio`` times the peak of each group."""
    for group in optimizer.param_groups:
        lr = peak_lr(section, group) * ratio
        if isinstance(group["lr"], Tensor):  # in a compiled optimizer
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def to_tensors(
    part: Samples, samples: Sequence[int], device: torch.device, num_targets: float | None = None
) -> TokenBatch:
    """Return a microbatch of samples on ``device``."""
    tensors = [None if rows is None else torch.from_numpy(rows) for rows in part.rows(samples)]
    if device.type == "cuda":
        tensors = [None if rows is None else rows.pin_memory().to(device, non_blocking=True) for rows in tensors]
    inputs_BT, targets_BT, positions_BT, mask_BT = (None if rows is None else rows.contiguous() for rows in tensors)
    assert inputs_BT is not None
    assert targets_BT is not None
    return TokenBatch(inputs_BT, targets_BT, positions_BT, num_targets, mask_BT)


def blank_batch(resolved: RunConfig, device: torch.device, *, reads_iterables: bool = False) -> Any:
    """Return a microbatch with the run's shapes and arbitrary values; of a user's data set or loader its first samples.

    ``reads_iterables`` also allows reading an iterable, whose position then advances: only if no training follows.
    """
    if resolved.spec.data is not None:
        part = data_of(resolved).train
        if not isinstance(part, UserSamples):
            raise TypeError("the spec's data gives no samples")
        if not (is_indexed(data := resolved.spec.data) or is_loader(data)):
            if not reads_iterables:
                raise TypeError("an iterable is not read before the run")
            part.data.for_reader(resolved.batch.micro, 1, 0, 1).next_step()
        return tree_map_only(
            Tensor, lambda t: t.to(device), part.batch(range(resolved.batch.micro), torch.device("cpu"))
        )
    tokens_BT = torch.zeros(resolved.batch.micro, resolved.seq_len, dtype=torch.int64, device=device)
    task = resolved.task
    targets = torch.zeros_like(tokens_BT[:, 0] if task.name == CLASS else tokens_BT)
    return TokenBatch(tokens_BT, targets, mask=torch.ones_like(tokens_BT) if task.has_pairs else None)
