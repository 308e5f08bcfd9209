"""Seconds of collectives, depending on whether an axis joins ranks of one node or of several nodes.

Axes have the order of ``spec.mesh``: ``tp`` innermost, then ``cp``, ``dp_shard``, ``dp_replicate``, ``pp``. The ranks
of a node share its network: with ``l`` ranks of a group in a node of ``g`` ranks, ``g / l`` such groups use the network
at the same time. Bytes are those of ring algorithms: ``(n-1)/n`` of the buffer for all-gather and reduce-scatter, twice
that for all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.cost.hardware import Cluster
from shardwise.cost.software import Software
from shardwise.spec.plan import ParallelPlan

#: Seconds of a step of a ring between neighbours in a node, and between nodes; NCCL's tests report some microseconds
#: (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
_HOP_S = 2e-6
_NODE_HOP_S = 8e-6


@dataclass(frozen=True, slots=True)
class Link:
    """The link between the ranks of one axis.

    Attributes:
        kind_size: Ranks of a group.
        num_nodes: Nodes over which a group extends.
        bandwidth: Most bytes per second that a rank sends in a ring.
        name: The axis.
    """

    kind_size: int
    num_nodes: int
    bandwidth: float
    name: str = ""

    @property
    def latency_s(self) -> float:
        """Seconds of a ring with an empty buffer."""
        return _HOP_S * (self.kind_size - self.num_nodes) + _NODE_HOP_S * (self.num_nodes - 1)

    def seconds(self, kind: str, num_bytes: float) -> float:
        """Seconds of a collective; ``num_bytes`` is the full gathered or summed buffer, or a rank's block in a ring."""
        n = self.kind_size
        if n == 1 or num_bytes <= 0:
            return 0.0
        if kind == "ring":  # every rank's block is passed to all other ranks
            return (n - 1) * num_bytes / self.bandwidth + self.latency_s
        turns = 2 if kind == "all_reduce" else 1
        latency = 2 * _HOP_S * math.log2(n) * self.num_nodes if kind == "all_reduce" else self.latency_s
        return turns * num_bytes * (n - 1) / n / self.bandwidth + min(latency, self.latency_s * turns)


def axis_links(plan: ParallelPlan, cluster: Cluster, software: Software) -> dict[str, Link]:
    """The links of a plan's axes: ``tp``, ``cp``, ``ep``, ``dp_shard`` (``cp`` included), ``dp_replicate``.

    If ``reshard_after_forward`` is a number of ranks, ``inner`` joins the ranks that keep a unit after forward.
    """
    shard = plan.dp_shard * plan.cp
    strides = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, plan.tp),
        "dp_shard": (shard, plan.tp),
        "dp_replicate": (plan.dp_replicate, plan.tp * shard),
    }
    if plan.inner_size is not None:
        strides["inner"] = plan.inner_size, plan.tp
    return {axis: _link(axis, size, stride, cluster, software) for axis, (size, stride) in strides.items()}


def _link(axis: str, size: int, stride: int, cluster: Cluster, software: Software) -> Link:
    gpu = cluster.device
    node, domain = _node(cluster), _domain(cluster)
    local = max(1, min(size, domain // stride))
    nodes = math.ceil(size / local)
    inside = software.link * (gpu.link_bandwidth or gpu.host_bandwidth)
    if gpu.is_mesh and local > 1:
        inside *= (local - 1) / (gpu.link_domain - 1)  # links to the ranks of other groups are idle
    if nodes == 1:
        return Link(size, 1, inside, axis)
    share = software.network * cluster.node_bandwidth * min(local / node, 1.0)
    return Link(size, nodes, min(inside, share) if local > 1 else share, axis)


#: The most GPUs that links join inside one node; a larger domain in the table extends over nodes (NVL72).
_MOST_IN_NODE = 8


def _node(cluster: Cluster) -> int:
    return min(cluster.gpus_per_node, cluster.num_gpus)


def _domain(cluster: Cluster) -> int:
    """Number of GPUs that reach each other without the network."""
    spans = cluster.device.link_domain
    return max(_node(cluster), min(spans, cluster.num_gpus)) if spans > _MOST_IN_NODE else _node(cluster)


def message_seconds(num_bytes: float, ends: tuple[int, int], pp: int, cluster: Cluster, software: Software) -> float:
    """Seconds of a message from every rank at one place on ``pp``, the outermost axis, to its peer at another place.

    If any pair of ranks is in two nodes, the message uses a GPU's share of the network.
    """
    source, target = ends
    if source == target:
        return 0.0
    size, domain, gpu = cluster.num_gpus // pp, _domain(cluster), cluster.device
    ranks = range(size) if size < domain else range(1)
    crosses = any((source * size + rank) // domain != (target * size + rank) // domain for rank in ranks)
    if crosses:
        return num_bytes / (software.network * cluster.node_bandwidth / _node(cluster)) + _NODE_HOP_S
    links = gpu.link_domain - 1 if gpu.is_mesh else 1
    return num_bytes * links / (software.link * (gpu.link_bandwidth or gpu.host_bandwidth)) + _HOP_S
