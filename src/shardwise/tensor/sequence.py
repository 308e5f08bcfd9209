"""Where activations are divided by positions, and where they are whole: hooks around modules (sequence parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.tensor.pairs import gather_seq, join_seq, own_seq

#: ``pair(x, comm, unit)``.
Pair = Callable[[Tensor, Comm, str], Tensor]

#: What becomes of a module's first argument, by style.
_GIVEN: dict[str, Pair] = {"sequence_begin": own_seq, "sequence_input": gather_seq, "sequence_whole": join_seq}
#: What becomes of what it gives.
_GIVES: dict[str, Pair] = {"sequence_end": join_seq, "sequence_whole": own_seq}


def divide_sequence(model: nn.Module, paths: Mapping[str, Sequence[str]], comm: Comm) -> None:
    """Have modules get and give what their styles say.

    Args:
        model: The model.
        paths: Of its modules, by style.
        comm: On ``tp``.
    """
    for style in paths:
        for path in paths[style]:
            module = model.get_submodule(path)
            if style in _GIVEN:
                module.register_forward_pre_hook(_Given(_GIVEN[style], comm, path), with_kwargs=True)
            if style in _GIVES:
                module.register_forward_hook(_Gives(_GIVES[style], comm, path))


class _Given:
    """Forward pre-hook: the first argument, which transformers may give by name, goes through ``pair``."""

    def __init__(self, pair: Pair, comm: Comm, unit: str) -> None:
        self._pair = pair
        self._place = comm, unit

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._pair(args[0], *self._place), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._pair(kwargs["hidden_states"], *self._place)}


class _Gives:
    """Forward hook: the output goes through ``pair``."""

    def __init__(self, pair: Pair, comm: Comm, unit: str) -> None:
        self._pair = pair
        self._place = comm, unit

    def __call__(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return self._pair(output, *self._place)
