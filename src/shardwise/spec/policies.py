"""The policies of a plan as plain data: units, dtypes, recomputation, offloading, ignored parameters.

The fields of a plan also accept objects of torch's FSDP1 and FSDP2, and :func:`translated` returns their counterparts.
Such objects are recognized by the names of their module and class, because planning does not import torch.

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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from shardwise.spec.errors import ConfigError, PlanError
from shardwise.spec.placement import Placements, canonical_name
from shardwise.spec.precision import FLOATING, dtype_name, item_bytes
from shardwise.spec.shown import changed_fields, short_repr

_Policy = TypeVar("_Policy")


def from_fields(policy: type[_Policy], value: Mapping[Any, Any], name: str) -> _Policy:
    """A policy from a mapping of its fields, as in a configuration file.

    Raises:
        PlanError: The policy has no such field, or a value is wrong; ``name`` is the plan's field, for the message.
    """
    known = field_names(policy)
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise PlanError(f"{name} has no field {', '.join(unknown)}.\n  Its fields are: {', '.join(known)}.")
    return policy(**value)


def field_names(policy: Any) -> tuple[str, ...]:
    """The names of the fields of a policy."""
    return tuple(field.name for field in fields(policy))


def is_positive(value: object) -> bool:
    """Whether a value is an integer of at least 1; ``True`` does not count as one."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# -- units


@dataclass(frozen=True, slots=True)
class WrapByClass:
    """Makes every module of one of these classes, or class names, a unit."""

    classes: tuple[type | str, ...]

    def matches(self, module: object) -> bool:
        """Whether ``module`` is an instance of one of the classes."""
        names = {cls.__name__ for cls in type(module).__mro__}
        return any(c in names if isinstance(c, str) else isinstance(module, c) for c in self.classes)

    def __str__(self) -> str:
        shown = ", ".join(sorted(c if isinstance(c, str) else c.__name__ for c in self.classes))
        return f"wrap_by_class({{{shown}}})"


@dataclass(frozen=True, slots=True)
class WrapBySize:
    """Makes a module a unit, bottom up, if at least ``min_num_params`` of its parameters are in no unit below it."""

    min_num_params: int

    def __str__(self) -> str:
        return f"wrap_by_size(min_num_params={self.min_num_params})"


@dataclass(frozen=True, slots=True)
class WrapByName:
    """Makes every module a unit whose qualified name matches one of these patterns; ``*`` does not cross a dot."""

    patterns: tuple[str, ...]

    def __str__(self) -> str:
        return f"wrap_by_name({', '.join(map(repr, self.patterns))})"


WrapPolicy = WrapByClass | WrapBySize | WrapByName


def wrap_by_class(classes: Iterable[type | str] | type | str) -> WrapByClass:
    """A policy that makes every module of the given classes a unit, for example ``wrap_by_class({T5Block})``.

    Raises:
        PlanError: No class is given, or something that is neither a class nor the name of one.
    """
    chosen = (classes,) if isinstance(classes, (type, str)) else tuple(classes)
    if not chosen:
        raise PlanError("wrap_by_class() got no class.\n  Name at least one, or use auto_wrap_policy='none'.")
    for cls in chosen:
        if not isinstance(cls, (type, str)):
            raise PlanError(f"wrap_by_class() takes classes or class names, got {cls!r}.\n  Pass the class itself.")
    return WrapByClass(tuple(sorted(chosen, key=lambda c: c if isinstance(c, str) else c.__qualname__)))


def wrap_by_size(min_num_params: int) -> WrapBySize:
    """A policy that makes modules with at least ``min_num_params`` parameters units, bottom up.

    Raises:
        PlanError: The number is not a positive integer.
    """
    if not is_positive(min_num_params):
        raise PlanError(
            f"wrap_by_size(min_num_params={min_num_params!r}): expected a whole number of at least 1.\n"
            "  A transformer block of hidden size h has about 12 h^2 parameters; start there."
        )
    return WrapBySize(min_num_params)


