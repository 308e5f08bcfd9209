"""The random number generators of a rank, as plain data for checkpoints."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint import plain
from shardwise.spec.errors import CheckpointError
from shardwise.train.data.user_data import seed_host


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch, because users' models and data may use the global generators."""
    seed_host(seed)
    torch.manual_seed(seed)


def rank_seed(seed: int, reader: int, step: int = 0) -> int:
    """Return a seed for dropout etc., the same for ranks that read the same samples; weights use ``seed`` itself."""
    return (seed * 1_000_003 + reader * 8_191 + step * 131 + 17) % 2**63


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of all generators in each library's own form. Reading them takes a few microseconds."""

    python: tuple[Any, ...]
    numpy: Any
    torch: torch.Tensor
    cuda: torch.Tensor | None


def take(device: torch.device) -> Generators:
    """Return the current states of all generators."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Generators(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)  # noqa: NPY002 - as users' code does


def capture(device: torch.device) -> dict[str, Any]:
    """Return the current states of all generators as plain values."""
    return to_plain(take(device))


def to_plain(generators: Generators) -> dict[str, Any]:
    """Return states of generators as plain values, for :func:`restore`."""
    version, words, gauss = generators.python
    name, keys, position, has_gauss, cached = generators.numpy
    state: dict[str, Any] = {
        "python": [version, np.array(words, np.uint64).tobytes(), gauss],
        "numpy": [str(name), np.asarray(keys, np.uint32).tobytes(), int(position), int(has_gauss), float(cached)],
        "torch": generators.torch.numpy().tobytes(),
    }
    if generators.cuda is not None:
        state["cuda"] = generators.cuda.numpy().tobytes()
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restore every generator to the state that :func:`capture` returned; if ``state`` is damaged, restore none."""
    try:
        state = plain.unpack(state)
        python, numpy_state = _python_state(*state["python"]), _numpy_state(*state["numpy"])
        cpu = _tensor(state["torch"], like=torch.get_rng_state())
        cuda = None
        if device.type == "cuda" and "cuda" in state:
            cuda = _tensor(state["cuda"], like=torch.cuda.get_rng_state(device))
        torch.set_rng_state(cpu)  # the only library that checks a state
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random state is damaged: {error}.\n  Resume from another checkpoint."
        ) from None
    random.setstate(python)
    np.random.set_state(numpy_state)  # noqa: NPY002 - as users' code does
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


#: Number of words of the Mersenne Twister of Python and numpy, and its largest position. Neither library checks the
#: position, and numpy would read from it.
_WORDS = 624


def _python_state(version: Any, words: Any, gauss: Any) -> tuple[Any, ...]:
    found = tuple(int(word) for word in np.frombuffer(words, np.uint64))
    if version != 3 or len(found) != _WORDS + 1 or found[-1] > _WORDS or max(found) >= 2**32:
        raise ValueError("it is none of Python's generator")
    return version, found, None if gauss is None else _finite(gauss)


def _numpy_state(name: Any, keys: Any, position: Any, has_gauss: Any, cached: Any) -> tuple[Any, ...]:
    found = np.frombuffer(keys, np.uint32)
    is_place = isinstance(position, int) and not isinstance(position, bool) and 0 <= position <= _WORDS
    if name != "MT19937" or found.size != _WORDS or not is_place or has_gauss not in {0, 1}:
        raise ValueError("it is none of numpy's generator")
    return name, found, position, has_gauss, _finite(cached)


def _finite(value: Any) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no finite number")
    return value


def _tensor(raw: bytes, *, like: torch.Tensor) -> torch.Tensor:
    found = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    if found.shape != like.shape:
        raise ValueError(f"it has {found.numel()} bytes of torch's generator, expected {like.numel()}")
    return found
