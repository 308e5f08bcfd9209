"""The tables of seconds that ``shardwise calibrate`` measured on a machine, and interpolation between their rows.

The file is JSON with the fields of ``Gpu`` (``cost.hardware``); ``measured`` has the tables. ``measured`` may be null
in a file of ``shardwise plan --save-hardware``, whose ``speeds`` come from measured runs::

    {
      "format": "shardwise hardware 1",
      "name": "cpu: AMD EPYC, 2 ranks of 1 thread",
      "device_type": "cpu",
      "peaks": {"fp32": 8.1e10}, "memory_bytes": 12000000000, "memory_bandwidth": 1.1e10, "link_bandwidth": 1.5e9,
      "link_domain": 2, "host_bandwidth": 1.1e10, "node_gbits": 0, "source": "shardwise calibrate, 2026-11-23",
      "measured": {
        "num_ranks": 2, "launch_s": 2e-06, "shared": 1.0,
        "products": [{"dtype": "fp32", "rows": 512, "inner": 512, "columns": 2048, "forward_s": .., "backward_s": ..}],
        "attention": [{"dtype": "fp32", "queries": 512, "keys": 256, "heads": 8, "width": 512, ...}],
        "operations": {"norm": [{"dtype": "fp32", "numel": 65536, "forward_s": .., "backward_s": ..}], ...},
        "optimizers": {"adamw": [{"numel": 65536, "seconds": ..}]},
        "links": {"all_gather": [{"num_ranks": 2, "num_bytes": 65536, "seconds": ..}], ...}
      }
    }

``products`` are linear layers: ``(rows, inner) x (inner, columns)`` in forward, and both products of backward. On a GPU
one of them has an odd number of columns, for which there is no fast kernel, and another has one column more.
``operations`` are ``norm``, ``activation``, ``add``, ``loss`` (the cross entropy) and ``copy``. ``num_bytes`` of a link
is the full buffer after an all-gather, or before a reduction. ``shared`` says how far computation and communication of
a rank share one core: 1 entirely, 0 not at all (``sim.streams.Slowdown``).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable

FORMAT = "shardwise hardware 1"


class ProductTime(NamedTuple):
    """Seconds of a linear layer: forward, and the two products of backward together."""

    dtype: str
    rows: float
    inner: float
    columns: float
    forward_s: float
    backward_s: float


class AttentionTime(NamedTuple):
    """Seconds of causal attention: ``queries`` tokens in sequences of ``keys``; ``width`` is that of all heads."""

    dtype: str
    queries: float
    keys: float
    heads: float
    width: float
    forward_s: float
    backward_s: float


class OperationTime(NamedTuple):
    """Seconds of an element-wise operation on a tensor of ``numel`` elements."""

    dtype: str
    numel: float
    forward_s: float
    backward_s: float


class UpdateTime(NamedTuple):
    """Seconds of an optimizer's step per parameter of ``numel`` elements, if all parameters have this size."""

    numel: float
    seconds: float


