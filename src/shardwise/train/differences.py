"""Differences between two nested mappings, such as configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted key, old value and new value of everything that differs between two nested mappings."""
    result: list[tuple[str, Any, Any]] = []
    for key in [*old, *(k for k in new if k not in old)]:
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            result += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            result.append((f"{prefix}{key}", left, right))
    return result
