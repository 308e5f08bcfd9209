"""The random number generators of a rank, as plain data that a checkpoint holds."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from shardwise.spec.errors import CheckpointError


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  users' models and data may draw from the global generator
    torch.manual_seed(seed)


def rank_seed(seed: int, reader: int, step: int = 0) -> int:
    """A seed for dropout and the like, of those that read the same samples; the weights are drawn from ``seed``."""
    return (seed * 1_000_003 + reader * 8_191 + step * 131 + 17) % 2**63


def capture(device: torch.device) -> dict[str, Any]:
    """The state of all generators: JSON values only."""
    version, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()  # noqa: NPY002  see seed_all
    state: dict[str, Any] = {
        "python": [version, _text(np.array(words, np.uint64).tobytes()), gauss],
        "numpy": [str(name), _text(np.asarray(keys, np.uint32).tobytes()), int(place), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device).numpy().tobytes())
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back where :func:`capture` found it.

    Raises:
        CheckpointError: The state is damaged.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(int(w) for w in np.frombuffer(_bytes(words), np.uint64)), gauss))
        name, keys, place, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.frombuffer(_bytes(keys), np.uint32), place, has_gauss, cached))  # noqa: NPY002
        torch.set_rng_state(_tensor(state["torch"]))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random state is damaged: {error}.\n  Resume from another checkpoint."
        ) from None


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
