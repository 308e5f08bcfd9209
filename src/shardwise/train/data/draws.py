"""The generators that a sample of a user's may draw from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_host(seed: int) -> None:
    """Seed the generators of the host: Python's, numpy's and torch's for CPUs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - as users' code does
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Whatever is drawn, or seeded, on the host inside: the generators are afterwards what they were."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - as users' code does
        torch.set_rng_state(cpu)
