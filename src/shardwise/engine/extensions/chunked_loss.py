"""Cross entropy from hidden states and the head's weight, by torch's ``linear_cross_entropy``, in chunks of positions.

The full logits never exist. When a model's forward has labels (or our GPT's targets), its head computes the loss in
place of logits, so the head's weight is gathered as for any forward. In fp32, forward also computes the gradients of
the head's weight and of the hidden states, which are stored until backward. In 16 bit the losses of the positions are
added in fp32, and backward computes the logits of each chunk again.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.models.transformer import GPT
from shardwise.parallel.tensor.loss import has_loss, without_logits
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.plan import ParallelPlan

#: Configuration fields that change logits between the head and the loss, each with the value that leaves them alone.
_BETWEEN = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "output_logit_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
}


@dataclass(frozen=True, slots=True)
class _LossInputs:
    """Targets (positions,) of the running forward, and the divisor of the sum of their losses; ``None``: a mean."""

    targets: Tensor
    ignored: int = -100
    num_items: Any = None


class _ChunkedHead(nn.Linear):
    """Mix-in of a head's class: computes the loss while ``loss_inputs`` is set, otherwise logits."""

    loss_inputs: _LossInputs | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name
        """Map hidden states (..., C) to logits (..., V), or to the loss, a scalar in fp32 or wider."""
        loss_inputs = self.loss_inputs
        if loss_inputs is None:
            return super().forward(input)
        hidden, weight, bias = input.flatten(0, -2), self.weight, self.bias
        kind = hidden.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # autocast does not know this function
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        is_narrow = hidden.dtype in {torch.float16, torch.bfloat16}
        reduction = "mean" if loss_inputs.num_items is None else "sum"
        loss = F.linear_cross_entropy(
            hidden,
            weight,
            loss_inputs.targets.to(hidden.device),
            linear_bias=bias,
            reduction="none" if is_narrow else reduction,
            ignore_index=loss_inputs.ignored,
            options=nn.LinearCrossEntropyOptions(),
        )
        if is_narrow:  # torch's mean or sum would be 16 bit: three digits, and fp16 overflows
            loss = loss.float().sum()
        num_items = loss_inputs.num_items
        if num_items is None and is_narrow:
            num_items = (loss_inputs.targets != loss_inputs.ignored).sum().to(loss.device)
        return loss if num_items is None else loss / num_items


def chunk_cross_entropy(model: nn.Module) -> nn.Module:
    """Make a causal language model compute its loss without storing all logits; before ``sw.parallelize``.

    Works for transformers models that are called with ``labels``, and for ``sw.models.gpt`` called with targets. Such a
    call returns the same loss up to rounding, and ``logits`` are ``None``; every other call is as before. Memory of a
    step falls by the logits, 8 to 12 bytes for each position and token id, and rises by a second gradient of the head's
    weight.

    Args:
        model: A model that is not parallelized yet, changed in place. It may have a peft adapter.

    Returns:
        The model.

    Raises:
        StateError: torch is older than 2.13, or the model does not compute its loss from its head's logits.
    """
    if not hasattr(F, "linear_cross_entropy"):
        raise StateError("chunked cross entropy needs torch 2.13.\n  Install it, or leave the option out.")
    causal_lm: Any = model
    plain = causal_lm.get_base_model() if hasattr(causal_lm, "get_base_model") else causal_lm
    if isinstance(plain, GPT):
        _install(plain, plain.lm_head, "targets")
        return model
    head = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
    config = getattr(plain, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    between = [name for name, usual in _BETWEEN.items() if getattr(config, name, usual) not in {usual, None}]
    if between or not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or not has_loss(plain):
        reason = f"its {between[0]} changes logits before the loss" if between else "its loss is not that of its head"
        raise StateError(
            f"{type(plain).__name__} cannot compute its loss in chunks: {reason}.\n  Leave the option out."
        )
    _install(plain, head, "labels")
    plain.__dict__["_loss_function"] = _return_logits  # read by the property ``loss_function``
    return model


def _return_logits(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:  # noqa: ARG001  transformers' names
    """Return ``logits``, which are the loss already."""
    return logits


def _install(model: nn.Module, head: nn.Linear, name: str) -> None:
    head.__class__ = type(f"Chunked{type(head).__name__}", (_ChunkedHead, type(head)), {})
    assert isinstance(head, _ChunkedHead)
    position = [*inspect.signature(type(model).forward).parameters].index(name) - 1

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = args[position] if len(args) > position else kwargs.get(name)
        head.loss_inputs = None if labels is None else _loss_inputs(labels, kwargs, shifts=name == "labels")

    def end(_module: nn.Module, _args: object, output: Any) -> Any:
        has_loss_only, head.loss_inputs = head.loss_inputs is not None, None
        is_model_output = output is not None and not isinstance(output, Tensor)
        return without_logits(output) if has_loss_only and is_model_output else None

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)


def _loss_inputs(labels: Tensor, kwargs: dict[str, Any], *, shifts: bool) -> _LossInputs:
    ignored, shifted = kwargs.get("ignore_index", -100), kwargs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:] if shifts else labels
    return _LossInputs(shifted.flatten().long(), ignored, kwargs.get("num_items_in_batch"))


def check_chunked(model: nn.Module, plan: ParallelPlan) -> None:
    """Refuse degrees that divide the head or its inputs over ranks.

    Raises:
        PlanError: The model computes its loss in chunks, and the plan has ``tp``, ``pp`` or ``cp``.
    """
    if any(isinstance(module, _ChunkedHead) for module in model.modules()):
        for name in ("tp", "pp", "cp"):
            if getattr(plan, name) > 1:
                hint = " tp divides logits by ids as it is." if name == "tp" else ""
                raise PlanError(
                    f"{name}={getattr(plan, name)} does not go with sw.chunk_cross_entropy.{hint}\n"
                    f"  Set {name}=1, or leave it out."
                )
