"""The models that context parallelism supports, and its installation in them.

Causal language models of transformers call attention by a name in the model's configuration (``AttentionInterface``). A
model under ``cp`` has our name there, and the attention module stores its ring. transformers makes no masks, because it
has no mask function by that name.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.base import Comm
from shardwise.parallel.context.ring import Ring
from shardwise.parallel.context.root import IGNORED, GPTRoot, Root
from shardwise.spec.errors import PlanError, StateError

#: Attributes of modules with a dropout rate.
_RATES = ("dropout", "attention_dropout", "attn_dropout")


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot compute a part of a sequence. No communication."""
    name = type(model).__name__
    if not _is_gpt(model) and not is_causal_model(model):
        raise PlanError(
            "cp divides the sequences of our GPT, and of causal language models of transformers such as GPT-2, Llama"
            f" and Qwen3; {name} is none of them.\n"
            "  Set cp=1: dp_shard then takes the ranks, and activation_checkpointing='full' saves memory too."
        )
    for path, module in model.named_modules():
        rates = [module.p] if isinstance(module, nn.Dropout) else [getattr(module, rate, 0.0) for rate in _RATES]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise PlanError(
                f"cp: {path!r} of {name} has dropout. Ranks with different positions of one sequence would draw other"
                " masks than one process.\n  Build the model with every rate at 0 (our GPT: dropout=0; GPT-2:"
                " attn_pdrop=0, embd_pdrop=0, resid_pdrop=0), or set cp=1."
            )
    if not _is_gpt(model):
        check_config(model)


def divide_sequences(model: nn.Module, comm: Comm, *, multiple: int) -> str:
    """Make ``model`` compute only this rank's positions of the sequences that are passed to it.

    Returns:
        A line for a summary.
    """
    if _is_gpt(model):
        attentions = {path: module for path, module in model.named_modules() if hasattr(module, "attend")}
        for path, module in attentions.items():
            module.__dict__["attend"] = Ring(comm, path)
        model.__dict__["forward"] = GPTRoot(model, comm, multiple)
    else:
        attentions = attention_modules(model)
        before = use_rings(model, {path: Ring(comm, path) for path in attentions})
        model.__dict__["forward"] = CausalRoot(model, comm, multiple, before)
    return f"sequences: divided over cp={comm.size}, ring attention in {len(attentions)} modules"


def _is_gpt(model: nn.Module) -> bool:
    return type(model).__name__ == "GPT" and type(model).__module__.startswith("shardwise.")


#: The name of our attention in transformers' registry.
NAME = "shardwise_ring"

_RING = "_shardwise_ring"
#: Arguments with which a divided model may be called.
_KNOWN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
#: Allowed arguments that do not affect the division of a sequence, and arguments that must be off.
_NUMBERS = ("num_items_in_batch", "return_dict")
_FLAGS = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep")
#: Names of the argument for the key-value cache in transformers: since 5.24, and before.
CACHE_NAMES = ("cache", "past_key_values")
#: Arguments of attention that the ring does not support.
_UNSUPPORTED = ("softcap", "sliding_window", "s_aux", "position_bias", "cache")


def is_causal_model(model: nn.Module) -> bool:
    """Whether a model is of transformers, computes the next-token loss, and calls attention by name."""
    if "transformers" not in sys.modules or not getattr(model, "_supports_attention_backend", False):
        return False
    names = set(inspect.signature(type(model).forward).parameters)
    loss = getattr(model, "loss_function", None)
    return {"input_ids", "labels", "position_ids"} <= names and getattr(loss, "__name__", "") == "ForCausalLMLoss"


def check_config(model: nn.Module) -> None:
    """Refuse a model with a layer whose attention is not plain causal attention."""
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    modules = attention_modules(model)
    if kinds:
        why = f"its layers are of the kinds {', '.join(sorted(kinds))}"
    elif not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None) is not None:
        why = f"its attention has a sliding_window={config.sliding_window}"
    elif getattr(config, "attn_logit_softcapping", None) is not None:
        why = f"its scores are capped (attn_logit_softcapping={config.attn_logit_softcapping})"
    elif any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        why = "its attention has sinks"
    elif getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        why = "it attends to an encoder"
    elif getattr(config, "output_router_logits", False):
        why = "it adds a loss of its routers (output_router_logits)"
    elif len(modules) != config.num_hidden_layers or not all(m.is_causal for m in modules.values()):
        why = f"{len(modules)} causal attention modules were found in {config.num_hidden_layers} layers"
    else:
        return
    raise PlanError(
        f"cp: {type(model).__name__} is not served: {why}; a ring computes plain causal attention.\n"
        "  Set cp=1: dp_shard then takes the ranks, and activation_checkpointing='full' saves memory too."
    )


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that call attention by name, by path."""
    return {
        path: module for path, module in model.named_modules() if isinstance(getattr(module, "is_causal", None), bool)
    }


def use_rings(model: nn.Module, rings: dict[str, Ring]) -> str:
    """Make attention modules use ``rings``, by path; returns the name of the model's previous attention."""
    from transformers import AttentionInterface  # pyrefly: ignore[missing-import]

    AttentionInterface.register(NAME, _attend)
    for path, ring in rings.items():
        model.get_submodule(path).__dict__[_RING] = ring
    before = cast("Any", model).config._attn_implementation  # noqa: SLF001 - there is no public name
    cast("Any", model).set_attn_implementation(NAME)
    return before


