# ruff: noqa: SLF001 - this module is the one place that may
"""The private functions of torch that shardwise calls, each with the reason why no public one will do.

Other modules use private names only on lines that are marked ``noqa: SLF001`` (versions of tensors, operators by name,
registries of modules), import ``torch.utils._pytree``, ``torch.utils._python_dispatch`` and torch's fake tensors, and
call ``torch._foreach_*``. A test keeps the list of modules with marked lines from growing.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.cuda import _gpu_trace
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _functional_call
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.optim.optimizer import _foreach_supported_types
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Number of the backward that runs in this thread, -1 outside of any. There is no public way to ask whether code runs
#: inside a backward (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp).
current_backward: Callable[[], int] = torch._C._current_graph_task_id

#: The sequence number that the next autograd node of this thread will get. There is no public way to read the counter.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

#: The sequence number of an autograd node, in the count of its thread. Nodes have it only under a private name.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")

#: Runs a function when the backward under way has finished, as torch's own DDP and FSDP do.
#: ``Tensor.register_post_accumulate_grad_hook`` cannot replace it: unused parameters never fire.
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

#: The innermost hooks on saved tensors: pack and unpack. There is no public way to call the hooks of a checkpoint.
saved_tensors_hooks_here: Callable[[], tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks,
    False,  # noqa: FBT003 - also where a function is traced
)

#: The callback by which ``torch.compile`` traces this thread's calls; ``None`` outside of it.
#: ``torch.compiler.is_compiling`` is false if torch has given up tracing and runs a call uncompiled.
tracing_callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback

#: The ``DistributedDataParallel`` whose forward is under way, or ``None``; there is no public name.
active_ddp: Callable[[], Any] = functools.partial(getattr, DistributedDataParallel, "_active_ddp_module")

#: The operator that ``__torch_dispatch__`` gets from ``optimizer.zero_grad(set_to_none=False)``.
foreach_zero: Callable[..., Any] = torch.ops.aten._foreach_zero_.default

#: The Newton-Schulz iteration of ``torch.optim.Muon`` for one matrix, without a public name. Overwrites bfloat16 input.
orthogonalized: Callable[..., Any] = _zeropower_via_newtonschulz

#: ``__torch_function__`` of a Tensor subclass that has only ``__torch_dispatch__``.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

#: Context in which Tensor subclasses with ``__torch_function__`` are treated as plain tensors; no public name.
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass

#: Context in which function modes intercept no call, and Tensor subclasses are treated as plain tensors.
without_function_modes: Any = torch._C.DisableTorchFunction


def on_plain_tensors(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function inside :data:`without_torch_function`."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with without_torch_function():
            return function(*args, **kwargs)

    return run


#: The descriptor of ``Tensor.grad``, for a subclass that overrides it. Its class has a private name.
grad: Any = torch._C.TensorBase.grad


@functools.cache
def is_pointwise(name: str) -> bool:
    """Whether all ``aten`` operators of this name on tensors are tagged as element-wise; there is no public schema."""
    packet = getattr(torch.ops.aten, name, None)
    found = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    found = [op for op in found if "Tensor" in str(op._schema) and not any(a.is_out for a in op._schema.arguments)]
    return bool(found) and all(torch.Tag.pointwise in op.tags for op in found)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which ``tensor`` is a view, as the same object while it lives; there is no public name."""
    return tensor._base


def as_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with Tensor subclasses treated as plain tensors; the result is plain.

    ``Tensor.__torch_function__`` would return the subclass; the function that avoids this is private.
    """
    with torch._C.DisableTorchFunctionSubclass():  # torch.compile traces it, unlike _disabled_torch_function_impl
        return func(*args, **kwargs)


def break_graph() -> None:
    """If ``torch.compile`` traces this call, break its graph and run the rest in Python; there is no public name."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()