def wrap_by_name(*patterns: str) -> WrapByName:
    """A policy that makes modules units by qualified name, for example ``wrap_by_name("layers.*")``.

    Raises:
        PlanError: No pattern is given, or an empty one.
    """
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise PlanError(f"wrap_by_name() takes one or more patterns such as 'layers.*', got {patterns!r}.")
    return WrapByName(tuple(patterns))


def wrap_policy(value: object, field: str) -> str | WrapPolicy:
    """Convert the value of ``field``, perhaps a mapping from a file, to a wrap policy, ``"auto"`` or ``"none"``.

    Raises:
        PlanError: The value is none of these.
    """
    if isinstance(value, WrapPolicy) or (isinstance(value, str) and value in {"auto", "none"}):
        return value
    usage = (
        "  Use 'auto', 'none', wrap_by_class(...), wrap_by_size(...), wrap_by_name(...), or in a file one of "
        "{by_class: [names]}, {by_size: number}, {by_name: [globs]}."
    )
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in {"by_class", "by_size", "by_name"}:
        raise PlanError(f"{field}={value!r} is not a wrap policy.\n{usage}")
    key, content = next(iter(value.items()))
    if key == "by_size":
        if not is_positive(content):
            raise PlanError(f"{field} by_size={content!r}: expected a positive number of elements.\n{usage}")
        return WrapBySize(content)
    names = [content] if isinstance(content, str) else content
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"{field} {key}={content!r}: expected a list of names.\n{usage}")
    return WrapByClass(tuple(names)) if key == "by_class" else WrapByName(tuple(names))


def ignored_entries(value: Any) -> tuple[Any, ...]:
    """``ParallelPlan.ignored`` as a tuple of name patterns, modules and parameters.

    Raises:
        PlanError: An entry is none of these.
    """
    entries = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    for entry in entries:
        is_name = isinstance(entry, str) and bool(entry)
        is_object = not isinstance(entry, type) and (hasattr(entry, "named_modules") or hasattr(entry, "requires_grad"))
        if not (is_name or is_object):
            raise PlanError(
                f"ignored={value!r}: expected names of modules or parameters, modules, or parameters.\n"
                "  Write for example ignored=['blocks.*.experts'] or ignored=[model.vision_tower]; [] ignores nothing."
            )
    return entries


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """A predicate of qualified names that match a shell pattern, in which ``*`` does not cross a dot."""
    parts = [re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]") for part in pattern.split(".")]
    expression = re.compile(r"\.".join(parts))
    return lambda name: expression.fullmatch(name) is not None


