"""Tests that are wholly run on ranks, and what they ask of calls that are refused."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.testing import run_on_ranks


def on_ranks(*worlds: Any, timeout_s: float = 60.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """The decorated test is run on every rank of a world, of each of these sizes in turn.

    Its arguments (fixtures and parameters) are pickled for the ranks.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            world = given.pop("world") if len(worlds) > 1 else worlds[0]
            run_on_ranks(_call, world, body.__module__, body.__qualname__, given, timeout_s=timeout_s)

        if len(worlds) == 1:
            return test
        given = inspect.signature(body)
        world = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = given.replace(parameters=[*given.parameters.values(), world])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(test)

    return decorate


def refusal(kind: Any, call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The text of the error of this kind (or one of these) that the call raises."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)


def _call(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)