def never_compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Exclude a function, and the functions that it calls, from ``torch.compile`` after a graph break.

    ``torch.compiler.disable`` would load the compiler, which takes seconds.
    """
    compiler: Any = torch._C._dynamo.eval_frame
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    return function


def empty_subclass(cls: type[Tensor], like: Tensor) -> Any:
    """Make a tensor without memory of a ``__torch_dispatch__`` subclass, with shape, dtype and device of ``like``.

    torch documents ``_make_wrapper_subclass`` for such subclasses, under a private name.
    """
    strides = (0,) * like.dim()
    return Tensor._make_wrapper_subclass(cls, like.shape, strides=strides, dtype=like.dtype, device=like.device)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether the module was returned by ``torch.compile(module)``, or ``module.compile()`` was called."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported, because that takes a second
    return module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def norms(tensors: list[Tensor], dtype: torch.dtype, order: float = 2) -> list[Tensor]:
    """Compute the norm of each tensor in ``dtype``.

    ``torch.nn.utils.get_total_norm`` makes the same foreach call, but in the dtype of the tensors.
    """
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def is_in_distributed_autograd() -> bool:
    """Whether a backward of ``torch.distributed.autograd`` is under way in this process.

    It runs hooks in threads without access to its context; the count of such backwards has a private name.
    """
    if not has_rpc_agent():
        return False
    return int(torch._C._distributed_autograd._get_debug_info()["num_current_backward_passes"]) > 0


#: Whether RPC was started in this process; builds of torch without RPC have no such function.
has_rpc_agent: Callable[[], bool] = getattr(
    getattr(torch._C, "_distributed_rpc", None), "_is_current_rpc_agent_set", lambda: False
)


def num_collectives() -> int:
    """Count the collectives that this process has issued, except those over groups that this library has opened.

    Collectives write tensors without incrementing their version counters, and there is no hook on them.
    """
    from torch.distributed import distributed_c10d

    found = 0
    for group in distributed_c10d._world.pg_map:
        if not group.group_name.startswith("shardwise/"):
            with contextlib.suppress(RuntimeError):  # the backend does not number collectives
                found += group._get_sequence_number_for_group()  # pyrefly: ignore
    return found


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor: its number of in-place writes; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def storage_identity(tensor: Tensor) -> int:
    """Return a number that is equal for two tensors if and only if they share storage.

    ``data_ptr`` would not do, because it is 0 for all meta tensors. The storage of a sparse tensor is that of its
    values. Tensors without storage (opaque ones, those inside ``torch.func``) have 0.
    """
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        if tensor.layout is torch.strided or tensor.is_mkldnn:
            return 0
        with torch.no_grad():
            return storage_identity(tensor._values() if tensor.is_sparse else tensor.values())


def num_holders(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Count the users of the first tensor's storage, and the references to all the tensors.

    Equal results of two calls mean that the user keeps no new reference to the tensors, or to views of the first.
    """
    uses = torch._C._storage_Use_Count(tensors[0].untyped_storage()._cdata)
    return uses, sum(map(sys.getrefcount, tensors))


def backward_under_modes(outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
    """Run ``torch.autograd.backward(outputs, gradients)`` with torch function modes on; ``None``: gradients of one.

    A mode is off while it handles a call, and modes handle ``Tensor.backward`` and ``torch.autograd.backward``. A
    recomputation inside would then use different kernels than the forward.
    """
    keeps_graph = makes_graph = False
    grad_outputs = tuple(gradients) if gradients is not None else tuple(torch.ones_like(output) for output in outputs)
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs), grad_outputs, keeps_graph, makes_graph, (), allow_unreachable=True, accumulate_grad=True
    )