# -- dtypes


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Dtypes in which units compute and reduce. Dtypes are names: ``fp64``, ``fp32``, ``bf16``, ``fp16``.

    The optimizer updates the master copy of a parameter, and checkpoints store it. The master has the parameter's
    dtype unless ``master_dtype`` raises it. Batch norm computes in its own dtype under every policy.

    Attributes:
        param_dtype: Dtype to which parameters are cast before they are gathered, and in which units compute. ``None``:
            no cast. ``"auto"``: ``bf16`` if the device (and on GPUs NCCL) supports it, else ``fp32``.
        reduce_dtype: Dtype of local gradient buffers, of the gradients that are sent, and of their sums over ranks.
            ``None``: the master's dtype. With ``accumulation="unsharded"`` microbatches are added in it too; with
            ``"sharded"`` reduced means are added in the master's dtype.
        output_dtype: Dtype to which floating-point outputs of the root are cast. ``None``: no cast.
        buffer_dtype: Dtype to which floating-point buffers are cast, once. State dicts and checkpoints store them in
            their original dtype. ``None``: no cast.
        cast_forward_inputs: Whether floating-point inputs of every unit are cast to ``param_dtype``.
        master_dtype: ``"fp32"`` raises 16-bit parameters. ``None``: the parameter's own dtype.
        overrides: Other policies for parts of the model, by qualified name of a module or a shell pattern (``*`` does
            not cross a dot): ``PrecisionPolicy(overrides={"head": PrecisionPolicy(param_dtype="fp32")})``. A part is
            the module and everything below it. If two names match, the longer one wins. The part's inputs are cast to
            its ``param_dtype``, its outputs to its ``output_dtype``. For a part inside a unit, set ``output_dtype`` to
            the dtype in which the rest of the unit computes.

    Raises:
        PlanError: A dtype is unknown, or the policy of a part has ``overrides``.
    """

    param_dtype: str | None = "bf16"
    reduce_dtype: str | None = "fp32"
    output_dtype: str | None = None
    buffer_dtype: str | None = None
    cast_forward_inputs: bool = True
    master_dtype: str | None = None
    overrides: Mapping[str, PrecisionPolicy | Mapping[str, Any]] | tuple[tuple[str, PrecisionPolicy], ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        parts = self.overrides.items() if isinstance(self.overrides, Mapping) else self.overrides
        policies = tuple((str(name), PrecisionPolicy.parse(part, f"overrides[{name!r}]")) for name, part in parts)
        object.__setattr__(self, "overrides", policies)
        for name, part in policies:
            if part.overrides or not name:
                raise PlanError(
                    f"PrecisionPolicy(overrides=...): {name!r} has overrides of its own, or no name.\n"
                    "  Give every part of the model by its full name, side by side."
                )
        for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "master_dtype"):
            value = getattr(self, field)
            if value is None or (value == "auto" and field == "param_dtype"):
                continue
            try:
                name = dtype_name(str(value))
            except ConfigError:
                name = None
            if name not in FLOATING:
                raise PlanError(
                    f"PrecisionPolicy({field}={value!r}) is not a floating-point dtype.\n"
                    f"  Use one of: {', '.join(FLOATING)}, or None."
                )
            object.__setattr__(self, field, name)

    @property
    def parts(self) -> tuple[tuple[str, PrecisionPolicy], ...]:
        """``overrides`` as pairs of name and policy."""
        assert isinstance(self.overrides, tuple)  # __post_init__ has replaced them
        return self.overrides

    @classmethod
    def parse(cls, value: object, name: str = "mp_policy") -> PrecisionPolicy:
        """Convert a policy, its ``param_dtype`` alone, or a mapping of its fields to a policy.

        Raises:
            PlanError: The value is none of these, or a field is unknown or wrong; ``name`` is the plan's field.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(param_dtype=value)
        if not isinstance(value, Mapping):
            raise PlanError(
                f"{name}={value!r}: expected a PrecisionPolicy, its param_dtype, or a mapping of its fields.\n"
                f"  Its fields are: {', '.join(field_names(cls))}."
            )
        return from_fields(cls, value, name)

    def as_dict(self) -> dict[str, Any]:
        """``param_dtype`` and the fields that differ from the defaults, as in a configuration file."""
        parts = {"overrides": {name: part.as_dict() for name, part in self.parts}} if self.parts else {}
        return changed_fields(self) | parts

    def group_dtypes(self, dtype: str, *, keeps_own: bool) -> tuple[str, str, str]:
        """Dtypes (master, compute, reduce) of a group whose parameters have ``dtype`` in the model.

        ``keeps_own``: the parameters compute in their own dtype, as batch norm's do.
        """
        if dtype not in FLOATING:
            return dtype, dtype, dtype
        master = self.master_dtype if self.master_dtype and item_bytes(dtype) < item_bytes(self.master_dtype) else dtype
        compute = master if keeps_own or self.param_dtype is None else self.param_dtype
        return master, compute, master if keeps_own or self.reduce_dtype is None else self.reduce_dtype


#: No cast anywhere.
FULL_PRECISION = PrecisionPolicy(param_dtype=None, reduce_dtype=None)


# -- recomputation

#: Families of operators that ``RecomputePolicy.save`` knows by name; ``engine.extensions.selective`` lists them.
OPERATOR_FAMILIES = ("matmul", "attention")

#: Largest inner dimension of a thin product, and least number of columns for each of it.
_THIN = 256, 8


def is_thin(inner: float, columns: float) -> bool:
    """Whether ``"matmul"`` leaves out a product of ``(rows, inner)`` and ``(inner, columns)``.

    Such are the second product of a LoRA and the scores of attention without a fused kernel. The output is large, and
    the arithmetic takes no longer than to write it: ``inner`` FLOPs for each of its bytes in 16 bit, of about 300 that
    a GPU computes while it moves one.
    """
    return inner <= _THIN[0] and columns >= _THIN[1] * inner


