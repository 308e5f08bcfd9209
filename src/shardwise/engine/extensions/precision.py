"""Applying a precision policy: dtypes of groups, casts of inputs, outputs and buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.engine import Engine
from shardwise.engine.storage.buffers import cast_buffer
from shardwise.launch.log_once import log_once
from shardwise.nested import replace_tensors
from shardwise.spec.errors import PlanError
from shardwise.spec.policies import PrecisionPolicy, name_matcher

#: NCCL reduces bf16 from this version on.
_NCCL_BF16 = (2, 10)


def bf16_supported(device: torch.device | str | None = None) -> bool:
    """Whether ``device`` computes in bf16, and on GPUs whether NCCL reduces it (from version 2.10 on).

    Args:
        device: By default CUDA if available, else the CPU, which always computes in bf16.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return True
    return torch.cuda.is_bf16_supported() and _nccl_version() >= _NCCL_BF16


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())[:2]


def resolve(policy: PrecisionPolicy, device: torch.device) -> PrecisionPolicy:
    """Resolve ``"auto"`` for ``device``, and print the resolved dtype once."""
    if policy.param_dtype != "auto":
        return policy
    chosen = "bf16" if bf16_supported(device) else "fp32"
    why = "the CPU"
    if device.type == "cuda":
        why = f"{torch.cuda.get_device_name(device)}, NCCL {'.'.join(map(str, _nccl_version()))}"
    log_once(f"param_dtype 'auto' is {chosen} here ({why})")
    return dataclasses.replace(policy, param_dtype=chosen)


def warn_of_narrow_masters(engine: Engine, _optimizer: torch.optim.Optimizer) -> None:
    """Warn at the first step of an optimizer that it updates 16-bit parameters in 16 bit.

    ``from_pretrained`` of transformers makes parameters in the dtype of the model's files, often bf16. Mixed precision
    of other libraries would convert them to fp32.
    """
    engine.extras.before_step.remove(warn_of_narrow_masters)
    dtypes = {group.facts.master_dtype for group in engine.groups if group.facts.is_trainable}
    for dtype in sorted(dtypes & {"bf16", "fp16"}):
        log_once(
            f"parameters are {dtype} and are updated in {dtype}, in which small updates are lost. For fp32 masters"
            " load the model with dtype=torch.float32, or set"
            f' mp_policy=sw.PrecisionPolicy("{dtype}", master_dtype="fp32").'
            f' Where {dtype} is meant, master_dtype="{dtype}" says so'
        )


def castable_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and key of floating-point buffers, except batch norm's statistics."""
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    yield path, module, key


class Policies:
    """The precision policy of every module of ``model``.

    Attributes:
        heads: Policy by path: of modules that an override names, and of the root, ``""``. A policy also applies to the
            modules below its path.
    """

    def __init__(self, model: nn.Module, policy: PrecisionPolicy, device: torch.device) -> None:
        self.heads: dict[str, PrecisionPolicy] = {"": resolve(policy, device)}
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        for pattern, part in policy.parts:
            matches = name_matcher(pattern)
            hits = [name for name in names if matches(name)]
            if not hits:
                raise PlanError(
                    f"mp_policy overrides {pattern!r}, but no module of {type(model).__name__} has such a name.\n"
                    f"  Names in it: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
                )
            twice = [name for name in hits if name in self.heads]
            if twice:
                raise PlanError(
                    f"mp_policy overrides {twice[0]!r} twice: {pattern!r} and an earlier pattern match it.\n"
                    "  Leave one of them out."
                )
            self.heads |= dict.fromkeys(hits, resolve(part, device))

    def at(self, path: str) -> PrecisionPolicy:
        """Return the policy of the module at ``path``: its own, or that of the nearest enclosing module."""
        while path not in self.heads:
            path = path.rpartition(".")[0]
        return self.heads[path]

    def group_dtypes(
        self, parameter: Tensor, uses: Sequence[tuple[nn.Module, str, str]]
    ) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Return the dtypes of a parameter's group: master, compute, reduce. Batch norm's parameters keep theirs."""
        keeps_own = any(isinstance(user, _BatchNorm) for user, _, _ in uses)
        own = dtype_name(parameter.dtype)
        found = {path: self.at(path).group_dtypes(own, keeps_own=keeps_own) for _, path, _ in uses}
        if len(set(found.values())) > 1:
            shown = "; ".join(
                f"{path!r} computes in {names[1]}, reduces in {names[2]}" for path, names in found.items()
            )
            raise PlanError(
                f"mp_policy overrides do not agree about a parameter that is tied: {shown}.\n"
                "  Name every module that uses it in the overrides, with the same policy."
            )
        master, compute, reduce = next(iter(found.values()))
        return torch_dtype(master), torch_dtype(compute), torch_dtype(reduce)

    def cast_buffers(self, model: nn.Module, ignored: Collection[str]) -> None:
        """Cast floating-point buffers to ``buffer_dtype``, except batch norm's statistics and those ``ignored``."""
        for path, module, key in list(castable_buffers(model)):
            name = self.at(path).buffer_dtype
            if name is not None and (f"{path}.{key}" if path else key) not in ignored:
                cast_buffer(module, key, torch_dtype(name))

    def install_casts(self, model: nn.Module, units: Iterable[str]) -> None:
        """Cast the inputs of units and of modules with a separate policy, and the outputs of these modules.

        Must be called before the engine installs its hooks, so that tickets are attached to the cast outputs.
        """
        for path in dict.fromkeys([*self.heads, *units]):
            install_casts(model.get_submodule(path), self.at(path), casts_output=path in self.heads)


def install_casts(module: nn.Module, policy: PrecisionPolicy, *, casts_output: bool) -> None:
    """Install hooks that cast a module's inputs, and with ``casts_output`` its outputs."""
    if policy.param_dtype is not None and policy.cast_forward_inputs and not isinstance(module, _BatchNorm):
        compute = torch_dtype(policy.param_dtype)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return cast_floating(args, compute), cast_floating(kwargs, compute)

        module.register_forward_pre_hook(before, with_kwargs=True)
    if policy.output_dtype is not None and casts_output:
        handed_on = torch_dtype(policy.output_dtype)

        def after(_module: nn.Module, _args: object, output: Any) -> Any:
            return cast_floating(output, handed_on)

        module.register_forward_hook(after)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in ``value``, a tensor or nested containers; a value without any is returned."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor

    return replace_tensors(value, cast)