#: Whether code runs inside a transform of ``torch.func`` (``grad``, ``jvp``, ``vmap``); there is no public name.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_in_functional_call() -> bool:
    """Whether ``torch.func.functional_call`` is under way in this thread; only its frame shows it."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return frame is not None


#: Functions of ``torch.nn.utils`` that put other tensors in place of a parameter, or undo this.
_REPARAMETRIZE = {
    *("register_parametrization", "remove_parametrizations", "weight_norm", "spectral_norm", "orthogonal"),
    *("apply", "remove", "global_unstructured"),
}


def is_reparametrizing() -> bool:
    """Whether ``torch.nn.utils`` is pruning or parametrizing a module in this thread; only frames show it."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _REPARAMETRIZE and frame.f_globals.get("__name__", "").startswith("torch.nn.utils."):
            return True
        frame = frame.f_back
    return False


def has_saved_tensor_hooks() -> bool:
    """Whether hooks on saved tensors (``checkpoint``'s, ``save_on_cpu``'s) are active. Only one pair is at a time."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003 - takes no keyword


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own dict of parameters, in which the engine replaces entries; ``named_parameters`` copies them."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own dict of buffers. ``register_buffer`` would change whether a buffer is persistent."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own dict of children. ``named_children`` omits a child that is registered twice."""
    return module._modules


def replica_of(module: nn.Module) -> nn.Module:
    """Make a shallow copy without parameters, as ``torch.nn.DataParallel`` does; RNNs override the method."""
    return module._replicate_for_data_parallel()


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer is part of the state dict; there is no public name."""
    return name not in module._non_persistent_buffers_set


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Callable[..., object]]:
    """The module's dict of forward pre-hooks. ``register_forward_pre_hook`` is too slow for frequent changes."""
    return module._forward_pre_hooks


def hook_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a gradient hook that runs before the tensor's other hooks; ``Tensor.register_hook`` appends it.

    The dict of hooks is rebuilt, because autograd calls them in insertion order, also for an ``OrderedDict``.
    """
    handle = tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    assert hooks is not None
    if len(hooks) > 1:
        before = dict(hooks)
        hooks.clear()
        hooks[handle.id] = before.pop(handle.id)
        hooks.update(before)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether the user registered hooks on a parameter's gradient; there is no public name."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def take_rnn_weights(module: nn.RNNBase) -> list[str]:
    """Take over the list of weights with which an RNN computes, which is separate from its parameters.

    Without the weak references to its parameters an RNN uses the list as it is. With them, it would move gathered
    weights into memory of its own on a GPU, and ``swap_tensors`` would refuse the parameters.

    Returns:
        The names of the weights in the list.
    """
    module._flat_weight_refs = [None] * len(module._flat_weights_names)
    return module._flat_weights_names


def set_ignored_by_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Set the names of parameters that ``DistributedDataParallel(module)`` ignores.

    It reads this private attribute of the module; the method that sets it is private too
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py).
    """
    module.__dict__.setdefault("_ddp_params_and_buffers_to_ignore", names)


def set_refusal_of_fsdp(module: nn.Module, refuse: Callable[[], object]) -> None:
    """Make torch's FSDP1 and FSDP2 (``fully_shard``, ``replicate``) call ``refuse`` when they receive ``module``.

    FSDP1 evaluates ``_is_flat_param`` of each parameter as a condition; FSDP2 reads the registry of composable
    functions of each module. Neither has a public hook before it changes the parameters. FSDP1 evaluates
    ``_fsdp_flattened`` earlier, but optimizers that find it (Prodigy) sum their statistics over the ranks
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_flat_param.py, ``_FlatParameterMeta``;
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/_composable/contract.py).
    """
    refusal = _Refusal(refuse)
    for each in module.modules():
        if next(each.parameters(), None) is not None:
            each.__dict__.setdefault(REGISTRY_KEY, _RefusingRegistry(refuse))
    for parameter in module.parameters():
        parameter.__dict__.setdefault("_is_flat_param", refusal)


class _Refusal:
    def __init__(self, refuse: Callable[[], object]) -> None:
        self._refuse = refuse

    def __bool__(self) -> bool:
        self._refuse()
        return True