_RECOMPUTE_USAGE = (
    "  Use 'none', 'full', 'selective', a wrap policy that names modules, or RecomputePolicy(modules=..., every=...,"
    " save=...)."
)


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """The modules that are recomputed in backward, and the operators whose outputs are stored nevertheless.

    Attributes:
        modules: ``"units"``, the outermost units below the root; or a wrap policy that chooses other modules.
        every: n recomputes every n-th of those modules, beginning with the first.
        save: Operators whose outputs are stored, so that only the rest is recomputed: ``"matmul"`` (without thin
            products: the second of a LoRA, scores of attention), ``"attention"``, or names of operators
            (``"aten.gelu"``, ``"my_library.my_op.default"``). Empty: everything is recomputed.
            Nothing is stored in a module that itself calls collectives, nor an output that is passed to kernels outside
            of torch (Triton's), because either may overwrite stored outputs.

    Raises:
        PlanError: A value is of another kind or out of range.
    """

    modules: str | WrapPolicy | Mapping[str, Any] = "units"
    every: int = 1
    save: tuple[str, ...] | list[str] | str = ()

    def __post_init__(self) -> None:
        if self.modules != "units":
            modules = _named_modules(self.modules, "activation_checkpointing", _RECOMPUTE_USAGE)
            object.__setattr__(self, "modules", modules)
        if not is_positive(self.every):
            raise PlanError(
                f"RecomputePolicy(every={self.every!r}): expected a whole number of at least 1.\n"
                "  2 recomputes every second module."
            )
        names = (self.save,) if isinstance(self.save, str) else tuple(self.save)
        for name in names:
            if not isinstance(name, str) or not (name in OPERATOR_FAMILIES or "." in name):
                raise PlanError(
                    f"RecomputePolicy(save=...): {name!r} is not an operator.\n"
                    f"  Use {', '.join(map(repr, OPERATOR_FAMILIES))}, or names such as 'aten.gelu'."
                )
        object.__setattr__(self, "save", names)

    def __str__(self) -> str:
        every = "" if self.every == 1 else f", one in {self.every}"
        saved = f", keeping what {', '.join(self.save)} give" if self.save else ""
        return f"{self.modules}{every}{saved}"


#: A policy that chooses modules.
_OfModules = TypeVar("_OfModules", RecomputePolicy, "ActivationOffloadPolicy")

_WORDS = {"none": None, "full": RecomputePolicy(), "selective": RecomputePolicy(save=OPERATOR_FAMILIES)}


def recompute_policy(value: object) -> RecomputePolicy | None:
    """``ParallelPlan.activation_checkpointing`` as a policy; ``None`` where nothing is recomputed.

    Raises:
        PlanError: The value cannot be converted.
    """
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    return _policy_of_modules(RecomputePolicy, value, "activation_checkpointing", _RECOMPUTE_USAGE)


def _policy_of_modules(kind: type[_OfModules], value: object, field: str, usage: str) -> _OfModules:
    """Convert a policy of this kind, a wrap policy, or a mapping of the fields of either to a policy of this kind."""
    if isinstance(value, kind):
        return value
    if isinstance(value, WrapPolicy):
        return kind(modules=value)
    if not isinstance(value, Mapping):
        raise PlanError(f"{field}={value!r} is not a policy.\n{usage}")
    if any(key in field_names(kind) for key in value):
        return from_fields(kind, value, field)
    return kind(modules=_named_modules(value, field, usage))


def _named_modules(value: object, field: str, usage: str) -> WrapPolicy:
    policy = wrap_policy(value, field)
    if isinstance(policy, str):
        raise PlanError(f"{field}: modules={policy!r} names no modules.\n{usage}")
    return policy


# -- activations on the host

_ACTIVATIONS_USAGE = (
    "  Use True, False, a wrap policy that names modules, or ActivationOffloadPolicy(modules=..., every=...,"
    " least_bytes=...)."
)