class LinkTime(NamedTuple):
    """Seconds of a collective of ``num_ranks`` ranks on a buffer of ``num_bytes``."""

    num_ranks: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """The measured tables of a machine.

    Attributes:
        num_ranks: Ranks that ran at the same time during the measurement.
        launch_s: The host's time for one small operation.
        shared: How far computation and communication of a rank share one core.
        products: Times of linear layers.
        attention: Times of causal attention.
        operations: Times of element-wise operations, by kind.
        optimizers: Times of optimizers' steps, by name.
        links: Times of collectives, by kind.
        speeds: Factors by which ``products`` (with attention) and ``link`` (collectives) are faster, as ``Gpu.speeds``.
    """

    num_ranks: int = 1
    launch_s: float = 0.0
    shared: float = 0.0
    products: tuple[ProductTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    operations: Mapping[str, tuple[OperationTime, ...]] = field(default_factory=dict)
    optimizers: Mapping[str, tuple[UpdateTime, ...]] = field(default_factory=dict)
    links: Mapping[str, tuple[LinkTime, ...]] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)

    def product_s(self, rows: float, inner: float, columns: float, dtype: str) -> tuple[float, float]:
        """Seconds of forward and backward of a linear layer.

        The time per FLOP is interpolated between rows of the table, over the logarithms of the three sizes.
        """
        flops = 2.0 * rows * inner * columns / self.speeds.get("products", 1.0)
        table = [row for row in self.products if row.dtype == dtype and row.columns % 2 == 0]
        points = [(_logs(row.rows, row.inner, row.columns), row) for row in table]
        forward, backward = _between(
            _logs(rows, inner, columns),
            [(at, (row.forward_s / _flops(row), row.backward_s / _flops(row))) for at, row in points],
        )
        return forward * flops, backward * flops

    def odd_share(self, dtype: str) -> float | None:
        """The relative speed of a product with an odd number of columns to one column more; ``None``: not measured."""
        table = {(row.rows, row.inner, row.columns): row for row in self.products if row.dtype == dtype}
        for (rows, inner, columns), odd in table.items():
            even = table.get((rows, inner, columns + 1))
            if columns % 2 and even is not None:
                return (even.forward_s + even.backward_s) / (odd.forward_s + odd.backward_s)
        return None

    def attention_s(self, queries: float, keys: float, heads: float, width: float, dtype: str) -> tuple[float, float]:
        """Seconds of forward and backward of causal attention."""
        pairs = queries * keys * width / self.speeds.get("products", 1.0)
        forward, backward = _between(
            _logs(keys, queries / keys * heads, width / heads),
            [
                (
                    _logs(row.keys, row.queries / row.keys * row.heads, row.width / row.heads),
                    tuple(s / (row.queries * row.keys * row.width) for s in (row.forward_s, row.backward_s)),
                )
                for row in self.attention
                if row.dtype == dtype
            ],
        )
        return forward * pairs, backward * pairs

    def operation_s(self, kind: str, numel: float, dtype: str) -> tuple[float, float]:
        """Seconds of forward and backward of an element-wise operation."""
        found = [row for row in self.operations.get(kind, ()) if row.dtype == dtype]
        return (
            _along([(row.numel, row.forward_s) for row in found], numel),
            _along([(row.numel, row.backward_s) for row in found], numel),
        )

    def update_s(self, optimizer: str, numel: float) -> float:
        """Seconds of an optimizer's step on one parameter."""
        return _along([tuple(row) for row in self.optimizers.get(optimizer, ())], numel)

    def link_s(self, kind: str, num_ranks: int, num_bytes: float) -> float:
        """Seconds of a collective; for unmeasured numbers of ranks, scaled by the bytes that a rank sends."""
        if num_ranks < 2 or num_bytes <= 0:
            return 0.0
        rows = self.links.get(kind, ())
        sizes = sorted({row.num_ranks for row in rows})
        if not sizes:
            raise ConfigError(
                f"the calibration has no times of {kind}: it was made by one rank.\n"
                "  Run `shardwise calibrate --nproc 2`, or under torchrun."
            )
        nearest = min(sizes, key=lambda count: abs(count - num_ranks))
        seconds = _along([(row.num_bytes, row.seconds) for row in rows if row.num_ranks == nearest], num_bytes)
        share = ((num_ranks - 1) / num_ranks) / ((nearest - 1) / nearest)
        return seconds * share / self.speeds.get("link", 1.0)

    def faster(self, other: Measured) -> Measured:
        """Combine the tables of two passes over the same sizes: the shorter one of each pair of times."""

        def rows(mine: Sequence[Any], theirs: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(
                type(a)(*(min(x, y) if isinstance(x, float) else x for x, y in zip(a, b, strict=True)))
                for a, b in zip(mine, theirs, strict=True)
            )

        def tables(mine: Mapping[str, Sequence[Any]], theirs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
            return {kind: rows(mine[kind], theirs[kind]) for kind in mine}

        return Measured(
            num_ranks=self.num_ranks,
            launch_s=min(self.launch_s, other.launch_s),
            shared=(self.shared + other.shared) / 2,
            products=rows(self.products, other.products),
            attention=rows(self.attention, other.attention),
            operations=tables(self.operations, other.operations),
            optimizers=tables(self.optimizers, other.optimizers),
            links=tables(self.links, other.links),
        )

    def as_dict(self) -> dict[str, Any]:
        """The tables as plain values, for JSON."""
        plain = {name: getattr(self, name) for name in ("num_ranks", "launch_s", "shared")}
        for name in ("products", "attention"):
            plain[name] = [row._asdict() for row in getattr(self, name)]
        for name in ("operations", "optimizers", "links"):
            plain[name] = {kind: [row._asdict() for row in rows] for kind, rows in getattr(self, name).items()}
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """The inverse of :meth:`as_dict`."""

        def tables(name: str, kind: Any) -> dict[str, tuple[Any, ...]]:
            return {key: tuple(kind(**row) for row in rows) for key, rows in values.get(name, {}).items()}

        return cls(
            num_ranks=values.get("num_ranks", 1),
            launch_s=values.get("launch_s", 0.0),
            shared=values.get("shared", 0.0),
            products=tuple(ProductTime(**row) for row in values.get("products", ())),
            attention=tuple(AttentionTime(**row) for row in values.get("attention", ())),
            operations=tables("operations", OperationTime),
            optimizers=tables("optimizers", UpdateTime),
            links=tables("links", LinkTime),
        )


def read(path: Path) -> dict[str, Any]:
    """The fields of a calibrated file; ``measured`` is a :class:`Measured`, or null.

    Raises:
        ConfigError: The file cannot be read, or ``shardwise calibrate`` did not write it.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"gpu={printable(path)} cannot be read: {error.strerror}.\n  Name another file.") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(
            f"gpu={printable(path)} is not a file of `shardwise calibrate`: expected JSON with format {FORMAT!r}.\n"
            f"  Run `shardwise calibrate --out {printable(path)}`."
        )
    try:
        tables = content["measured"]
        return content | {"measured": None if tables is None else Measured.from_dict(tables)}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"gpu={printable(path)}: {error} is not as `shardwise calibrate` writes it.\n  Run it again."
        ) from None


def _flops(row: ProductTime) -> float:
    return 2.0 * row.rows * row.inner * row.columns


def _logs(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log2(max(size, 1.0)) for size in sizes)


def _between(at: tuple[float, ...], points: Sequence[tuple[tuple[float, ...], tuple[float, ...]]]) -> tuple[float, ...]:
    """Geometric mean of the nearest points, weighted by the inverse square of the distance."""
    if not points:
        raise ConfigError(
            "the calibration has no times of this dtype.\n  Calibrate again, or plan with a precision that it has."
        )
    near = sorted((math.dist(at, point), values) for point, values in points)[:6]
    if near[0][0] < 1e-9:
        return near[0][1]
    weights = [distance**-2 for distance, _ in near]
    return tuple(
        math.exp(sum(w * math.log(values[part]) for w, (_, values) in zip(weights, near, strict=True)) / sum(weights))
        for part in range(len(near[0][1]))
    )


def _along(points: Sequence[tuple[float, ...]], size: float) -> float:
    """Seconds at a size: interpolated linearly between rows, and proportional to the size beyond the last row."""
    if not points:
        return 0.0
    ordered = sorted(points)
    if size <= ordered[0][0]:
        return ordered[0][1]
    if size >= ordered[-1][0]:
        return ordered[-1][1] * size / ordered[-1][0]
    for (low, low_s), (high, high_s) in itertools.pairwise(ordered):
        if size <= high:
            return low_s + (high_s - low_s) * (size - low) / (high - low)
    raise AssertionError
