"""What holds a rank's part of a model, and therefore refuses to be copied and pickled."""

from __future__ import annotations

from typing import NoReturn

from shardwise.spec.errors import StateError


class Uncopyable:
    """Stops deepcopy and pickling of the module that it sits on."""

    __slots__ = ()

    def __deepcopy__(self, _memo: object) -> NoReturn:
        raise _error("copied")

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise _error("pickled")


def _error(what: str) -> StateError:
    return StateError(
        f"a parallelized module cannot be {what}: it holds only this rank's shards.\n"
        "  Use sw.full_state_dict(model) for the weights (or sw.save for a checkpoint) and build the module anew."
    )
