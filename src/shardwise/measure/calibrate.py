"""Measure this machine for the planner: products, attention, element-wise work, the optimizer, links between ranks.

All ranks measure at the same time, because ranks on one machine share caches and memory in training too. Rank 0's
tables are written. Weights are used in turn from several copies that are together larger than the caches, because a
training step uses the weights of all other layers before it returns to a layer.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.axes import open_comms
from shardwise.comm.base import Comm
from shardwise.comm.dtype import dtype_name
from shardwise.cost.measured import (
    FORMAT,
    AttentionTime,
    LinkTime,
    Measured,
    OperationTime,
    ProductTime,
    UpdateTime,
)

#: Bytes of all copies of weights together.
_COLD_BYTES = 96 << 20
_ROWS = (64, 256, 1024, 4096, 16384)
_WIDTHS = (256, 1024, 4096, 8192)
#: Rows, inner dimension and columns of a product with an odd number of columns, like GPT-2's vocabulary. The table also
#: has this product with one column more.
_ODD = (16384, 1024, 8191)
#: Length of a sequence, number of sequences, heads, width of a head.
_ATTENTION = ((64, 4, 8, 64), (64, 4, 8, 128), (256, 2, 8, 64), (256, 2, 8, 128), (1024, 1, 8, 64), (4096, 1, 8, 128))
#: The same on a GPU. A short sequence does not fill a GPU, so its time is not proportional to the pairs of tokens.
_ATTENTION_ON_GPU = (
    *((256, 32, 16, 64), (512, 32, 16, 64), (1024, 16, 16, 64), (1024, 8, 32, 128), (2048, 8, 16, 64)),
    *((2048, 4, 32, 128), (4096, 4, 16, 64), (4096, 2, 32, 128), (8192, 1, 32, 128)),
)
_NUMELS = tuple(1 << bits for bits in (14, 17, 20, 22, 24))
_NUMELS_ON_GPU = (*_NUMELS, 1 << 26)
#: Number of calls that a GPU gets without waiting in between, as in training.
_BURST = 20
#: Elements of a parameter for optimizer steps.
_UPDATES = tuple(1 << bits for bits in (10, 16, 20, 22, 23))
_LINK_BYTES = tuple(1 << bits for bits in (13, 17, 20, 23, 26))
#: Elements of the last dimension of element-wise operations.
_ROW = 1024


@dataclass
class Clock:
    """Times calls on a device.

    Attributes:
        device: The device.
        align: Called before each measurement, so that ranks begin together.
        budget_s: Seconds for which one measurement repeats its call.
    """

    device: torch.device
    align: Callable[[], None]
    budget_s: float = 0.12

    def seconds(self, call: Callable[[], Any], *, least: int = 3) -> float:
        """The lower quartile of a call's times, after a warm-up call. Other work on the machine only adds time."""
        num_calls = _BURST if self.device.type == "cuda" else 1
        call()
        self._synchronise()
        self.align()
        times: list[float] = []
        end = time.perf_counter() + self.budget_s
        while len(times) < least or (len(times) < 40 and time.perf_counter() < end):
            start = time.perf_counter()
            for _ in range(num_calls):
                call()
            self._synchronise()
            times.append((time.perf_counter() - start) / num_calls)
        return low(times)

    def both(self, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> tuple[float, float]:
        """The lower quartile of a forward's times, and of the times of the backward that follows each forward."""
        if self.device.type == "cuda":
            return self._both_on_gpu(forward, backward)
        made: list[Any] = []
        times: list[float] = []

        def ahead() -> None:
            made[:] = [forward()]

        def back() -> None:
            ahead()
            self._synchronise()
            start = time.perf_counter()
            backward(made[0])
            self._synchronise()
            times.append(time.perf_counter() - start)

        forward_s = self.seconds(ahead)
        self.seconds(back)
        return forward_s, low(times[1:])

    def _both_on_gpu(self, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> tuple[float, float]:
        """Time a burst of backwards, after their forwards: about two milliseconds of forwards, at least two."""
        forward_s = self.seconds(forward)
        num_calls = max(2, min(_BURST, int(2e-3 / forward_s)))
        times = []
        for _ in range(4):  # the first is a warm-up
            made = [forward() for _ in range(num_calls)]
            self._synchronise()
            start = time.perf_counter()
            while made:
                backward(made.pop())
            self._synchronise()
            times.append((time.perf_counter() - start) / num_calls)
        return forward_s, low(times[1:])

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def low(times: Sequence[float]) -> float:
    """The lower quartile of times."""
    return sorted(times)[len(times) // 4]


def calibrate(device: torch.device, *, dtypes: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure this machine. All ranks of the process group, if there is one, must call.

    Args:
        device: The device of this rank.
        dtypes: Short names of the dtypes of products; ``None``: fp32, and on CUDA also bf16.

    Returns:
        The content of the file (``cost.measured``), on every rank.

    Collective:
        The measured collectives, on all ranks of the world, and a small all-reduce before every measurement.
    """
    comms = open_comms(device) if torch.distributed.is_initialized() else None
    clock = Clock(device, _barrier(comms[1]) if comms is not None else lambda: None)
    chosen = [_DTYPES[name] for name in dtypes or (("fp32", "bf16") if device.type == "cuda" else ("fp32",))]
    num_ranks = comms[0].size if comms is not None else 1
    # Everything is measured twice: a disturbance of one pass rarely affects the same row of the other pass.
    first, second = (
        Measured(
            num_ranks=num_ranks,
            launch_s=_launch_s(device),
            shared=_shared(clock, comms[0]) if comms is not None and num_ranks > 1 else 0.0,
            products=tuple(row for dtype in chosen for row in _products(clock, dtype)),
            attention=tuple(row for dtype in chosen for row in _attention(clock, dtype)),
            operations={
                kind: tuple(row for dtype in chosen for row in _operation(clock, kind, dtype)) for kind in _OPERATIONS
            }
            | {"copy": tuple(row for dtype in chosen for row in _copies(clock, dtype))},
            optimizers={"adamw": tuple(_updates(clock))},
            links=_links(clock, *comms) if comms is not None and num_ranks > 1 else {},
        )
        for _ in range(2)
    )
    measured = first.faster(second)
    return _file(device, measured)


def _file(device: torch.device, measured: Measured) -> dict[str, Any]:
    peaks: dict[str, float] = {}
    for row in measured.products:
        peaks[row.dtype] = max(peaks.get(row.dtype, 0.0), 2 * row.rows * row.inner * row.columns / row.forward_s)
    copied = max(measured.operations["copy"], key=lambda row: row.numel)
    bandwidth = 2 * copied.numel * torch_bytes(copied.dtype) / copied.forward_s
    gathers = measured.links.get("all_gather", ())
    link = max((row.num_bytes * (row.num_ranks - 1) / row.num_ranks / row.seconds for row in gathers), default=0.0)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    ranks = f"{measured.num_ranks} ranks" if measured.num_ranks > 1 else "1 rank"
    if device.type == "cpu":
        ranks += f" of {threads} thread{'s' * (threads > 1)}"
    return {
        "format": FORMAT,
        "name": f"{device.type}: {name}, {ranks}",
        "device_type": device.type,
        "peaks": peaks,
        "memory_bytes": _memory_bytes(device, measured.num_ranks),
        "memory_bandwidth": bandwidth,
        "link_bandwidth": link,
        "link_domain": measured.num_ranks,
        "host_bandwidth": _host_bandwidth(device) or bandwidth,
        "node_gbits": 0.0,
        "source": f"shardwise calibrate, {dt.datetime.now(dt.UTC):%Y-%m-%d}, torch {torch.__version__}",
        "measured": measured.as_dict(),
    }


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_bytes(dtype: str) -> int:
    """Bytes of an element."""
    return _DTYPES[dtype].itemsize


def _barrier(comm: Comm) -> Callable[[], None]:
    word = torch.zeros(comm.size, device=comm.device)
    return lambda: comm.all_reduce(word, unit="calibrate").wait()


def _most_flops(device: torch.device) -> float:
    """FLOPs of the largest product, which takes a few hundredths of a second."""
    return 3e9 if device.type == "cpu" else 3e12


def _products(clock: Clock, dtype: torch.dtype) -> Iterator[ProductTime]:
    for rows in _ROWS:
        for inner in _WIDTHS:
            for columns in _WIDTHS:
                if 2.0 * rows * inner * columns > _most_flops(clock.device):
                    continue
                yield ProductTime(dtype_name(dtype), rows, inner, columns, *_linear(clock, dtype, rows, inner, columns))
    if clock.device.type == "cuda":
        yield ProductTime(dtype_name(dtype), *_ODD, *_linear(clock, dtype, *_ODD))


def _linear(clock: Clock, dtype: torch.dtype, rows: int, inner: int, columns: int) -> tuple[float, float]:
    """Seconds of forward and backward of a linear layer with a bias."""
    count = max(1, min(16, _COLD_BYTES // (inner * columns * dtype.itemsize)))
    options = {"dtype": dtype, "device": clock.device, "requires_grad": True}
    weights = [_drawn(columns, inner, scale=0.02, **options) for _ in range(count)]
    bias, x = torch.zeros(columns, **options), _drawn(rows, inner, **options)
    grad = _drawn(rows, columns, scale=0.1, dtype=dtype, device=clock.device)
    turn = [0]

    def forward() -> tuple[Tensor, Tensor]:
        turn[0] = (turn[0] + 1) % count
        weight = weights[turn[0]]
        return F.linear(x, weight, bias), weight

    return clock.both(forward, lambda made: torch.autograd.grad(made[0], (x, made[1], bias), grad))


def _drawn(*shape: int, scale: float = 1.0, requires_grad: bool = False, **options: Any) -> Tensor:
    """Normal random numbers; with constants a GPU would need less power, and have a higher clock than in training."""
    return torch.randn(shape, **options).mul_(scale).requires_grad_(requires_grad)


def _attention(clock: Clock, dtype: torch.dtype) -> Iterator[AttentionTime]:
    """Times from the output of the qkv projection to the input of the next, as in ``models.transformer.Attention``."""
    for keys, batch, heads, each in _ATTENTION_ON_GPU if clock.device.type == "cuda" else _ATTENTION:
        if 4.0 * batch * keys * keys * heads * each > _most_flops(clock.device):
            continue
        width = heads * each
        qkv = _drawn(batch, keys, 3 * width, dtype=dtype, device=clock.device, requires_grad=True)
        grad = _drawn(batch, keys, width, scale=0.1, dtype=dtype, device=clock.device)

        def forward(qkv: Tensor = qkv, heads: int = heads) -> Tensor:
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

        def backward(made: Tensor, qkv: Tensor = qkv, grad: Tensor = grad) -> Any:
            return torch.autograd.grad(made, qkv, grad)

        times = clock.both(forward, backward)
        yield AttentionTime(dtype_name(dtype), batch * keys, keys, heads, width, *times)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], torch.ones_like(x[0]), torch.zeros_like(x[0]))


def _loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), torch.zeros(len(x), dtype=torch.int64, device=x.device))


_OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": _norm,
    "activation": lambda x: F.gelu(x, approximate="tanh"),
    "add": lambda x: x + x.detach(),
    "loss": _loss,
}


def _operation(clock: Clock, kind: str, dtype: torch.dtype) -> Iterator[OperationTime]:
    compute = _OPERATIONS[kind]
    for numel in _NUMELS_ON_GPU if clock.device.type == "cuda" else _NUMELS:
        x = torch.full((numel // _ROW, _ROW), 0.5, dtype=dtype, device=clock.device)
        if kind == "add":  # backward of a residual addition adds two gradients
            seconds = clock.seconds(lambda x=x: compute(x))
            yield OperationTime(dtype_name(dtype), numel, seconds, seconds)
            continue
        x.requires_grad_()
        grad = torch.ones_like(compute(x))
        times = clock.both(lambda x=x: compute(x), lambda made, x=x, grad=grad: torch.autograd.grad(made, x, grad))
        yield OperationTime(dtype_name(dtype), numel, *times)


def _copies(clock: Clock, dtype: torch.dtype) -> Iterator[OperationTime]:
    """Times of copies into allocated memory, as gradients are collected; source and target are not in the caches."""
    for numel in _NUMELS_ON_GPU if clock.device.type == "cuda" else _NUMELS:
        count = max(2, min(64, _COLD_BYTES // (numel * dtype.itemsize)))
        pool = [torch.full((numel,), 0.5, dtype=dtype, device=clock.device) for _ in range(count)]
        turn = itertools.cycle(range(count))

        def copy(pool: list[Tensor] = pool, turn: Iterator[int] = turn) -> None:
            slot = next(turn)
            pool[slot].copy_(pool[slot - 1])

        seconds = clock.seconds(copy)
        yield OperationTime(dtype_name(dtype), numel, seconds, seconds)


def _updates(clock: Clock) -> Iterator[UpdateTime]:
    """Times of AdamW's step as in ``train``: fused on a GPU; on a CPU it makes temporaries as large as a parameter."""
    for numel in _UPDATES:
        count = max(2, min(64, _COLD_BYTES // (16 * numel)))
        parameters = [torch.nn.Parameter(torch.full((numel,), 0.1, device=clock.device)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=clock.device.type == "cuda")
        yield UpdateTime(numel, clock.seconds(optimizer.step) / count)


def _links(clock: Clock, gather: Comm, reduce: Comm) -> dict[str, tuple[LinkTime, ...]]:
    """Times of the engine's collectives in fp32; ``all_reduce_out`` keeps its input, like sums on ``tp``."""
    found: dict[str, list[LinkTime]] = {}
    size = gather.size
    for num_bytes in _LINK_BYTES:
        buffer = torch.zeros(num_bytes // 4 // size * size, device=clock.device)
        total = torch.zeros_like(buffer)
        part = total[: len(buffer) // size]
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda b=buffer: gather.all_gather(b, unit="calibrate").wait(),
            "reduce_scatter": lambda b=buffer, p=part: reduce.reduce_scatter(
                b, p, unit="calibrate", divisor=size
            ).wait(),
            "all_reduce": lambda b=buffer: reduce.all_reduce(b, unit="calibrate", divisor=size).wait(),
            "all_reduce_out": lambda b=buffer, t=total: reduce.all_reduce(b, unit="calibrate", out=t).wait(),
            "message": lambda b=buffer, t=total: _pass_on(gather, b, t),
        }
        for kind, call in calls.items():
            found.setdefault(kind, []).append(LinkTime(size, buffer.nbytes, _agreed(clock, reduce, call)))
    return {kind: tuple(rows) for kind, rows in found.items()}


def _pass_on(comm: Comm, buffer: Tensor, received: Tensor) -> None:
    """Send a message from each even rank to the next rank."""
    peer = comm.rank ^ 1
    if peer >= comm.size:
        return
    if comm.rank % 2:
        comm.receive(received, source=peer, unit="calibrate").wait()
    else:
        comm.send(buffer, to=peer, unit="calibrate").wait()


def _agreed(clock: Clock, comm: Comm, call: Callable[[], Any]) -> float:
    """The lower quartile of a collective's times on the slowest rank; every rank makes the same number of calls."""
    num_calls = _BURST if clock.device.type == "cuda" else 1
    call()
    times = []
    for _ in range(8):
        clock.align()
        clock._synchronise()  # noqa: SLF001
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        clock._synchronise()  # noqa: SLF001
        times.append((time.perf_counter() - start) / num_calls)
    slowest = torch.tensor([low(times)], device=comm.device).repeat(comm.size)
    comm.all_gather(slowest, unit="calibrate").wait()
    return slowest.max().item()


def _shared(clock: Clock, comm: Comm) -> float:
    """The lost share of the overlap of a computation and a gather: 1 means that one runs after the other."""
    if comm.device.type == "cuda":
        return 0.0
    buffer = torch.zeros((32 << 20) // 4 // comm.size * comm.size)
    a, b = torch.full((256, 512), 0.5), torch.full((512, 512), 0.5)

    def gather() -> None:
        comm.all_gather(buffer, unit="calibrate").wait()

    gather_s = _agreed(clock, comm, gather)
    product_s = clock.seconds(lambda: a @ b)
    times = torch.tensor([gather_s / product_s]).repeat(comm.size)
    comm.all_gather(times, unit="calibrate").wait()
    count = max(1, round(times.mean().item()))

    def compute() -> None:
        for _ in range(count):
            a @ b

    def both() -> None:
        handle = comm.all_gather(buffer, unit="calibrate")
        compute()
        handle.wait()

    compute_s, both_s = (_agreed(clock, comm, call) for call in (compute, both))
    shared = (both_s - max(compute_s, gather_s)) / min(compute_s, gather_s)
    return min(max(shared, 0.0), 1.0)


def _launch_s(device: torch.device) -> float:
    """The host's time for a small operation."""
    x = torch.zeros(8, device=device)
    for _ in range(100):
        x.add_(1)
    start = time.perf_counter()
    for _ in range(2000):
        x.add_(1)
    return (time.perf_counter() - start) / 2000


def _memory_bytes(device: torch.device, num_ranks: int) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks


def _host_bandwidth(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    there = host.to(device)
    return host.nbytes / Clock(device, lambda: None).seconds(lambda: there.copy_(host, non_blocking=True))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  not on every system
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "processor"
