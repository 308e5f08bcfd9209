"""Seconds that a GPU needs for products, attention and element-wise work.

The time of a product ``(rows, inner) x (inner, columns)`` is the longer of two times: its FLOPs at the share of the
peak that its shape permits, and its memory traffic. The shape reduces the share in three ways: tiles that do not fill
the last wave of cores (wave quantization, NVIDIA, *Matrix Multiplication Background User's Guide*, section 3), inner
dimensions too short to hide the start of each tile, and dimensions that are not multiples of 64 elements (the same
guide, section 2: tensor cores need multiples of 16 bytes, and are fastest with 128 bytes or more).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.cost.hardware import Gpu
from shardwise.cost.software import OF_BEST, OF_PRODUCTS, Software
from shardwise.cost.work import AttentionWork, Product, UnitWork, item_bytes
from shardwise.cost.workload import Workload

#: Number of cores (SMs, CUs) by architecture, from NVIDIA's and AMD's architecture white papers.
_CORES = {"Ampere": 108, "Hopper": 132, "Volta": 80, "Blackwell": 148, "Ada": 128, "CDNA3": 304, "CDNA4": 256}
_CORES |= {"Lovelace": 142, "Blackwell-RTX": 170}

#: Factor of GPUs that run below the peak of their architecture: torchtitan's H100 with 96 GB is limited to 500 W; the
#: hardware table notes "effective ~ 0.8x".
_LIMITED = {"H100-94/96GB-HBM2e-500W": 0.8}

#: Columns of a tile; rows are 128.
_TILE_COLUMNS = {"Hopper": 256, "Blackwell": 256}

#: The share of the memory's bandwidth that large copies reach.
_COPY = 0.85

#: Number of keys at which attention reaches half of its share of the peak (FlashAttention-2, figures 4 to 6, from 512
#: to 16,384 keys), and the factor by which backward is slower than in proportion to its FLOPs (the same figures).
_SHORT_KEYS = 256
_BACKWARD_ATTENTION = 1 / 0.85

#: Seconds between two kernels on the device.
_GAP_S = 4e-6


@dataclass(frozen=True, slots=True)
class ShapeFactors:
    """The factors by which the shape of a product changes its speed.

    Attributes:
        wave: Fraction of the idle part of a last wave that counts as lost time.
        short: Inner dimension at which half of the speed is reached.
        aligned: Speed if a dimension is a multiple of at most 32, 16, 8, and fewer elements.
        odd: Speed of an odd dimension in 16 bit, by architecture, where it is lower because cuBLAS uses kernels of an
            older GPU. Measured on an H100 (``bench/results/2026-11-27-gpu-2.md``); newer GPUs are assumed to be equal.
    """

    wave: float = 0.827
    short: float = 103.0
    aligned: tuple[float, float, float, float] = (0.95, 0.85, 0.75, 0.5)
    odd: Mapping[str, float] = field(default_factory=lambda: {"Hopper": 0.17, "Blackwell": 0.17})


SHAPE_FACTORS = ShapeFactors()


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Seconds of one unit's microbatch on one rank, without collectives.

    Attributes:
        forward_s: Seconds of forward.
        backward_s: Seconds of backward without recomputation.
        elementwise_s: The part of ``forward_s`` in element-wise work.
        products_s: The part of ``forward_s`` in products.
        launch_s: The host's time for forward.
    """

    forward_s: float
    backward_s: float
    elementwise_s: float
    products_s: float
    launch_s: float


def unit_seconds(work: UnitWork, gpu: Gpu, software: Software, workload: Workload) -> UnitSeconds:
    """Seconds of a unit."""
    precision = "bf16" if work.name in {"head", "embedding"} and workload.precision == "fp8" else workload.precision
    forward = backward = 0.0
    for product in work.products:
        ahead, back = product_seconds(product, gpu, software, precision)
        forward += ahead
        backward += back
    products = forward
    for attention in work.attention:
        ahead, back = attention_seconds(attention, gpu, software, workload)
        forward += ahead
        backward += back
    factor = software.elementwise
    if not workload.compile:
        factor = software.elementwise_eager.get(gpu.arch, factor)
    per_byte = factor / (_COPY * gpu.memory_bandwidth)
    elementwise = work.forward_bytes * per_byte + _GAP_S * sum(part.num_kernels for part in work.parts)
    return UnitSeconds(
        forward_s=forward + elementwise,
        backward_s=backward + work.backward_bytes * per_byte,
        elementwise_s=elementwise,
        products_s=products,
        launch_s=launch_seconds(work, software, workload),
    )


def launch_seconds(work: UnitWork, software: Software, workload: Workload) -> float:
    """The host's time to launch a unit's forward."""
    return (work.num_kernels + software.unit_launches[workload.compile]) * software.launch_s


