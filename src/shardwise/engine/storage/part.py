"""Tensor classes for one rank's part of a larger tensor: a gradient, or a parameter between steps.

Element-wise arithmetic on parts is correct. A norm, a maximum, a matrix product or ``if`` would give a different result
on every rank. So a :class:`Part` computes element-wise operations, whose results are parts, and refuses all others with
advice on what to call instead. torch's tag on the operators of a call, and a short list, say which are element-wise.
``docs/adr/0027`` has the alternatives.

A call on a part has Python overhead. So optimizers, which make many calls for each parameter, see plain tensors during
their step (:func:`hide_parts`, :func:`restore_parts`), as does the engine itself.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.engine.attach import Observer
from shardwise.engine.group import Group
from shardwise.engine.storage.attachment import Mark, engine_of_unit, group_and_index, mark_of
from shardwise.engine.storage.flat_parameters import FlatParameter
from shardwise.nested import tensors_in
from shardwise.spec.errors import StateError
from shardwise.spec.order import EntryPoint

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

#: Element-wise operators without torch's tag. All names here are without leading and trailing ``_``.
_ELEMENTWISE = frozenset({
    "alias", "cat", "clone", "copy", "detach", "equal", "fill", "lift_fresh", "permute", "pin_memory", "reshape_alias",
    "squeeze", "stack", "t", "to_copy", "transpose", "unsafe_view", "unsqueeze", "view", "zero",
})  # fmt: skip
#: Operators that read only shape and dtype of a part; the result is no part.
_LIKE_OPERATORS = frozenset({
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros",
})  # fmt: skip
#: Operators that read elements by index: correct on concatenated parts, whose offsets the caller knows.
_INDEXING = frozenset({"select", "slice", "split", "split_with_sizes", "unbind"})
_NORMS = frozenset({"norm", "linalg_vector_norm", "linalg_norm", "linalg_matrix_norm"})
_SCALER_CHECKS = frozenset({"amp_foreach_non_finite_check_and_unscale"})
_RANDOM = frozenset({"bernoulli", "exponential", "normal", "random", "uniform"})
#: Methods that read elements without torch's dispatcher.
_CONVERSIONS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
_PICKLING = "pickling (torch.save, copy.copy, safetensors)"
#: Methods that read no element and are called often.
_METADATA = frozenset({
    "as_subclass", "data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride",
    "untyped_storage",
    "__format__", "__len__", "__repr__",
})  # fmt: skip

#: Context in which parts are plain tensors, for code that reduces its results over the ranks itself.
as_plain_tensors: Any = torch_private.without_torch_function


class Part(Tensor):
    """A part of a tensor whose other parts are on other ranks.

    Attributes:
        plain: A plain tensor over the same memory, if there is one.
        origin: Mark of the parameter that it comes from, and whether it is a gradient.
    """

    plain: Tensor | None = None
    origin: tuple[Mark | None, bool] = None, False

    @classmethod
    def of_gradient(cls, gradient: Tensor, parameter: Tensor | None) -> Tensor:
        """Make the gradient of a shard, or of several shards (``None``), over the memory of ``gradient``."""
        made = gradient.as_subclass(cls)
        made.plain, made.origin = gradient, (mark_of(parameter) if parameter is not None else None, True)
        return made

    def to_local(self) -> Tensor:
        """Return this rank's elements as a plain tensor over the same memory, as torch's ``DTensor.to_local``."""
        with as_plain_tensors():
            return self.detach()

    @classmethod
    @torch_private.never_compiled  # torch would reuse the code that it compiled for one ``func`` for another
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute element-wise functions, and refuse functions that need the other parts as well."""
        if _hidden:
            return torch_private.as_plain(func, args, kwargs or {})
        torch_private.break_graph()
        try:
            return _handler_of(func)(func, args, kwargs or {})
        except (RuntimeError, AssertionError) as error:
            part = next((each for each in tensors_in((args, kwargs or {})) if isinstance(each, Part)), None)
            is_torchs = type(error) in (RuntimeError, AssertionError)
            if not is_torchs or part is None or not re.search("size|shape|elements|dim|embeddings", str(error)):
                raise
            what = f"{_describe(part)} is this rank's part {list(part.shape)} here"
            raise StateError(f"{error}: {what}.\n  {_advice_outside_unit(part)}") from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with as_plain_tensors():
            made = self.detach().clone()
            made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        _set_class(made, type(self))
        if not isinstance(self, Shard):
            vars(made)["origin"] = self.origin
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        raise _refusal(_PICKLING, self)


