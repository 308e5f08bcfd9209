"""The state of a user's sampler, loader or schedule as checkpoints hold it; that of one of several readers."""

from __future__ import annotations

from typing import Any

from shardwise.checkpoint import plain
from shardwise.spec.errors import CheckpointError, ConfigError


def packed(state: Any, what: str) -> Any:
    """A state as JSON, which ``plain.unpack`` reads."""
    try:
        return plain.pack(state, "it")
    except ValueError as error:
        raise ConfigError(
            f"{what}: state_dict() cannot be kept: {error}.\n  Wrap it: return plain values from state_dict()."
        ) from None


def of_reader(states: list[Any], reader: int, readers: int, what: str, instead: str) -> Any:
    """The state of one of several ``readers``, each of which had one of its own; ``what`` had it, of how many.

    ``instead`` has one state for any number of readers.
    """
    if len(states) != readers:
        raise CheckpointError(
            f"the place of {what.format(len(states))}, and this run has {readers}.\n"
            f"  Continue on as many, or {instead}, which has one place for any number."
        )
    return states[reader]