class _RefusingRegistry(dict[str, Any]):
    """Registry of composable functions that have been applied to a module; raises if searched for one that shards."""

    def __init__(self, refuse: Callable[[], object]) -> None:
        super().__init__()
        self._refuse = refuse

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            self._refuse()
        return super().__contains__(name)


def parameters_of_ddp_forward() -> list[nn.Parameter]:
    """The parameters of the ``DistributedDataParallel`` whose forward is under way; none outside of one."""
    active = active_ddp()
    return active._module_parameters if active is not None else []


def hook_innermost(optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Run ``before`` as the last hook before a step and ``after`` as the first hook after it; call it before each step.

    ``register_step_pre_hook`` and ``register_step_post_hook`` can only append.
    """
    first: Any = optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks.pop(-1, None)
    optimizer._optimizer_step_pre_hooks[-1] = before  # torch's own keys are not negative
    first[-1] = after
    first.move_to_end(-1, last=False)


def take_scale_as_attribute(optimizer: torch.optim.Optimizer) -> None:
    """Make ``GradScaler.step`` set its findings on the optimizer and always step it, as with fused optimizers.

    Otherwise the scaler raises an unclear error if it finds no gradients. It reads this private attribute
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py, ``step``).
    """
    optimizer._step_supports_amp_scaling = True  # pyrefly: ignore[missing-attribute]


def read_scale_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Make ``GradScaler.step`` read its findings on the host and skip a step, as with optimizers that are not fused.

    A fused optimizer on the host would read the GPU's finding from a copy without waiting for it. The private attribute
    is that of :func:`take_scale_as_attribute`.
    """
    optimizer._step_supports_amp_scaling = False  # pyrefly: ignore[missing-attribute]


def allow_foreach(cls: type[Tensor]) -> None:
    """Allow optimizers to choose their foreach and fused implementations for parameters of this class.

    They do so only for a list of exact types; the public alternative is to pass ``foreach=True`` each time
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py, ``_default_to_fused_or_foreach``).
    """
    _foreach_supported_types.append(cls)


def wrapped_tensors(tensor: Tensor) -> dict[str, Tensor] | None:
    """Return the plain tensors that a tensor subclass wraps, by attribute; ``None`` for a plain tensor.

    torch requires ``__tensor_flatten__`` of subclasses that can be compiled; the function that checks for it is private
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_python_dispatch.py).
    """
    if not is_traceable_wrapper_subclass(tensor):
        return None
    wrapped = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: each for name, each in wrapped.items() if isinstance(each, Tensor)}  # a DTensor adds its mesh


def state_after_step(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """Return the state that ``optimizer`` has for a parameter shaped as ``like`` after a step with a gradient of zeros.

    There is no public way to make an optimizer's empty state. The step is made by a copy of the optimizer with a new
    parameter, so that nothing else changes.
    """
    parameter = nn.Parameter(torch.zeros_like(like))
    parameter.grad = torch.zeros_like(like)
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # schedulers set a bound method there
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    made.state = defaultdict(dict)
    made.param_groups = [{**settings, "params": [parameter]}]
    made.step()
    return made.state[parameter]


def recorded_collectives() -> bytes:
    """Dump torch's flight recorder of NCCL without stacks, for ``torchfrtrace``; empty on a CPU.

    This asks the device which collectives it has completed, without waiting. Publicly, torch writes a recorder only
    when its own watchdog times out.
    """
    if not torch.cuda.is_initialized():
        return b""
    library: Any = torch._C._distributed_c10d
    return library._dump_nccl_trace(True, False, False)  # noqa: FBT003  collectives, stacks, only those not done


@contextlib.contextmanager
def memory_history(path: str) -> Iterator[None]:
    """Record the CUDA allocator's history inside the context, and write it to ``path`` at the end, also after an error.

    Torch documents both calls (docs.pytorch.org/docs/stable/torch_cuda_memory.html) under private names.
    """
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)


# -- for shardwise.testing.streams, which replaces names of torch through ``put(owner, name, value)``