class Joined(Part):
    """Concatenated parts, as ``torch.cat`` makes, or a tensor that contains parts: it may be sliced."""


class Shard(Part, nn.Parameter):
    """Class of a model's Parameter object while it is this rank's part of the parameter."""

    @property
    def origin(self) -> tuple[Mark | None, bool]:  # pyrefly: ignore[bad-override]
        """Mark of this parameter; it is not a gradient."""
        return mark_of(self), False

    # zero_grad() reads it of every parameter: this property takes a third of the time of torch's dispatch.
    @property
    def grad(self) -> Tensor | None:  # pyrefly: ignore[bad-override]
        """The gradient of the shard."""
        with torch_private.without_torch_function():
            return torch_private.grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch_private.without_torch_function():
            torch_private.grad.__set__(self, value)


def _set_class(tensor: Any, cls: type) -> None:
    """Change the class of a tensor object, as ``nn.parameter.UninitializedParameter`` does."""
    tensor.__class__ = cls


def set_shard_class(groups: Iterable[Group]) -> None:
    """Make the parameters that are parts instances of :class:`Shard`."""
    for group in groups:
        is_cut = group.placements.shards_optimizer and group.layout.size > 1
        for spec, shard in zip(group.layout.params, group.shards, strict=True):
            if (is_cut or spec.shape != spec.logical_shape) and type(shard) is nn.Parameter:
                _set_class(shard, Shard)


def unset_shard_class(group: Group) -> None:
    """Undo :func:`set_shard_class`."""
    for shard in group.shards:
        if type(shard) is Shard:
            _set_class(shard, nn.Parameter)


def plain_of(tensor: Tensor) -> Tensor:
    """Return the plain tensor of a part; any other tensor is returned unchanged."""
    if not isinstance(tensor, Part):
        return tensor
    return tensor.plain if tensor.plain is not None else tensor.to_local()


def to_plain(value: object) -> None:
    """Make an optimizer's state a plain tensor, if the optimizer has computed it from parts before any step."""
    if isinstance(value, Part) and not isinstance(value, Shard):
        _set_class(value, Tensor)


#: Replacements of :func:`hide_parts`, by optimizer: parameter, gradient, its plain tensor, and whether it was a shard.
#: While it has entries, in an optimizer's step, all parts compute as plain tensors.
_hidden: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Any, Tensor | None, Tensor | None, bool]]] = (
    weakref.WeakKeyDictionary()
)