@contextlib.contextmanager
def _without_rings(model: Any, attention: str) -> Iterator[None]:
    """Use the model's own attention inside, so that every rank computes full sequences, as one process does."""
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the registry's signature: (B, H, T, D) to (B, T, H, D)."""
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    unsupported += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * (dropout > 0)
    if unsupported or is_causal is False:
        raise StateError(
            f"cp: {type(module).__name__} asks for attention with {', '.join(unsupported) or 'is_causal=False'}; a ring"
            " computes plain causal attention.\n  Set cp=1 for this model."
        )
    ring = module.__dict__.get(_RING)
    if ring is None:
        raise StateError(
            f"a {type(module).__name__} was built from the configuration of a model under cp, but is not under cp.\n"
            "  Build it from a configuration of its own (copy.deepcopy before sw.parallelize)."
        )
    y_BHTD = ring(query, key, value, scale=scaling)
    return y_BHTD.transpose(1, 2).contiguous(), None


class CausalRoot(Root):
    """The forward of a causal language model of transformers. With labels, the output has no logits."""

    def __init__(self, model: nn.Module, comm: Comm, multiple: int, attention: str) -> None:
        super().__init__(model, comm, multiple)
        self._attention = attention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, with the mean loss over full sequences, or all logits."""
        arguments = dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs
        arguments = {name: value for name, value in arguments.items() if value is not None}
        is_scored = bool(arguments.get("logits_to_keep")) and not torch.is_grad_enabled()
        if is_scored or arguments.get("use_cache") or any(name in arguments for name in CACHE_NAMES):
            if torch.is_grad_enabled() and not self.is_dry_run:
                raise StateError(
                    f"cp: {type(self.module).__name__} was called with a key-value cache in training.\n"
                    "  Leave use_cache and the cache out, or generate under torch.no_grad()."
                )
            with _without_rings(self.module, self._attention):
                return self.original(**arguments)
        self._check(arguments)
        next_BT = _next_tokens(arguments)
        _check_values(type(self.module).__name__, arguments, next_BT)
        division = self.divide(arguments["input_ids"], next_BT)
        own = division.own_positions
        call = {name: own(arguments[name]) for name in ("input_ids", "token_type_ids") if name in arguments}
        positions_BT = arguments.get("position_ids")
        call["position_ids"] = division.positions_T[None] if positions_BT is None else own(positions_BT)
        call |= {"use_cache": False} | {name: arguments[name] for name in ("return_dict",) if name in arguments}
        if next_BT is None or "labels" not in arguments:
            return _with_value(self.original(**call), "logits", lambda logits: division.join(logits, "logits"))
        own_BT = division.own_targets(next_BT)
        output = self.original(**call, labels=own_BT, shift_labels=own_BT)
        divisor = arguments.get("num_items_in_batch")
        output = _with_value(output, "loss", lambda loss: division.mean_loss(loss, own_BT, next_BT, divisor))
        if isinstance(output, tuple):
            return output[:1]
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    def _check(self, arguments: dict[str, Any]) -> None:
        name = type(self.module).__name__
        unknown = [key for key in arguments if key not in {*_KNOWN, *_NUMBERS, *_FLAGS}]
        unknown += [key for key in _FLAGS if isinstance(arguments.get(key), Tensor) or arguments.get(key)]
        if unknown or "input_ids" not in arguments:
            what = ", ".join(unknown) if unknown else "no input_ids"
            raise StateError(
                f"cp: {name} was called with {what}; it is not known what that means for a part of a sequence.\n"
                f"  Call it with {', '.join(_KNOWN)} only."
            )


def _next_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Return the label of the token after each position, shifted over the full sequence as transformers does."""
    if "shift_labels" in arguments:
        return arguments["shift_labels"]
    labels = arguments.get("labels")
    return None if labels is None else F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def _check_values(name: str, arguments: dict[str, Any], next_BT: Tensor | None) -> None:
    """Refuse packed sequences, and masks of tokens other than unlabeled padding at the end. The host waits once."""
    positions, mask_BT = arguments.get("position_ids"), arguments.get("attention_mask")
    if positions is None and mask_BT is None:
        return
    is_packed = is_hiding = torch.zeros((), dtype=torch.bool, device=arguments["input_ids"].device)
    if positions is not None:
        is_packed = (positions.diff(dim=-1) != 1).any()
    if mask_BT is not None and mask_BT.dim() != 2:
        is_hiding = ~is_hiding
    elif mask_BT is not None:
        is_hidden = mask_BT == 0
        is_hiding = (is_hidden[:, :-1] & ~is_hidden[:, 1:]).any()
        if next_BT is not None:
            is_hiding = is_hiding | (is_hidden & (next_BT != IGNORED)).any()
    found = torch.stack([is_packed, is_hiding])
    packed, hiding = (False, False) if found.is_meta else found.tolist()
    if packed:
        raise StateError(
            f"cp: {name} was called with position_ids that do not go up by one: sequences packed into one row would"
            " attend to each other.\n  Leave position_ids out, or set cp=1."
        )
    if hiding:
        raise StateError(
            "cp: attention_mask hides other tokens than padding at the end of a row whose labels are -100.\n"
            "  Pad on the right, with labels of -100; or set cp=1."
        )


def _with_value(output: Any, name: str, change: Any) -> Any:
    """Return ``output`` with its loss or logits (the first value) changed."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    output[name] = change(output[name])
    return output
