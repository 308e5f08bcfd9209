"""Our own models: a GPT and its named sizes.

Importing this package does not import torch; :func:`gpt` does, when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.spec.shape.gpt import DEFAULT_EXPERTS_PER_TOKEN, PRESETS, GPTConfig, gpt_config

if TYPE_CHECKING:
    import torch

    from shardwise.models.transformer import GPT, Block

__all__ = ["GPT", "PRESETS", "Block", "GPTConfig", "gpt", "gpt_config"]


def gpt(
    preset: str | GPTConfig,
    *,
    device: torch.device | str | None = None,
    num_experts: int = 0,
    experts_per_token: int = DEFAULT_EXPERTS_PER_TOKEN,
    **overrides: Any,
) -> GPT:
    """Build our GPT.

    ``model(tokens)`` returns logits ``(batch, seq, vocab)``; ``model(tokens, targets)`` the mean cross-entropy.

    Args:
        preset: A name in ``PRESETS``, or a configuration to start from.
        device: Device of the parameters. ``"meta"`` allocates nothing; ``None`` is torch's default device.
        num_experts: If above 0, every feed-forward is a mixture of this many experts.
        experts_per_token: Number of experts that each token is sent to.
        **overrides: Fields of :class:`GPTConfig` that replace the preset's.

    Returns:
        The model, initialized as GPT-2, from torch's global generator (``torch.manual_seed``).

    Raises:
        ConfigError: The preset or a field is unknown, or values are invalid; every problem is listed.

    Example:
        >>> model = gpt("gpt-tiny", num_layers=2)
        >>> sum(p.numel() for p in model.parameters()) == model.config.num_parameters
        True
    """
    from shardwise.models.transformer import GPT

    if num_experts:
        overrides["num_experts"] = num_experts
    if experts_per_token != DEFAULT_EXPERTS_PER_TOKEN or num_experts:
        overrides["experts_per_token"] = experts_per_token
    return GPT(gpt_config(preset, **overrides), device=device)


def __getattr__(name: str) -> Any:
    """Import ``GPT`` and ``Block`` when they are first used, because their module imports torch."""
    if name in {"GPT", "Block"}:
        import shardwise.models.transformer as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
