"""What modules say of themselves (``get_extra_state``), as data in a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint import plain
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.storage.attachment import engine_of
from shardwise.spec.errors import CheckpointError
from shardwise.spec.text import printable
from shardwise.weights.state.model import EXTRA_STATE, load_extra_state

_TENSOR = "__tensor__"


def pack_extra_state(model: nn.Module) -> dict[str, Any]:
    """The extra state of every module by its key in a state dict, as data; of ranks that have a module, the first's.

    Collective:
        Where modules have extra state, and with ``pp``, an all-gather of JSON.

    Raises:
        CheckpointError: Some of it is no data; on every rank alike.
    """
    comms, own = engine_of(model, "sw.save").comms, dict[str, Any]()
    problems: list[str] = []
    for path, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        key = f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
        try:
            own[key] = plain.pack(_without_tensors(module.get_extra_state(), key), key)
        except ValueError as error:
            problems.append(str(error))
    everyone = all_gather_json(comms.world, [own, problems]) if own or problems or comms.pp is not None else []
    wrong = [problem for _, found in everyone for problem in found]
    if wrong:
        raise CheckpointError(
            f"extra state of a module cannot be saved: {printable(wrong[0])}. Tensors are kept too.\n"
            "  Let its get_extra_state() return such data. Nothing was written."
        )
    return {key: plain.unpack(value) for held, _ in reversed(everyone) for key, value in held.items()}


def unpack_extra_state(model: nn.Module, packed: Any) -> Callable[[], None]:
    """What sets the extra state that :func:`pack_extra_state` has given.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        if not isinstance(packed, dict):
            raise TypeError(f"it is a {type(packed).__name__}")  # noqa: TRY301
        state = {key: _with_tensors(value) for key, value in packed.items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the extra state of modules in a checkpoint cannot be read: {printable(error)}.\n"
            "  It was changed by hand or damaged. Load another checkpoint."
        ) from None
    return functools.partial(load_extra_state, model, state, is_stage=True)


def _without_tensors(value: Any, where: str) -> Any:
    """``value`` with every tensor as plain data."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {_TENSOR: raw, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        return type(value)([_without_tensors(each, f"{where}[{place}]") for place, each in enumerate(value)])
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        raise ValueError(f"{where} has the key {_TENSOR!r}, which is reserved")
    return {key: _without_tensors(each, f"{where}.{key}") for key, each in value.items()}


def _with_tensors(value: Any) -> Any:
    """The inverse of :func:`_without_tensors`."""
    if isinstance(value, list | tuple):
        return type(value)([_with_tensors(each) for each in value])
    if not isinstance(value, dict):
        return value
    if _TENSOR not in value:
        return {key: _with_tensors(each) for key, each in value.items()}
    raw, dtype = bytearray(value[_TENSOR]), torch_dtype(value["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(value["shape"])
