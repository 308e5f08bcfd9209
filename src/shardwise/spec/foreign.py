"""Objects of torch's FSDP1 and FSDP2 in the fields of a plan, and their counterparts.

Objects are recognized by the names of their module and class, because planning loads no torch.

===============================================  =====================================================================
torch                                            here
===============================================  =====================================================================
``ShardingStrategy.FULL_SHARD``, ...             the strategy of that name (``spec.placement``)
``MixedPrecision``, ``MixedPrecisionPolicy``     ``PrecisionPolicy``; a ``reduce_dtype`` of ``None`` is ``param_dtype``
``CPUOffload``, ``CPUOffloadPolicy``             ``OffloadPolicy``, or none
``transformer_auto_wrap_policy``,                ``wrap_by_class``
``ModuleWrapPolicy``
``size_based_auto_wrap_policy``                  ``wrap_by_size``
===============================================  =====================================================================
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from shardwise.spec.errors import PlanError
from shardwise.spec.placement import canonical_name
from shardwise.spec.policies import OffloadPolicy, PrecisionPolicy, wrap_by_class, wrap_by_size

_TORCH = "torch.distributed.fsdp"


def translated(value: Any) -> tuple[Any, str | None]:
    """The counterpart of an object of torch's FSDP with a sentence about it; any other value unchanged, with ``None``.

    Raises:
        PlanError: The object has no counterpart; the message says what to use.
    """
    function = value.func if isinstance(value, functools.partial) else value
    name = function.__name__ if inspect.isroutine(function) else type(value).__name__
    module = function.__module__ if inspect.isroutine(function) else type(value).__module__
    if not str(module).startswith(_TORCH):
        return value, None
    meant = _meaning(value, name)
    shown = repr(meant) if isinstance(meant, str) else str(meant)
    return meant, f"torch's {name} is {shown} here"


def _meaning(value: Any, name: str) -> Any:
    settings = value.keywords if isinstance(value, functools.partial) else {}
    meanings: dict[str, Callable[[], Any]] = {
        "ShardingStrategy": lambda: canonical_name(value.name),
        "MixedPrecision": lambda: _precision(value, name),
        "MixedPrecisionPolicy": lambda: _precision(value, name),
        "CPUOffload": lambda: OffloadPolicy() if value.offload_params else "none",
        "CPUOffloadPolicy": lambda: OffloadPolicy(pin_memory=bool(value.pin_memory)),
        "OffloadPolicy": lambda: "none",
        "transformer_auto_wrap_policy": lambda: wrap_by_class(settings.get("transformer_layer_cls", ())),
        "ModuleWrapPolicy": lambda: wrap_by_class(vars(value)["_module_classes"]),
        "size_based_auto_wrap_policy": lambda: wrap_by_size(int(settings.get("min_num_params", 1e8))),
    }
    if name not in meanings:
        raise PlanError(
            f"torch's {name} has no counterpart here.\n"
            "  Use 'auto', 'none', sw.wrap_by_class(...), sw.wrap_by_size(...) or sw.wrap_by_name(...) to choose units,"
            " sw.PrecisionPolicy(...) for dtypes, sw.OffloadPolicy(...) for what the host keeps."
        )
    return meanings[name]()


def _precision(value: Any, name: str) -> PrecisionPolicy:
    """The policy of FSDP1 or FSDP2. Both reduce in the compute dtype by default."""
    if getattr(value, "keep_low_precision_grads", False):
        raise PlanError(
            f"torch's {name}(keep_low_precision_grads=True): gradients have the dtype of the masters here.\n"
            "  Leave it out; reduce_dtype says in which dtype they travel."
        )
    casts_inputs = value.cast_forward_inputs or getattr(value, "cast_root_forward_inputs", False)
    dtypes = {
        "param_dtype": value.param_dtype,
        "reduce_dtype": value.reduce_dtype or value.param_dtype,
        "output_dtype": getattr(value, "output_dtype", None),
        "buffer_dtype": getattr(value, "buffer_dtype", None),
    }
    given: dict[str, Any] = {field: str(dtype) if dtype is not None else None for field, dtype in dtypes.items()}
    return PrecisionPolicy(**given, cast_forward_inputs=bool(casts_inputs))
