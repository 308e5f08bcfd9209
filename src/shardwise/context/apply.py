"""Which models context parallelism serves, and dividing them."""

from __future__ import annotations

from torch import nn

from shardwise.comm.base import Comm
from shardwise.context import causal
from shardwise.context.ring import Ring
from shardwise.context.root import GPTRoot
from shardwise.spec.errors import PlanError

#: Attributes of modules that hold a rate of dropout.
_RATES = ("dropout", "attention_dropout", "attn_dropout")


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot compute a part of a sequence. Talks to nobody.

    Raises:
        PlanError: It cannot.
    """
    name = type(model).__name__
    if not _is_gpt(model) and not causal.is_causal_model(model):
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
        causal.check_config(model)


def divide_sequences(model: nn.Module, comm: Comm, *, multiple: int = 1) -> str:
    """Have ``model`` compute this rank's positions of the sequences that it is given.

    Args:
        model: One that :func:`check_model` takes.
        comm: On ``cp``.
        multiple: What every rank's number of positions has to be a multiple of, besides being even.

    Returns:
        What a summary should say.
    """
    if _is_gpt(model):
        attentions = {path: module for path, module in model.named_modules() if hasattr(module, "attend")}
        for path, module in attentions.items():
            module.__dict__["attend"] = Ring(comm, path)
        model.__dict__["forward"] = GPTRoot(model, comm, multiple)
    else:
        attentions = causal.attention_modules(model)
        before = causal.use_rings(model, {path: Ring(comm, path) for path in attentions})
        model.__dict__["forward"] = causal.CausalRoot(model, comm, multiple, before)
    return f"sequences: divided over cp={comm.size}, ring attention in {len(attentions)} modules"


def _is_gpt(model: nn.Module) -> bool:
    return type(model).__name__ == "GPT" and type(model).__module__.startswith("shardwise.")