@dataclass(frozen=True, slots=True)
class ActivationOffloadPolicy:
    """The modules whose saved activations are kept in host memory between forward and backward.

    For a module that is recomputed these are its inputs, otherwise all tensors that autograd saves. They are copied to
    the host while forward continues, and copied back one module before backward needs them.

    Attributes:
        modules: ``"units"``, the outermost units below the root; or a wrap policy that chooses other modules.
        every: n offloads every n-th of those modules, beginning with the first.
        least_bytes: Tensors whose memory is smaller than this stay on the device.
        pin_memory: With CUDA: use page-locked memory, to and from which copies are asynchronous.

    Raises:
        PlanError: A value is of another kind or out of range.
    """

    modules: str | WrapPolicy | Mapping[str, Any] = "units"
    every: int = 1
    least_bytes: int = 1 << 16
    pin_memory: bool = True

    def __post_init__(self) -> None:
        if self.modules != "units":
            object.__setattr__(self, "modules", _named_modules(self.modules, "offload_activations", _ACTIVATIONS_USAGE))
        for name in ("every", "least_bytes"):
            if not is_positive(getattr(self, name)):
                raise PlanError(
                    f"ActivationOffloadPolicy({name}={getattr(self, name)!r}): expected a whole number of at least 1.\n"
                    "  every=2 offloads every second module; least_bytes=1 offloads the smallest tensors too."
                )
        if not isinstance(self.pin_memory, bool):
            raise PlanError(f"ActivationOffloadPolicy(pin_memory={self.pin_memory!r}): expected True or False.")

    def __str__(self) -> str:
        return f"{self.modules}{'' if self.every == 1 else f', one in {self.every}'}"


def activation_offload_policy(value: object) -> ActivationOffloadPolicy | None:
    """``ParallelPlan.offload_activations`` as a policy; ``None`` where nothing is offloaded.

    Raises:
        PlanError: The value cannot be converted.
    """
    if isinstance(value, bool):
        return ActivationOffloadPolicy() if value else None
    return _policy_of_modules(ActivationOffloadPolicy, value, "offload_activations", _ACTIVATIONS_USAGE)


