"""Extra state of modules (``get_extra_state``) in a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.checkpoint import plain
from shardwise.comm.control import all_gather_json
from shardwise.engine.storage.attachment import engine_of
from shardwise.spec.errors import CheckpointError
from shardwise.spec.text import printable
from shardwise.weights.state.model import EXTRA_STATE, load_extra_state


def pack_extra_state(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of every module, by its key in a state dict; of several ranks' values the first rank's.

    Collective:
        An all-gather of JSON if modules have extra state or with ``pp``.

    Raises:
        CheckpointError: Extra state contains values that cannot be saved. Raised on every rank.
    """
    comms, own = engine_of(model, "sw.save").comms, dict[str, Any]()
    problems: list[str] = []
    for path, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        key = f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
        try:
            own[key] = plain.pack(module.get_extra_state(), key)
        except ValueError as error:
            problems.append(str(error))
    everyone = all_gather_json(comms.world, [own, problems]) if own or problems or comms.pp is not None else []
    wrong = [problem for _, found in everyone for problem in found]
    if wrong:
        raise CheckpointError(
            f"extra state of a module cannot be saved: {printable(wrong[0])}.\n"
            "  Let its get_extra_state() return such data. Nothing was written."
        )
    return {key: plain.unpack(value) for states, _ in reversed(everyone) for key, value in states.items()}


def unpack_extra_state(model: nn.Module, packed: Any) -> Callable[[], None]:
    """Return a function that sets the extra state that :func:`pack_extra_state` has packed.

    Raises:
        CheckpointError: The packed state is damaged.
    """
    if not isinstance(packed, dict):
        raise CheckpointError(
            f"the extra state of modules in a checkpoint cannot be read: it is a {type(packed).__name__}.\n"
            "  It was changed by hand or damaged. Load another checkpoint."
        )
    return functools.partial(load_extra_state, model, packed, is_stage=True)
