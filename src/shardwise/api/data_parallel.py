"""Data parallelism in one process with one thread per device, as ``torch.nn.DataParallel``.

Each forward scatters the batch, replicates the parameters to the devices, runs the replicas, and gathers their outputs.
Backward adds the replicas' gradients, in the order of the replicas, into the parameters of the first device. One Python
interpreter runs all replicas, and parameters are copied in every step: ``ddp`` with one process per device is faster.

A step makes five exchanges with the first device, which ``sw.record_collectives`` shows (axis ``devices``):

=============  ===========================  ===============================================
event          unit                         the first device
=============  ===========================  ===============================================
``scatter``    ``inputs``                   sends each replica its part
``broadcast``  ``parameters``, ``buffers``  sends them to every replica
``gather``     ``outputs``                  receives the outputs of every replica
``scatter``    ``gradients of outputs``     sends each replica the gradient of its output
``reduce``     ``gradients``                receives the gradients of every replica and adds them
=============  ===========================  ===============================================

The first device also runs everything after the model (a loss outside of it), stores the gradients and the optimizer's
state, and runs the optimizer's step. The other devices store copied parameters from forward to backward.

Replicas on the same device run one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.api.model import attach_recorder
from shardwise.comm.base import CollectiveEvent, Recorder
from shardwise.nested import parts_of, replace_tensors, tensors_in
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.replacement import Replacement

#: Number of replicas on a machine without GPUs if no devices are given.
CPU_REPLICAS = 2

Devices = Sequence[torch.device | str | int]


class DataParallel(nn.Module):
    """Run ``module`` on parts of a batch, one part per device.

    Args:
        module: The model, with parameters and buffers on the first device.
        devices: By default all GPUs, or the CPU twice. Replicas on the same device run in one thread, in order.
        dim: Dimension along which input tensors are split and outputs concatenated. Tensors without dimensions, and
            other values, go to every replica unchanged; outputs without dimensions are stacked to a vector.

    Attributes:
        module: The model as given; names in ``state_dict()`` begin with ``module.``.

    Raises:
        PlanError: A parameter or buffer is not on the first device.
    """

    def __init__(self, module: nn.Module, devices: Devices | None = None, dim: int = 0) -> None:
        super().__init__()
        self.module = module
        self.devices = _resolve(devices)
        self.dim = dim
        _check_placement(module, self.devices[0])
        self._exchanges = Exchanges()
        attach_recorder(self, self._exchanges)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs on the whole batch, on the first device.

        Raises:
            Exception: The error of the first replica that failed, with a note that names the replica.
        """
        parts = scatter((args, kwargs), len(self.devices), self.dim)
        outputs = _run_parts(self.module, parts, self.devices, lambda replica: replica, self._exchanges)
        return gather(outputs, self.devices[0], self.dim, exchanges=self._exchanges)


class Exchanges(Recorder):
    """Records the tensors sent between the first replica and the others."""

    def __init__(self) -> None:
        super().__init__("devices")

    def note(self, kind: str, unit: str, tensors: Iterable[Tensor]) -> None:
        """Record one event for each dtype of ``tensors``, which the replicas other than the first receive or send."""
        if not self._listeners:
            return
        events: dict[torch.dtype, CollectiveEvent] = {}
        for tensor in tensors:
            if tensor.dtype not in events:
                events[tensor.dtype] = self._record_event(kind, unit, tensor.dtype, 0)
            events[tensor.dtype].sent_bytes += tensor.nbytes


def _run_parts(
    model: nn.Module,
    parts: Sequence[Any],
    devices: Sequence[torch.device],
    call: Callable[[nn.Module], Any],
    exchanges: Exchanges,
) -> list[Any]:
    """Make a replica for each part, run ``call(replica)`` on it, and return the outputs."""
    devices = devices[: len(parts)]
    parts = [replace_tensors(part, functools.partial(_to, device)) for part, device in zip(parts, devices, strict=True)]
    exchanges.note("scatter", "inputs", tensors_in(parts[1:]))
    for tensor in tensors_in(parts[1:]):
        if tensor.requires_grad and tensor.dim():
            tensor.register_hook(lambda grad: exchanges.note("gather", "gradients of inputs", [grad]))
    replicas = replicate(model, devices, exchanges)
    outputs = _run([_Job(call(replica), *part) for replica, part in zip(replicas, parts, strict=True)], devices)
    _keep_buffers(model, replicas[0])
    exchanges.note("gather", "outputs", tensors_in(outputs[1:]))
    return outputs


