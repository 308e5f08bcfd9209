"""Short stacks that show a place in the user's program, without frames of torch and of this package."""

from __future__ import annotations

import contextlib
import inspect
import sysconfig
from pathlib import Path
from types import CodeType

import torch

#: File, line and function of each frame, the innermost first.
Stack = tuple[tuple[str, int, str], ...]

_LIMIT = 8
_HIDDEN = tuple(f"{Path(place).parent}/" for place in (__file__, str(torch.__file__)))
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_is_shown: dict[CodeType, bool] = {}


def here(limit: int = _LIMIT) -> Stack:
    """The stack of the caller; empty if it has no frame of the program, as in a thread of torch."""
    frame, found = inspect.currentframe(), []
    while frame is not None and len(found) < limit:
        code = frame.f_code
        is_shown = _is_shown.get(code)
        if is_shown is None:
            is_shown = _is_shown[code] = _shows(code.co_filename)
        if is_shown:
            found.append((code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return tuple(found)


def _shows(file: str) -> bool:
    if "/torch/optim/" in file:
        return True  # shows which optimizer is running
    if file.startswith("<") or file.startswith(_HIDDEN):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file


def shown(stack: Stack, indent: str = "    ") -> str:
    """The stack as lines of text."""
    if not stack:
        return f"{indent}(outside of the program's own code)"
    return "\n".join(f"{indent}{_short(file)}:{line} in {name}" for file, line, name in stack)


def _short(file: str) -> str:
    with contextlib.suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    parts = Path(file).parts
    return "/".join(parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else file