def hide_parts(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's parameters and gradients plain tensors; other parts compute as such meanwhile.

    A parameter of which this rank owns no element has no gradient meanwhile, so that the optimizer skips it.
    """
    restore_parts(optimizer)  # if its last step raised
    found = _hidden[optimizer] = []
    for settings in optimizer.param_groups:
        for parameter in settings["params"]:
            if isinstance(parameter, FlatParameter):
                continue  # it stands for many parameters, and setting its gradient would copy
            if is_part := type(parameter) is Shard:
                _set_class(parameter, nn.Parameter)
            grad = parameter.grad
            if isinstance(grad, Part):
                plain = plain_of(grad)
                parameter.grad = None if plain.numel() == 0 and _is_elsewhere(parameter) else plain
            if is_part or isinstance(grad, Part):
                found.append((parameter, grad, parameter.grad, is_part))


def _is_elsewhere(parameter: Tensor) -> bool:
    """Whether other ranks own all elements of a parameter."""
    place = group_and_index(parameter)
    return place is not None and place[0].layout.params[place[1]].numel > 0


def restore_parts(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`hide_parts`, except for gradients that have been replaced or removed."""
    for parameter, part, plain, is_part in _hidden.pop(optimizer, ()):
        if part is not plain and parameter.grad is plain:
            parameter.grad = part
        if is_part:
            _set_class(parameter, Shard)


class RestoresParts(Observer):
    """Undoes :func:`hide_parts` before the next forward, if a step has raised."""

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:  # noqa: ARG002
        """Call :func:`restore_parts` for all optimizers that need it."""
        for optimizer in [*_hidden]:
            restore_parts(optimizer)


def call_with_parts(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
    """Call the closure of an optimizer's step, which may clip gradients, with parts instead of plain tensors."""
    restore_parts(optimizer)
    result = closure()
    hide_parts(optimizer)
    return result


# -- calls on parts

_Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@functools.cache
def _handler_of(func: Callable[..., Any]) -> _Handler:
    """Choose how to call a function that has parts among its arguments; this depends only on the function."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__  # pyrefly: ignore[missing-attribute] - of a property
        is_view, is_part = attribute in ("T", "H", "mT", "mH"), attribute in ("data", "real", "imag")
        handler = _checked if is_view else _elementwise if is_part else torch_private.as_plain
        handler = _layout if attribute == "layout" else handler
        return _move if attribute == "data" and name == "__set__" else handler
    if name in _METADATA:
        return torch_private.as_plain
    if name in ("numel", "nelement"):
        return _numel
    if name in ("__getitem__", "__setitem__"):
        return _index
    if name in _CONVERSIONS or func is torch.autograd.grad:
        return _refuse if name in _CONVERSIONS else _differentiate
    is_of_c = isinstance(func, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType))
    is_kept = _bare(name) in ("copy", "zero", "fill", "detach", "clone") or torch_private.is_pointwise(_bare(name))
    return _elementwise if is_of_c and is_kept and "foreach" not in name else _checked


def _bare(name: str) -> str:
    return name.strip("_").removeprefix("foreach_")


def _numel(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Count the elements of the full parameter, as a ``DTensor`` does; of gradients and other parts, this rank's."""
    (mark, is_gradient), local_numel = args[0].origin, torch_private.as_plain(func, args, kwargs)
    group = mark.group if mark is not None else None
    if mark is None or group is None or is_gradient or args[0].shape != group.views[mark.index].shape:
        return local_numel
    return math.prod(group.layout.params[mark.index].logical_shape)


def _refuse(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
    raise _refusal(func.__name__, args[0])


def _layout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the layout; safetensors asks for it before it reads the memory of a tensor."""
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    if caller is not None and caller.f_globals.get("__name__") == "safetensors.torch":
        raise _refusal(_PICKLING, args[0])
    return torch_private.as_plain(func, args, kwargs)


def _differentiate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    if any(isinstance(each, Shard) for each in inputs):
        raise StateError(
            "torch.autograd.grad() by parameters of a parallelized model: its outputs are computed with whole"
            " parameters that stand in for these shards.\n  Call loss.backward(), and read .grad."
        )
    return torch_private.as_plain(func, args, kwargs)


def _index(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index joined parts, or write by a mask of the part's shape; refuse any other indexing."""
    part, index = args[:2]
    is_mask = func.__name__ == "__setitem__" and isinstance(index, Tensor) and index.dtype is torch.bool
    if isinstance(part, Part) and not isinstance(part, Joined) and not (is_mask and index.shape == part.shape):
        raise _refusal("indexing", part)
    return (torch_private.as_plain if is_mask and isinstance(part, Part) else _checked)(func, args, kwargs)


def _elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an element-wise function: its result is a part."""
    with as_plain_tensors():
        parts = [each for each in (*args, *kwargs.values()) if isinstance(each, Part)]
        _check_shapes(args[0] if func.__name__.strip("_") + "_" == func.__name__ else (), parts)
        _check_shapes(result := func(*args, **kwargs), parts)
        return _mark(result, parts, func.__name__)


def _move(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Point a tensor at other memory (``p.grad.data = x``), which its plain tensor does not follow."""
    if isinstance(args[0], Part):
        args[0].plain = None
    return _elementwise(func, args, kwargs)


def _checked(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call any function, and check each operator that it dispatches."""
    with as_plain_tensors(), _OperatorCheck(args, kwargs) as check:
        result = func(*args, **kwargs)
    with as_plain_tensors():
        for each in tensors_in((result, args[:1] if func.__name__ == "__setitem__" else ())):
            if parts := [*check.parts_in(each)]:
                _mark(each, parts, func.__name__)
    return result


class _OperatorCheck(torch_private.TorchDispatchMode):
    """Refuses operators on parts that are not element-wise, and tracks results of parts by their memory."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._parts: dict[int, tuple[Tensor, Part]] = {}  # by memory: a tensor that keeps it alive, and its origin
        self._whole: set[int] = set()  # ``id`` of other arguments, which may share the memory of a group with parts
        for each in tensors_in((args, kwargs)):
            if isinstance(each, Part):
                self._parts[torch_private.storage_identity(each)] = each, each
            else:
                self._whole.add(id(each))

    def parts_in(self, value: object) -> Iterator[Any]:
        """Yield the parts from which tensors in ``value`` were computed."""
        for each in tensors_in(value):
            if isinstance(each, Part):  # its memory would not tell, because all parts of a group share it
                yield each
            elif each.layout is torch.strided and id(each) not in self._whole:
                yield from self._parts.get(torch_private.storage_identity(each), ())[1:]

    def __torch_dispatch__(  # pyrefly: ignore[bad-override] - torch's own stub has no defaults
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        parts = [*self.parts_in((args, kwargs))]
        name = func.overloadpacket.__name__
        bare = _bare(name)
        if not parts or bare in _LIKE_OPERATORS:
            return func(*args, **kwargs)
        is_kept = bare in _ELEMENTWISE or (bare in _INDEXING and isinstance(parts[0], Joined))
        is_tagged = torch_private.is_pointwise(bare) if "foreach" in name else torch.Tag.pointwise in func.tags
        is_tagged |= bare == "masked_fill"  # element-wise, without torch's tag
        if not (is_kept or is_tagged):
            raise _refusal(bare, parts[0])
        changed = args[0] if name.endswith("_") else ()
        before = [*self._computed(changed, name, args, parts)]
        for each, origins in () if is_kept else before:
            _check_shapes(each, origins)
        result = func(*args, **kwargs)
        after = [*self._computed(result, name, args, parts)]
        for each, origins in () if is_kept else after:
            _check_shapes(each, origins)
        for made, origins in (*after, *before):
            for each in tensors_in(made):
                self._parts[torch_private.storage_identity(each)] = each, _mark(each, origins, name)
        return result

    def _computed(
        self, made: Any, name: str, args: tuple[Any, ...], parts: Sequence[Part]
    ) -> Iterator[tuple[Any, Sequence[Part]]]:
        """Yield what an operator makes or changes with its parts; of lists (``foreach``) each tensor with its own."""
        if "foreach" not in name:
            yield made, parts
            return
        for index, each in enumerate(made or ()):
            columns = [column[index] if isinstance(column, list | tuple) else column for column in args]
            if origins := [*self.parts_in(columns)]:
                yield each, origins


def _check_shapes(made: Any, parts: Sequence[Part]) -> None:
    """Refuse to broadcast parts to another shape: that of the tensors in ``made``."""
    shapes = [part.shape for part in parts]
    if any(each.shape not in shapes for each in tensors_in(made)) and not any(isinstance(p, Joined) for p in parts):
        raise _refusal("broadcasting", parts[0])


def _mark(made: Any, parts: Sequence[Part], name: str) -> Any:
    """Make a tensor that was computed from parts, or overwritten with them, and its base parts; returns the tensor."""
    if type(made) not in (Tensor, nn.Parameter):
        return made
    mark, is_gradient = parts[0].origin
    is_joined = name in ("cat", "stack", "__setitem__") or any(isinstance(part, Joined) for part in parts)
    for each, has_many in ((torch_private.base_of(made), True), (made, is_joined)):
        if type(each) is nn.Parameter and mark_of(each) is None:
            _set_class(each, Shard)
        elif type(each) is Tensor:
            _set_class(each, Joined if has_many else Part)
            vars(each)["origin"] = None if has_many else mark, is_gradient
    return made


def _advice_outside_unit(part: Part) -> str:
    """Return advice for a parameter that is used outside of its unit, by what the model was doing."""
    mark = part.origin[0]
    group, unit, is_running, is_in_forward = mark.group if mark is not None else None, "the model", False, False
    if mark is not None and group is not None:
        name, engine = group.layout.params[mark.index].name, engine_of_unit(group.unit)
        owner = next((each for each in group.unit.members if each.path and name.startswith(f"{each.path}.")), None)
        unit = f"its unit {owner.path!r}" if owner is not None else unit
        is_running = (owner or group.unit.members[0]).num_frames > 0
        is_in_forward = engine is not None and engine.forward.num_frames > 0
    if is_running:
        return (
            f"The forward of {unit} is running, and its modules hold whole parameters. This is the object from before,"
            " which a list, a tuple or a closure holds. Read it as an attribute of its module (torch.nn.ParameterList"
            " for a list), or train under strategy='ddp'."
        )
    inner = "make the inner module that is called a unit as well (auto_wrap_policy=sw.wrap_by_name(...))"
    whole = "set auto_wrap_policy='none', which makes one unit of the model, whose layers may be entered in any way"
    if is_in_forward:
        return (
            f"A module of {unit} was called from outside of that unit's forward, or its forward() in place of the"
            f" module itself: {inner}, or {whole}."
        )
    return (
        f"Compute in the forward of {unit}: call that module, or {inner}. For another method than forward call"
        f" sw.register_fsdp_forward_method(module, name); if it does not call a layer's forward, {whole}."
        " For a loss that is fused with the head call sw.chunk_cross_entropy(model) before sw.parallelize(). A teacher"
        " or target network follows by sw.lerp_parameters(target, source, weight). Numbers that need no gradient"
        " compute inside `with sw.full_parameters(model):`, where parameters are whole. A penalty on weights is the"
        " optimizer's weight_decay, or p.grad.add_(p.detach(), alpha=factor) before its step."
    )


def _describe(part: Part) -> str:
    """Describe the part for an error message."""
    mark, is_gradient = part.origin
    group = mark.group if mark is not None else None
    if mark is None or group is None:
        return "a part of gradients" if is_gradient else "a part of parameters"
    spec = group.layout.params[mark.index]
    return f"{'the gradient of ' if is_gradient else ''}{spec.name!r} (logical shape {list(spec.logical_shape)})"


def _refusal(name: str, part: Part) -> StateError:
    """Make the error for a refused call on a part."""
    bare, is_gradient = _bare(name), part.origin[1]
    if bare in _SCALER_CHECKS:
        return StateError(
            "torch.amp.GradScaler on a parallelized model: each rank would look for inf and nan in its own part of the"
            " gradients, and ranks that find none would step while others skip.\n"
            "  Use sw.GradScaler(), which takes the same arguments."
        )
    if name == _PICKLING:
        advice = (
            "Call state = sw.full_state_dict(model, trainable_only=True) on every rank (all weights without the"
            " option), and save it on rank 0; sw.save(path, model, optimizer) writes a checkpoint to continue from."
        )
    elif torch_private.is_reparametrizing():
        advice = "Prune or parametrize the module before sw.parallelize()."
    elif bare in _RANDOM:
        advice = "Initialise before sw.parallelize(), or inside `with sw.full_parameters(model, writeback=True):`."
    elif is_gradient and bare in _NORMS:
        advice = (
            "Call norm = sw.clip_grad_norm(model, max_norm), which also takes modules, parameters and norm_type; with"
            " max_norm=float('inf') it changes nothing. Where a trainer clips by itself, switch that off and call it"
            " before optimizer.step()."
        )
    elif is_gradient:
        advice = (
            "sw.clip_grad_norm(model, float('inf')) is inf or nan on every rank if a gradient of any rank is."
            " With a strategy alone, sum to_local() and add that up over the ranks by torch.distributed.all_reduce."
            " What needs rows or whole tensors belongs into an optimizer's step (sw.declare_granularity)."
        )
    else:
        advice = _advice_outside_unit(part)
    return StateError(
        f"{bare} of {_describe(part)} on a parallelized model: this rank holds a part of it, so every rank would get a"
        f" different result.\n  {advice} This rank's part as a plain tensor is tensor.to_local()."
    )