def install(model: nn.Module, devices: Devices | None = None) -> str:
    """Make every forward of ``model``, whose parameters the engine holds, run as replicas.

    Outputs without dimensions are averaged, weighted by the samples of the replicas: a mean over the whole batch.

    Returns:
        A line for the model's summary that says which device does what.

    Raises:
        PlanError: As :class:`DataParallel`.
    """
    resolved = _resolve(devices)
    _check_placement(model, resolved[0])
    exchanges = Exchanges()
    attach_recorder(model, exchanges)
    _ReplicatedForward(model, resolved, exchanges).install()
    return (
        f"replicas on {', '.join(map(str, resolved))}: the first device keeps the parameters, gradients and optimizer"
        " state, sends inputs and parameters, receives outputs, adds the gradients of all replicas and makes the"
        " optimizer's step; the others only run forward and backward of their part"
    )


class _ReplicatedForward(Replacement):
    def __init__(self, model: nn.Module, devices: tuple[torch.device, ...], exchanges: Exchanges) -> None:
        super().__init__(model)
        self._devices = devices
        self._exchanges = exchanges

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.module
        parts = scatter((args, kwargs), len(self._devices), 0)
        outputs = _run_parts(model, parts, self._devices, _WithoutHooks, self._exchanges)
        return gather(outputs, self._devices[0], 0, samples=_samples(parts), exchanges=self._exchanges)


class _WithoutHooks:
    """A replica's forward without the hooks of the model, which run once around all replicas."""

    def __init__(self, replica: nn.Module) -> None:
        replica.__dict__.pop("forward", None)  # the replaced forward of the model
        self._replica = replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replica.forward(*args, **kwargs)


def _samples(parts: Sequence[Any]) -> list[int]:
    """Return the number of samples of each part, or ``[]`` if the parts differ and a part's tensors disagree."""
    sizes = [{tensor.shape[0] for tensor in tensors_in(part) if tensor.dim()} for part in parts]
    if all(each == sizes[0] for each in sizes):
        return [1] * len(parts)
    return [each.pop() for each in sizes] if all(len(each) == 1 for each in sizes) else []


def _resolve(devices: Devices | None) -> tuple[torch.device, ...]:
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.device("cuda", index) for index in range(count)] or ["cpu"] * CPU_REPLICAS
    if not devices:
        raise PlanError("DataParallel(devices=[]): expected at least one.\n  Name devices, or leave it out.")
    return tuple(torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in devices)


def _check_placement(module: nn.Module, first: torch.device) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not _is_on(tensor, first):
            raise PlanError(
                f"DataParallel: {name!r} is on {tensor.device}, the first device is {first}.\n"
                f"  Call module.to({str(first)!r}) first."
            )


# -- parameters


def replicate(module: nn.Module, devices: Sequence[torch.device], exchanges: Exchanges) -> list[nn.Module]:
    """Make shallow copies of ``module`` whose parameters pass their gradients to the module's parameters.

    A replica on another device than a parameter gets a copy of it; a replica on the same device shares it. The first
    replica uses the module's buffers, the others use copies.
    """
    modules = list(module.modules())
    index_of = {id(each): index for index, each in enumerate(modules)}
    parameters = {id(p): p for each in modules for p in torch_private.parameters_of(each).values() if p is not None}
    spread = _Spread.apply(tuple(devices), exchanges, *parameters.values()) if parameters else ()
    count = len(parameters)
    exchanges.note("broadcast", "parameters", spread[count:])
    replicas = []
    copied: list[Tensor] = []
    for index, device in enumerate(devices):
        here = dict(zip(parameters, spread[index * count : (index + 1) * count], strict=True))
        copies = [torch_private.replica_of(each) for each in modules]
        buffers: dict[int, Tensor] = {}
        for each, copy in zip(modules, copies, strict=True):
            for name, child in torch_private.children_of(each).items():
                torch_private.children_of(copy)[name] = copies[index_of[id(child)]] if child is not None else None
            for name, parameter in torch_private.parameters_of(each).items():
                if parameter is None:
                    torch_private.parameters_of(copy)[name] = None
                else:
                    setattr(copy, name, here[id(parameter)])
            for name, buffer in torch_private.buffers_of(each).items():
                if index and buffer is not None:  # writes to it stay in the replica
                    if id(buffer) not in buffers:
                        buffers[id(buffer)] = buffer.detach().to(device, copy=True)
                    torch_private.buffers_of(copy)[name] = buffers[id(buffer)]
        copied += buffers.values()
        replicas.append(copies[0])
    exchanges.note("broadcast", "buffers", copied)
    return replicas