def product_seconds(product: Product, gpu: Gpu, software: Software, precision: str) -> tuple[float, float]:
    """Seconds of forward and of backward of all ``count`` products.

    Alignment depends on ``inner`` and ``columns`` only, because rows of all three matrices have one of these lengths.
    """
    rows, inner, columns = product.rows, product.inner, product.columns
    if precision == "fp32" and product.is_convolution and "tf32" in gpu.peaks and not gpu.arch.startswith("CDNA"):
        precision = "tf32"  # cuDNN's convolutions use it by default (torch.backends.cudnn.allow_tf32)
    arch = "" if precision in {"fp32", "tf32"} or product.is_convolution else gpu.arch
    aligned = alignment(inner, arch) * alignment(columns, arch)
    rate, item = _rate(gpu, software, precision), 4 if precision in {"fp32", "tf32"} else 2

    def seconds(rows: float, inner: float, columns: float) -> float:
        if min(rows, inner, columns) <= 0:
            return 0.0
        tiles = math.ceil(rows / 128) * math.ceil(columns / _TILE_COLUMNS.get(gpu.arch, 128))
        waves = tiles / _CORES.get(gpu.arch, 108)
        full = 1 - (1 - waves / math.ceil(waves)) * SHAPE_FACTORS.wave
        share = max(full, 0.02) * inner / (inner + SHAPE_FACTORS.short) * aligned
        moved = item * (rows * inner + inner * columns + rows * columns)
        return max(2.0 * rows * inner * columns / (rate * share), copy_seconds(moved, gpu)) + _GAP_S

    forward, backward = seconds(rows, inner, columns), seconds(rows, columns, inner)
    if product.is_trained:
        backward += seconds(inner, rows, columns)
    return forward * product.count, backward * product.count


def alignment(size: float, arch: str = "") -> float:
    """The speed of a product with a dimension of this size, relative to a multiple of 64.

    For a dimension that the ranks of tp do not divide evenly it is the slowest rank's speed.
    """
    by_32, by_16, by_8, less = SHAPE_FACTORS.aligned
    speeds = {32: by_32, 16: by_16, 8: by_8, 1: SHAPE_FACTORS.odd.get(arch, less)}
    sizes = {math.floor(size), math.ceil(size)}
    return min(1.0 if whole % 64 == 0 else speeds.get(whole & -whole, less) for whole in sizes)


def _rate(gpu: Gpu, software: Software, precision: str) -> float:
    """FLOP/s of a large product."""
    share = product_share(gpu, software) * _LIMITED.get(gpu.name, 1.0)
    if precision == "fp32":
        return gpu.peaks.get("fp32", 1e12) * share  # TF32 is off unless asked for (torch.backends.cuda.matmul)
    if precision == "fp8" and "fp8" in gpu.peaks:
        return _peak(gpu, "bf16") * share * software.fp8
    return _peak(gpu, precision) * share


def product_share(gpu: Gpu, software: Software) -> float:
    """The share of the peak that large products reach."""
    return software.products.get(gpu.arch, OF_BEST * gpu.best_product)


def _peak(gpu: Gpu, precision: str) -> float:
    """The dense peak of a dtype; a dtype without hardware units (bf16 on Volta) is computed in fp32."""
    return gpu.peaks.get(precision) or gpu.peaks.get("fp32") or max(gpu.peaks.values())


def attention_seconds(work: AttentionWork, gpu: Gpu, software: Software, workload: Workload) -> tuple[float, float]:
    """Seconds of forward and backward of attention.

    A fused kernel skips masked pairs, and its backward has five products, forward two (Dao, arXiv 2307.08691). Without
    one, all pairs are computed, and scores are read and written several times.
    """
    if software.attention:
        flops = work.flops * (0.5 if work.is_causal else 1.0)
        peak = _peak(gpu, "bf16" if workload.precision == "fp8" else workload.precision)
        share = (
            software.attention.get(gpu.arch, OF_PRODUCTS * product_share(gpu, software))
            * work.keys
            / (work.keys + _SHORT_KEYS)
        )
        width = work.width / work.heads
        share *= (width / 128) ** 0.3 if width < 128 else 1.0  # narrow heads have fewer FLOPs for each exponential
        forward = flops / (peak * share)
        return forward + _GAP_S, 2.5 * _BACKWARD_ATTENTION * forward + _GAP_S
    products = work.flops / (0.85 * _rate(gpu, software, workload.precision))
    scores = work.queries * work.keys * work.heads * item_bytes(workload)
    passes = software.scores * scores / (_COPY * gpu.memory_bandwidth)
    return products + passes, 2 * products + 1.3 * passes


def copy_seconds(num_bytes: float, gpu: Gpu) -> float:
    """Seconds to read or write bytes of the device's memory."""
    return num_bytes / (_COPY * gpu.memory_bandwidth)
