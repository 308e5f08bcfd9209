"""The band of trust around a predicted step time, by the regime of the run.

Each regime's band holds 80% of the published rows of its kind, each predicted by constants that were fitted without the
row's source: ``python -m bench.fit --loso`` makes the predictions, ``make validate`` prints the table, and a test holds
the figures below against them.
"""

from __future__ import annotations

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import Experts, ModelShape

#: Error of the prediction, over the measurement, that 8 of 10 unseen rows stay within. A regime that is not here has
#: fewer than eight published rows.
BANDS = {
    "dense, one node": 0.24,
    "dense, many nodes": 0.20,
    "long context": 0.27,
    "little work per GPU": 0.18,
}

_LONG, _LITTLE = 16384, 2048


def regime(shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload) -> str:
    """The kind of a run, by what decides its error.

    Little work is fewer than 2,048 tokens of a microbatch on a GPU, and long context more than 16,384 tokens.
    """
    if workload.lora_rank is not None:
        return "LoRA"
    if any(isinstance(block.feed_forward, Experts) for _, block in shape.stacks):
        return "mixtures of experts"
    if not cluster.device.link_bandwidth:
        return "cards without links"
    if workload.seq_len > _LONG:
        return "long context"
    if workload.seq_len == 1 or workload.micro_batch * workload.seq_len < _LITTLE * plan.cp * plan.tp:
        return "little work per GPU" if workload.seq_len > 1 else "samples that are no sequences"
    return "dense, one node" if cluster.num_gpus <= cluster.gpus_per_node else "dense, many nodes"