def schema_of(op: Any) -> tuple[str, list[tuple[str, bool, bool]]]:
    """Return an operator's name, and of each argument its name, whether it is aliased, and whether it is written."""
    arguments = op._schema.arguments
    return op._schema.name, [
        (a.name, a.alias_info is not None, bool(a.alias_info and a.alias_info.is_write)) for a in arguments
    ]


def replace_backward(put: Callable[..., None], around: Callable[[Any], Any]) -> None:
    """Replace the function that runs every backward; ``torch.autograd`` has no hook around it."""
    run = around(torch.autograd.graph._engine_run_backward)
    put(torch.autograd, "_engine_run_backward", run)
    put(torch.autograd.graph, "_engine_run_backward", run)


def replace_wrapper_factory(put: Callable[..., None], around: Callable[[Any], Any]) -> None:
    """Replace the function that makes tensors without memory (:func:`empty_subclass`)."""
    put(Tensor, "_make_wrapper_subclass", staticmethod(around(Tensor._make_wrapper_subclass)))


def replace_in_device_contexts(put: Callable[..., None], replaced: Mapping[Any, Any]) -> None:
    """Make ``with torch.device(...)`` call the replacements of factories; it only recognizes torch's own functions."""
    plain = DeviceContext.__torch_function__

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in replaced:
            return plain(self, func, types, args, kwargs)
        return replaced[func](
            *args, **{"device": self.device, **{k: v for k, v in (kwargs or {}).items() if v is not None}}
        )

    put(DeviceContext, "__torch_function__", call)


@contextlib.contextmanager
def no_autocast_on_meta() -> Iterator[None]:
    """Turn ``torch.autocast("meta", enabled=False)`` into nothing; torch raises, as it does not know the device.

    Models switch autocast off for the device type of their inputs, around tables of positions.
    """
    plain = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
        is_off = device_type == "meta" and not (args[0] if args else options.get("enabled", True))
        plain(self, "cpu" if is_off else device_type, dtype, *args, **options)

    torch.autocast.__init__ = init
    try:
        yield
    finally:
        torch.autocast.__init__ = plain


@contextlib.contextmanager
def noticed_meta_contexts() -> Iterator[list[None]]:
    """Yield a list that is not empty while a function is called in a ``with torch.device("meta")`` inside this one."""
    plain, inside = DeviceContext.__torch_function__, list[None]()

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type != "meta":
            return plain(self, func, types, args, kwargs)
        inside.append(None)
        try:
            return plain(self, func, types, args, kwargs)
        finally:
            inside.pop()

    DeviceContext.__torch_function__ = call
    try:
        yield inside
    finally:
        DeviceContext.__torch_function__ = plain


class GroupedProducts(TorchFunctionMode):
    """Computes shapes of the grouped products of experts on meta in every dtype; torch's own refuses all but bf16.

    A mode sees the private function alone, which ``F.grouped_mm`` calls
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/functional.py).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm and args[0].is_meta and args[0].dtype is not torch.bfloat16:
            rows, stack = args[:2]
            if (rows.dim(), stack.dim()) == (2, 3):  # the rows of all experts, and a matrix for each
                return rows @ stack[0]
        return func(*args, **(kwargs or {}))


#: Functions of ``torch.cuda`` that start the device, or keep it busy; they do nothing on a simulated device.
CUDA_STARTS = "_lazy_init", "_sleep"


@contextlib.contextmanager
def traced_gpu(callbacks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """Make torch call ``callbacks`` for events on GPUs, as its own sanitizer does. Names as ``event_record``."""
    registries = {
        name: getattr(_gpu_trace, "".join(map(str.title, name.split("_"))) + "Callbacks") for name in callbacks
    }
    torch._C._activate_gpu_trace()
    for name, callback in callbacks.items():
        registries[name].add_callback(callback)
    try:
        yield
    finally:
        for name, callback in callbacks.items():
            registries[name].callback_list.remove(callback)
