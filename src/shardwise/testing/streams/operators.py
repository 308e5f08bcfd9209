"""Operators as kernels: the bytes that each operator reads and writes, and host waits for its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shardwise import torch_private
from shardwise.measure.shapes import tensors_in
from shardwise.testing.streams.detector import Detector, memory_of, side_of
from shardwise.testing.streams.memory import Side

#: Operators that change a tensor's storage or read its shape, but access no element.
_TOUCH_NOTHING = {"aten::set_", "aten::resize_", "aten::record_stream", "aten::_unsafe_view", "aten::is_same_size"}
#: Operators whose results are not written.
_LEAVE_UNWRITTEN = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
    "aten::empty_permuted",
}
#: Operators for which the host waits, because it reads the result, or a size that only the device knows.
_WAITED_FOR = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"),
    *("aten::unique_consecutive", "aten::is_nonzero", "aten::equal", "aten::_linalg_check_errors"),
}
_COPIES = {"aten::_to_copy", "aten::clone"}


@dataclass(frozen=True)
class _Schema:
    """The arguments in an operator's schema, by position and by name.

    Attributes:
        name: Name such as ``aten::add_``.
        written: Arguments that the operator writes.
        viewed: Arguments that are neither read nor written, because the result is a view of them.
        is_like: The operator uses only shapes and dtypes of its arguments.
    """

    name: str
    written: frozenset[int | str]
    viewed: frozenset[int | str]
    is_like: bool

    @classmethod
    def of(cls, operator: Any) -> Self:
        name, arguments = torch_private.schema_of(operator)
        written: set[int | str] = set()
        viewed: set[int | str] = set()
        for index, (argument, is_alias, is_written) in enumerate(arguments):
            if is_alias:
                (written if is_written else viewed).update((index, argument))
        is_like = name.endswith("_like") or name.startswith("aten::new_")
        return cls(name, frozenset(written), frozenset(viewed), is_like)


class Watch(torch_private.TorchDispatchMode):
    """A mode that reports every operator of the thread that enters it to the detector."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector
        self._schemas: dict[Any, _Schema] = {}
        self._was_watched: list[bool] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false, because code under the detector runs eagerly and needs no protection from compilation."""
        return False

    def __enter__(self) -> Self:
        self._was_watched.append(self._detector.local.is_watched)
        self._detector.local.is_watched = True
        return super().__enter__()

    def __exit__(self, *error: object) -> None:  # pyrefly: ignore[bad-override] - given in order
        self._detector.local.is_watched = self._was_watched.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._detector.local.num_unobserved:
            return func(*args, **kwargs)
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = _Schema.of(func)
        stream = self._detector.local.stream or self._detector.default
        if stream.pending and schema.name not in _TOUCH_NOTHING:
            stream.deliver()  # the kernel runs after the collectives of its stream
        made = func(*args, **kwargs)
        if schema.name.startswith("c10d::"):
            self._sent(schema.name, args, kwargs)
        else:
            self._seen(schema, args, kwargs, made)
        return made

    def _sent(self, name: str, args: Any, kwargs: Any) -> None:
        """Note a call of ``torch.distributed`` outside of ``NcclComm``.

        ``GlooComm`` sends and receives host memory. A collective of the program on tensors of the device counts as one
        of NCCL for which the current stream waits.
        """
        tensors = tensors_in([*args, *kwargs.values()])
        is_message, is_received = "send" in name or "recv" in name, "recv" in name
        if not any(side_of(tensor) is Side.DEVICE for tensor in tensors):
            self._detector.on_host(name, [] if is_received else tensors, tensors if is_received else [])
        elif is_message:
            self._detector.mismatch(f"device memory given to Gloo by {name}")
        else:
            self._detector.launch(name, tensors, tensors)

    def _seen(self, schema: _Schema, args: Any, kwargs: Any, made: Any) -> None:
        detector = self._detector
        tensors, reads, writes = _arguments(schema, args, kwargs)
        if any(tensor.is_meta for tensor in tensors):
            return
        side = detector.local.side
        is_on_device = any(side_of(tensor) is Side.DEVICE for tensor in tensors)
        touches = schema.name not in _TOUCH_NOTHING
        if side is None and not is_on_device:
            if touches and any(memory_of(tensor) is not None for tensor in tensors):
                detector.on_host(schema.name, reads, writes)
            return
        new = _new_tensors(tensors, made)
        for tensor in new:
            if memory_of(tensor) is None:
                detector.make(tensor.untyped_storage(), side or Side.DEVICE)
        if not touches or self._is_transfer(schema.name, args, kwargs, new):
            return
        if schema.name not in _LEAVE_UNWRITTEN:
            writes += new
        if is_on_device:
            self._kernel(schema.name, args, tensors, reads, writes)
        elif side is Side.DEVICE:
            detector.launch(schema.name, [], writes)

    def _is_transfer(self, name: str, args: Any, kwargs: Any, new: list[Tensor]) -> bool:
        """Note a copy between host and device, and return whether the operator is one."""
        if name == "aten::copy_":
            target, source = args[:2]
            non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        elif name in _COPIES and new and self._detector.local.side is not None:
            target, source = new[0], args[0]
            non_blocking = self._detector.local.non_blocking
        else:
            return False
        is_up, is_down = (side_of(tensor) is Side.DEVICE for tensor in (target, source))
        if is_up == is_down:
            return False
        transfer(self._detector, name, target, source, non_blocking=non_blocking)
        return True

    def _kernel(self, name: str, args: Any, tensors: list[Tensor], reads: list[Tensor], writes: list[Tensor]) -> None:
        detector = self._detector
        # Scalars may be on the host. Tensors without known memory were made inside an operator, not by the program.
        foreign = [t for t in tensors if t.dim() and t.numel() and side_of(t) is not Side.DEVICE and memory_of(t)]
        is_index = name.startswith("aten::index")
        if foreign and not is_index:
            detector.mismatch(f"{name} takes tensors of the host and of the device")
        detector.launch(name, [t for t in reads if side_of(t) is Side.DEVICE], writes)
        if name in _WAITED_FOR:
            detector.host_waits(name)
        elif is_index and (foreign or any(t.dtype is torch.bool for t in tensors_in(args[1:2]))):
            detector.host_waits(f"{name} by {'indices of the host' if foreign else 'a mask'}")


def transfer(detector: Detector, name: str, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
    """Note a copy between host and device on the current stream.

    The driver has read pageable memory when the call returns. A copy to pageable memory, and any copy without
    ``non_blocking=True``, has ended when the call returns.
    """
    is_up = side_of(target) is Side.DEVICE
    on_host = source if is_up else target
    memory = memory_of(on_host) or detector.make(on_host.untyped_storage(), Side.HOST)
    is_pinned = memory.side is Side.PINNED
    if is_up and not is_pinned:
        detector.on_host(f"{name} from pageable memory", [source], [])
        detector.launch(name, [], [target])
    else:
        detector.launch(name, [source], [target])
    if not non_blocking or not (is_up or is_pinned):
        detector.host_waits(f"{name} {'from' if is_up else 'to'} {memory.side.value}")


def _arguments(schema: _Schema, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """All tensors among an operator's arguments, the tensors that it reads, and the tensors that it writes."""
    inputs: list[Tensor] = []
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        tensors = tensors_in([value])
        inputs += tensors
        if not schema.is_like and key not in schema.viewed:
            (writes if key in schema.written else reads).extend(tensors)
    return inputs, reads, writes


def _new_tensors(tensors: list[Tensor], made: Any) -> list[Tensor]:
    """The results of an operator that are not views of its arguments."""
    known = {torch_private.storage_identity(tensor) for tensor in tensors}
    results = [tensor for tensor in tensors_in([made]) if not tensor.is_meta]
    return [tensor for tensor in results if torch_private.storage_identity(tensor) not in known]