class _Spread(torch.autograd.Function):
    """Copies each parameter to each device; backward sums the copies' gradients in the order of the devices."""

    @staticmethod
    def forward(
        ctx: Any, devices: tuple[torch.device, ...], exchanges: Exchanges, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchanges = exchanges
        ctx.homes = [parameter.device for parameter in parameters]
        ctx.set_materialize_grads(False)
        fixed = [i for i, parameter in enumerate(parameters) if not parameter.requires_grad]
        spread = [p.view_as(p) if _is_on(p, device) else p.to(device) for device in devices for p in parameters]
        ctx.mark_non_differentiable(*(spread[k * len(parameters) + i] for k in range(len(devices)) for i in fixed))
        return tuple(spread)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        count = len(ctx.homes)
        ctx.exchanges.note("reduce", "gradients", (grad for grad in grad_outputs[count:] if grad is not None))
        sums: list[Tensor | None] = []
        for index, home in enumerate(ctx.homes):
            total = None
            for grad in grad_outputs[index::count]:
                if grad is not None:
                    total = grad.to(home) if total is None else total + grad.to(home)
            sums.append(total)
        return (None, None, *sums)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device. All CPU devices are the same, whatever their index."""
    return tensor.device.type == device.type == "cpu" or tensor.device == device


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if _is_on(tensor, device) else tensor.to(device)


def _keep_buffers(module: nn.Module, replica: nn.Module) -> None:
    """Give the module the buffers that the first replica replaced instead of writing to them."""
    for own, copy in zip(module.modules(), replica.modules(), strict=True):
        torch_private.buffers_of(own).update(torch_private.buffers_of(copy))


# -- running


class _Job:
    """One replica's call, with its output or error."""

    def __init__(self, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.call, self.args, self.kwargs = call, args, kwargs
        self.output: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.output = self.call(*self.args, **self.kwargs)
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            self.error = error


def _run(jobs: Sequence[_Job], devices: Sequence[torch.device]) -> list[Any]:
    """Run the jobs of one device in order, and those of different devices in parallel; return the outputs."""
    context = _Context(devices[0].type)
    by_device: dict[torch.device, list[_Job]] = {}
    for device, job in zip(devices, jobs, strict=True):
        by_device.setdefault(device, []).append(job)

    def work(device: torch.device, mine: Sequence[_Job]) -> None:
        with context.again(device):
            for job in mine:
                job.run()

    if len(by_device) == 1:
        work(devices[0], jobs)
    else:
        threads = [threading.Thread(target=work, args=pair) for pair in by_device.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, (device, job) in enumerate(zip(devices, jobs, strict=True)):
        if job.error is not None:
            job.error.add_note(f"in replica {index} of {len(jobs)}, on {device}")
            raise job.error
    return [job.output for job in jobs]


class _Context:
    """The caller's thread-local state (grad mode, autocast), to be set in worker threads."""

    def __init__(self, device_type: str) -> None:
        self._grad = torch.is_grad_enabled()
        self._type = device_type
        self._autocast = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    @contextlib.contextmanager
    def again(self, device: torch.device) -> Iterator[None]:
        """Set the state in the current thread, with ``device`` as the current device."""
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(
                torch.autocast(self._type, dtype=self._dtype, enabled=self._autocast, cache_enabled=False)
            )
            yield


# -- batches


def scatter(value: tuple[tuple[Any, ...], Mapping[str, Any]], count: int, dim: int) -> list[Any]:
    """Split ``value`` into at most ``count`` parts: as many as ``Tensor.chunk`` gives for its tensors.

    Raises:
        StateError: The tensors give different numbers of parts.
    """
    counts = {len(tensor.chunk(count, dim)) for tensor in tensors_in(value) if tensor.dim()}
    if len(counts) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(value))
        raise StateError(
            f"DataParallel: the batch's tensors {shapes} cannot be cut into as many parts along dim {dim}.\n"
            "  Give them the same number of samples."
        )
    num_parts = counts.pop() if counts else 1

    def part(index: int) -> Any:
        return replace_tensors(value, lambda tensor: tensor.chunk(count, dim)[index] if tensor.dim() else tensor)

    return [part(index) for index in range(num_parts)]


def _rebuild(like: Any, items: Sequence[Any]) -> Any:
    """``items`` in a container like ``like``."""
    if isinstance(like, Mapping):
        kind: Any = type(like)
        return kind(dict(zip(like, items, strict=True)))
    if isinstance(like, (tuple, list)):
        return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
    names = [field.name for field in dataclasses.fields(like)]
    return dataclasses.replace(like, **dict(zip(names, items, strict=True)))


def gather(
    outputs: Sequence[Any],
    device: torch.device,
    dim: int,
    *,
    samples: Sequence[int] | None = None,
    exchanges: Exchanges | None = None,
) -> Any:
    """Combine the replicas' outputs into one output on ``device``.

    Args:
        outputs: Outputs of the replicas, in order.
        device: Device of the result.
        dim: Dimension along which tensors are concatenated.
        samples: Number of samples of each replica, by which means of tensors without dimensions are weighted. With
            ``None`` such tensors are stacked to a vector.
        exchanges: Records the gradients that backward sends to the replicas.

    Raises:
        StateError: The outputs do not have the same structure, or ``samples`` is needed and empty.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        names = ", ".join(type(output).__name__ for output in outputs)
        raise StateError(f"DataParallel: the replicas gave {names}.\n  Let every replica give the same form.")
    if isinstance(first, Tensor):
        joined = _join([output.to(device) for output in outputs], dim, samples)
        if exchanges is not None and joined.requires_grad and len(outputs) > 1:
            _note_gradients(exchanges, joined, outputs)
        return joined
    # A set has no order in which the replicas' elements could be matched.
    columns = [[] if isinstance(output, set) else list(parts_of(output) or ()) for output in outputs]
    if not columns[0]:
        return first if all(output == first for output in outputs) else list(outputs)
    if len({len(column) for column in columns}) > 1:
        raise StateError("DataParallel: the replicas gave containers of different lengths.\n  Let them give the same.")
    return _rebuild(
        first, [gather(row, device, dim, samples=samples, exchanges=exchanges) for row in zip(*columns, strict=True)]
    )


def _join(values: list[Tensor], dim: int, samples: Sequence[int] | None) -> Tensor:
    if values[0].dim():
        return torch.cat(values, dim)
    return torch.stack(values) if samples is None or not values[0].is_floating_point() else _mean(values, samples)


def _note_gradients(exchanges: Exchanges, joined: Tensor, outputs: Sequence[Tensor]) -> None:
    """Record the gradients that backward sends to the replicas that gave ``outputs[1:]``."""
    shapes = [output.shape for output in outputs[1:]]
    joined.register_hook(
        lambda grad: exchanges.note(
            "scatter", "gradients of outputs", (grad.new_empty(s, device="meta") for s in shapes)
        )
    )


def _mean(values: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    if not samples:
        raise StateError(
            "DataParallel: the replicas' losses cannot be averaged: the batch is cut unevenly, and its tensors do not"
            " say how many samples each replica had.\n"
            "  Give all tensors the same number of samples, or one that the number of devices divides."
        )
    stacked = torch.stack(list(values))
    if len(set(samples)) == 1:
        return stacked.mean()
    return (stacked * (stacked.new_tensor(samples) / sum(samples))).sum()
