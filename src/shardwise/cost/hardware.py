"""GPUs by name, with the source of every figure, and clusters of GPUs.

The path of a file that ``shardwise calibrate`` wrote is accepted in place of a name. Its fields are those of
:class:`Gpu`, and ``Gpu.measured`` has its tables (``cost.measured`` describes the file).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.cost.measured import FORMAT, Measured, read
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import did_you_mean, printable

#: One row for each GPU; empty fields are not known.
TABLE = Path(__file__).with_name("data") / "hardware.csv"

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device: dense peaks, memory and links, by its maker's figures.

    Attributes:
        name: Name in the table or in the calibrated file.
        device_name: Name returned by ``torch.cuda.get_device_name``; "": not known.
        peaks: Dense FLOP/s by the dtype of the products: ``bf16``, ``fp16``, ``tf32``, ``fp32``, ``fp8``.
        memory_bytes: Bytes that torch can allocate.
        memory_bandwidth: Bytes per second of the device's memory.
        link_bandwidth: Bytes per second to the other GPUs of the node, in one direction.
        link_domain: Number of GPUs that these links join.
        best_product: Share of the dense bf16 peak of the fastest published product (the table's ``mamf_pct``).
        is_mesh: Each pair of GPUs has a separate link with an equal part of ``link_bandwidth``; else a switch joins
            them.
        host_bandwidth: Bytes per second between host and device, in one direction.
        node_gbits: Gbit/s of a typical node's network, all cards together, in one direction.
        arch: The maker's name of the architecture: ``Ampere``, ``Hopper``, ...
        source: Source of the figures.
        device_type: ``cuda``, or ``cpu`` in a calibrated file.
        measured: Tables of ``shardwise calibrate``; ``None``: not measured.
        speeds: Factors by which ``products``, ``link``, ``network`` and ``launch`` are faster in measured runs than in
            ``measured`` or ``cost.software`` (``planner.rescale``).
    """

    name: str
    peaks: dict[str, float]
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    link_domain: int
    host_bandwidth: float
    node_gbits: float
    best_product: float = 0.8
    is_mesh: bool = False
    arch: str = ""
    source: str = ""
    device_name: str = ""
    device_type: str = "cuda"
    measured: Measured | None = field(default=None, repr=False)
    speeds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def as_dict(self) -> dict[str, Any]:
        """The content of a file that can be given in place of a name."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {"format": FORMAT, **fields, "measured": self.measured and self.measured.as_dict()}


@functools.cache
def gpus() -> dict[str, Gpu]:
    """Every GPU of the table, by name."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["gpu"]: _gpu(row) for row in csv.DictReader(file)}


