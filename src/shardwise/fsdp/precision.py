"""Applying a precision policy: dtypes of groups, casts of inputs, outputs and buffers."""

from __future__ import annotations

import copy as copying
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.fsdp.notice import tell_once
from shardwise.spec.precision import PrecisionPolicy

#: NCCL reduces bf16 from this version on.
_NCCL_BF16 = (2, 10)


def bf16_supported(device: torch.device | str | None = None) -> bool:
    """Whether ``device`` computes in bf16, and on GPUs whether NCCL reduces it (it does from 2.10 on).

    Args:
        device: By default CUDA where there is one, else the CPU, which always does.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return True
    return torch.cuda.is_bf16_supported() and _nccl_version() >= _NCCL_BF16


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())[:2]


def resolve(policy: PrecisionPolicy, device: torch.device) -> PrecisionPolicy:
    """The policy with ``"auto"`` decided for ``device``; what it became is printed once."""
    if policy.param_dtype != "auto":
        return policy
    chosen = "bf16" if bf16_supported(device) else "fp32"
    why = "the CPU"
    if device.type == "cuda":
        why = f"{torch.cuda.get_device_name(device)}, NCCL {'.'.join(map(str, _nccl_version()))}"
    tell_once(f"param_dtype 'auto' is {chosen} here ({why})")
    return dataclasses.replace(policy, param_dtype=chosen)


def group_dtypes(
    policy: PrecisionPolicy, parameter: nn.Parameter, users: Iterable[nn.Module]
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Dtypes of a parameter's group: master, compute, reduce. Batch norm's parameters keep their own."""
    keeps_own = any(isinstance(user, _BatchNorm) for user in users)
    names = policy.group_dtypes(dtype_name(parameter.dtype), keeps_own=keeps_own)
    return torch_dtype(names[0]), torch_dtype(names[1]), torch_dtype(names[2])


def cast_buffers(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Cast floating-point buffers to ``buffer_dtype``, but for batch norm's statistics."""
    if policy.buffer_dtype is None:
        return
    dtype = torch_dtype(policy.buffer_dtype)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def install_casts(module: nn.Module, policy: PrecisionPolicy, *, casts_output: bool) -> list[Any]:
    """Hooks that cast what goes into a unit, and what comes out of the root. Returns their handles.

    They are installed before the engine's own, so that a ticket sits on what the unit really returns.
    """
    handles: list[Any] = []
    if policy.param_dtype is not None and policy.cast_forward_inputs and not isinstance(module, _BatchNorm):
        compute = torch_dtype(policy.param_dtype)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return cast_floating(args, compute), cast_floating(kwargs, compute)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if policy.output_dtype is not None and casts_output:
        handed_on = torch_dtype(policy.output_dtype)

        def after(_module: nn.Module, _args: object, output: Any) -> Any:
            return cast_floating(output, handed_on)

        handles.append(module.register_forward_hook(after))
    return handles


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in a value of any common shape; what holds none is returned as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
    if isinstance(value, (tuple, list)):
        return _cast_sequence(value, dtype)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = _changed(held, dtype)
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _cast_sequence(value: tuple[Any, ...] | list[Any], dtype: torch.dtype) -> Any:
    items = [cast_floating(item, dtype) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _cast_mapping(value: Mapping[str, Any], dtype: torch.dtype) -> Any:
    changed = _changed(value, dtype)
    if not changed:
        return value
    copy: Any = copying.copy(value)  # transformers' ModelOutput keeps items and attributes alike when items are set
    for key, item in changed.items():
        copy[key] = item
    return copy


def _changed(value: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {key: new for key, item in value.items() if (new := cast_floating(item, dtype)) is not item}