# -- offloading


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Data kept in host memory instead of on the compute device.

    ====================  ===========================  ======================================  ===================
    group of a unit       on the host                  on the device                           sent to the device
    ====================  ===========================  ======================================  ===================
    trained, sharded      master, gradients, state     gathered and gradient buffer, in use    master, each gather
    parameters=False      the same                     also the shard, in the compute dtype    master, once a step
    trained, replicated   master, gradients, state     replica; gradient buffer                master, once a step
    frozen, sharded       shard                        gathered buffer while in use            shard, each gather
    ====================  ===========================  ======================================  ===================

    Every reduced gradient is sent to the host.

    Attributes:
        parameters: ``True``: shards are on the host, and are sent to the device for each gather. ``False``: the device
            keeps its shard of each trained parameter in the compute dtype, and receives it once after each update;
            frozen shards stay on the device. ``"auto"``: ``True`` for strategies that shard parameters.
        gradients: Whether ``.grad`` is on the host. Must equal ``optimizer``.
        optimizer: Whether masters and optimizer state are on the host, where the CPU updates them. ``False``: only
            frozen parameters are offloaded.
        ratio: Fraction of the bytes to offload, above 0 and at most 1. Whole units are chosen, spread over the model.
        pin_memory: With CUDA: use page-locked memory, from which copies are asynchronous.

    Raises:
        PlanError: A value is out of range, or the combination offloads nothing or cannot work.
    """

    parameters: bool | str = "auto"
    gradients: bool = True
    optimizer: bool = True
    ratio: float = 1.0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("gradients", "optimizer", "pin_memory"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"OffloadPolicy({name}={getattr(self, name)!r}): expected True or False.")
        if not (isinstance(self.parameters, bool) or self.parameters == "auto"):
            raise PlanError(f"OffloadPolicy(parameters={self.parameters!r}): expected 'auto', True or False.")
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise PlanError(
                f"OffloadPolicy(ratio={self.ratio!r}): expected a number above 0 and at most 1.\n"
                "  To offload nothing, set offload_policy='none'."
            )
        if self.gradients != self.optimizer:
            raise PlanError(
                f"OffloadPolicy(gradients={self.gradients}, optimizer={self.optimizer}): torch's optimizers update a"
                " parameter where it lies, with its gradient and state beside it.\n  Give both the same value."
            )
        if not (self.optimizer or self.parameters):
            raise PlanError("OffloadPolicy offloads nothing.\n  Set offload_policy='none'.")

    def covers(self, placements: Placements, *, is_trainable: bool) -> bool:
        """Whether a group with these placements is kept on the host if its unit is chosen."""
        if is_trainable:
            return self.optimizer
        return placements.shards_parameters and bool(self.parameters)

    def keeps_shard(self, placements: Placements) -> bool:
        """Whether the device keeps a shard of the parameters whose masters are on the host."""
        return placements.shards_parameters and not self.parameters


def offload_policy(value: object) -> OffloadPolicy | None:
    """``ParallelPlan.offload_policy`` as a policy; ``None`` where nothing is offloaded.

    Raises:
        PlanError: The value cannot be converted.
    """
    if isinstance(value, str) and value in {"none", "cpu"}:
        return OffloadPolicy() if value == "cpu" else None
    if isinstance(value, OffloadPolicy):
        return value
    if not isinstance(value, Mapping):
        raise PlanError(
            f"offload_policy={value!r}: expected 'none', 'cpu', or an OffloadPolicy (in a file a mapping of its"
            f" fields).\n  Its fields are: {', '.join(field_names(OffloadPolicy))}."
        )
    return from_fields(OffloadPolicy, value, "offload_policy")


def check_offload(policy: OffloadPolicy | None, placements: Placements) -> None:
    """Refuse a policy that offloads shards of parameters, for a strategy that replicates parameters.

    Raises:
        PlanError: The policy has ``parameters=True`` or ``optimizer=False``, and parameters are replicated.
    """
    if policy is None or placements.shards_parameters:
        return
    if policy.parameters is True:
        raise PlanError(
            "OffloadPolicy(parameters=True) needs sharded parameters, but this strategy keeps them whole on every"
            f" device ({placements.describe()}).\n  Use zero3 or shard_grad_op, or leave parameters at 'auto': masters,"
            " gradients and optimizer state are then on the host."
        )
    if not policy.optimizer:
        raise PlanError(
            "OffloadPolicy(optimizer=False) offloads frozen shards alone, but this strategy has no shards of"
            f" parameters ({placements.describe()}).\n  Use zero3 or shard_grad_op."
        )


def choose(sizes: Sequence[int], ratio: float) -> list[bool]:
    """Choose the units of these sizes in bytes to offload: ``ratio`` of all bytes, spread evenly over the units.

    The sum is off by at most half of the largest unit.
    """
    chosen, due = [], 0.0
    for size in sizes:
        due += ratio * size
        is_chosen = size > 0 and due >= size / 2
        due -= size if is_chosen else 0
        chosen.append(is_chosen)
    return chosen


_TORCH = "torch.distributed.fsdp"


def translated(value: Any) -> tuple[Any, str | None]:
    """The counterpart of an object of torch's FSDP, with a sentence that explains it; other values and ``None``.

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
    """The counterpart of a policy of FSDP1 or FSDP2. Both reduce in the compute dtype by default."""
    if getattr(value, "keep_low_precision_grads", False):
        raise PlanError(
            f"torch's {name}(keep_low_precision_grads=True): gradients have the dtype of the masters here.\n"
            "  Leave it out; reduce_dtype sets the dtype of the reduction."
        )
    casts_inputs = value.cast_forward_inputs or getattr(value, "cast_root_forward_inputs", False)
    dtypes = {
        "param_dtype": value.param_dtype,
        "reduce_dtype": value.reduce_dtype or value.param_dtype,
        "output_dtype": getattr(value, "output_dtype", None),
        "buffer_dtype": getattr(value, "buffer_dtype", None),
    }
    fields: dict[str, Any] = {field: str(dtype) if dtype is not None else None for field, dtype in dtypes.items()}
    return PrecisionPolicy(**fields, cast_forward_inputs=bool(casts_inputs))