def _gpu(row: dict[str, str]) -> Gpu:
    def number(field: str) -> float:
        return float(row[field] or 0)

    columns = {
        "bf16": "tflops_bf16_dense",
        "fp16": "tflops_fp16_dense",
        "tf32": "tflops_tf32_dense",
        "fp32": "tflops_fp32_vector",
        "fp8": "tflops_fp8_dense",
    }
    usable = number("mem_gib_usable_torch") or 0.97 * number("mem_gb_label")
    return Gpu(
        name=row["gpu"],
        peaks={dtype: number(column) * 1e12 for dtype, column in columns.items() if row[column]},
        memory_bytes=int(usable * GIB),
        memory_bandwidth=number("mem_bw_gbs") * 1e9,
        link_bandwidth=number("scaleup_uni_gbs_per_gpu") * 1e9,
        link_domain=int(number("scaleup_domain_gpus") or 1),
        best_product=number("mamf_pct") or 0.8,
        is_mesh="mesh" in row["scaleup_link"],
        host_bandwidth=(number("host_link_uni_gbs") or 16.0) * 1e9,
        node_gbits=number("typical_internode_gbps_per_node"),
        arch=row["arch"],
        source=row["source"],
        device_name=row["device_name"],
    )


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU with this name in torch; variants (PCIe, NVL) have different names. ``None``: not in the table."""
    return next((gpu for gpu in gpus().values() if device_name and gpu.device_name == device_name), None)


def find_gpu(name: str) -> Gpu:
    """The GPU of a name, in the table or in torch, in any case, or of a calibrated file.

    A part of a name is enough if only one GPU has it: ``H200``, ``H100-SXM``, ``RTX 4090``.

    Raises:
        ConfigError: The name is not in the table, or ``shardwise calibrate`` did not write the file.
    """
    if name.endswith(".json"):
        path = Path(name).expanduser()
        return _read_calibrated(path, path.stat().st_mtime_ns if path.exists() else 0)
    found = _named(name.lower())
    if len(found) != 1:
        hint = f" {name} is one of {', '.join(gpu.name for gpu in found)}: name the one that is meant."
        if not found:
            model = re.match(r"[a-z]+\d+", name.lower())
            alike = [known for known in gpus() if model and re.split(r"[-_ ]", known.lower())[0] == model[0]]
            hint = did_you_mean(name.upper(), alike or gpus()) or f" Known are: {', '.join(gpus())}."
        raise ConfigError(
            f"gpu={name!r} is not known.\n {hint}\n  `shardwise calibrate` writes the figures of this machine to a"
            " file that can be given instead."
        )
    return found[0]


@functools.lru_cache(maxsize=64)
def _named(lower: str) -> Sequence[Gpu]:
    """The GPU with this name in the table or in torch; without one, the GPUs whose names have all of its words."""
    exact = [gpu for gpu in gpus().values() if lower in {gpu.name.lower(), gpu.device_name.lower()} - {""}]
    words = _words(lower)
    return exact or [gpu for gpu in gpus().values() if words and words <= _words(f"{gpu.name} {gpu.device_name}")]


def _words(name: str) -> set[str]:
    """``{"rtx4090"}`` for ``RTX 4090``, ``{"h100", "80gb", "sxm"}`` for ``H100-80GB-SXM``."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"rtx[-_ ]", "rtx", name.lower())))


@functools.lru_cache(maxsize=8)
def _read_calibrated(path: Path, _changed_at: int) -> Gpu:
    content = read(path)
    names = [each.name for each in dataclasses.fields(Gpu)]
    try:
        return Gpu(**{name: content[name] for name in names if name in content})
    except TypeError as error:
        raise ConfigError(f"gpu={printable(path)}: {error}.\n  Run `shardwise calibrate` again.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal GPUs in equal nodes.

    Attributes:
        gpu: A name of the hardware table, the path of a file that ``shardwise calibrate`` wrote, or the figures.
        num_gpus: Total number of GPUs.
        gpus_per_node: GPUs of one node.
        inter_gbits_per_s_per_node: Gbit/s of a node's network, all cards together, in one direction. ``None``: the
            table's typical value.
    """

    gpu: str | Gpu
    num_gpus: int
    gpus_per_node: int = 8
    inter_gbits_per_s_per_node: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpus_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"cluster: {name}={value!r}: expected a whole number of at least 1.\n  Set for example {name}=8."
                )
        gbits = self.inter_gbits_per_s_per_node
        if gbits is not None and (
            isinstance(gbits, bool) or not isinstance(gbits, int | float) or not 0 < gbits < math.inf
        ):
            raise ConfigError(
                f"cluster: inter_gbits_per_s_per_node={gbits!r}: expected Gbit/s above 0.\n"
                "  Set for example 400, or leave it out for what is usual with this GPU."
            )
        assert self.device  # the name is known

    @property
    def device(self) -> Gpu:
        """The figures of the cluster's GPU."""
        return self.gpu if isinstance(self.gpu, Gpu) else find_gpu(self.gpu)

    @property
    def node_bandwidth(self) -> float:
        """Bytes per second that a node sends over its network, in one direction."""
        gbits = self.inter_gbits_per_s_per_node
        return (self.device.node_gbits if gbits is None else gbits) * 1e9 / 8
