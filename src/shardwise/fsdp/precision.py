"""Applying a precision policy: dtypes of groups, casts of inputs, outputs and buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.spec.precision import PrecisionPolicy

#: NCCL reduces bf16 from this version on.
_NCCL_BF16 = (2, 10)


def bf16_supported(device: torch.device | str | None = None) -> bool:
    """Whether ``device`` computes in bf16, and on GPUs whether NCCL reduces it.

    Args:
        device: By default CUDA where there is one, else the CPU, which always does.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return True
    return torch.cuda.is_bf16_supported() and tuple(torch.cuda.nccl.version())[:2] >= _NCCL_BF16


def resolve(policy: PrecisionPolicy, device: torch.device) -> PrecisionPolicy:
    """The policy with ``"auto"`` decided for ``device``."""
    if policy.param_dtype != "auto":
        return policy
    return dataclasses.replace(policy, param_dtype="bf16" if bf16_supported(device) else "fp32")


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
        cast_in = _caster(torch_dtype(policy.param_dtype))

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return cast_in(args), cast_in(kwargs)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if policy.output_dtype is not None and casts_output:
        cast_out = _caster(torch_dtype(policy.output_dtype))

        def after(_module: nn.Module, _args: object, output: Any) -> Any:
            return cast_out(output)

        handles.append(module.register_forward_hook(after))
    return handles


def _caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    """A function that casts every floating-point tensor in a value of any common shape, and leaves the rest alone."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
        if isinstance(value, (tuple, list)):
            items = [cast(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, Mapping):
            changed = {key: new for key, item in value.items() if (new := cast(item)) is not item}
            if not changed:
                return value
            if hasattr(value, "to_tuple"):  # transformers' ModelOutput: attributes and items are the same
                for key, item in changed.items():
                    value[key] = item  # type: ignore[index]
                return value
            return type(value)({**value, **changed})  # type: ignore[call-arg]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            changed = {name: new for name, item in held.items() if (new := cast(item)) is not item}
            return dataclasses.replace(value, **changed) if changed else value
        return value

    return cast
