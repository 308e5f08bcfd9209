"""The debug flag of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

#: Released slots are filled with NaN, and saved tensors are checked in every step. Slow; on in the engine's tests.
is_on = False


@contextlib.contextmanager
def checks(*, is_enabled: bool = True) -> Iterator[None]:
    """Switch the debug flag inside the context."""
    global is_on  # noqa: PLW0603 - one flag for the process, read on hot paths
    before, is_on = is_on, is_enabled
    try:
        yield
    finally:
        is_on = before
