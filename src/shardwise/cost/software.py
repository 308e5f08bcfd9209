"""What differs between generations of software on the same hardware: shares of peaks, what is fused, what is hidden.

``products`` and ``attention`` are shares of the dense peak that large products and kernels of attention reach, one
number for each architecture. ``python -m bench.fit`` fits them, and the constants below them, on rows of the sources
that ``bench.predictions.FITTED`` names, and prints which. An architecture without rows has :data:`OF_BEST` of what was
measured at best on its card; Ada's share is from unseen runs (planner.md: 0.85 to 0.95). The other constants are
priors; ``bench/fit.py`` gives the mean and the source of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import did_you_mean

#: Share of the best product that was measured on a card (``Gpu.best_product``) where no row says what training reaches:
#: the mean of the generations below, 0.74 / 0.869 on A100 and 0.59 / 0.803 on H100.
OF_BEST = 0.79

#: The same of one kernel of attention, of the share of products: 0.41 / 0.74 and 0.22 / 0.59.
OF_PRODUCTS = 0.46


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One generation of a framework.

    Attributes:
        name: Its name.
        products: Share of the dense peak that large, aligned products reach, by architecture.
        attention: The same of one kernel of attention, masked pairs not counted; empty: attention is products and
            element-wise work on scores.
        elementwise: Time of element-wise work over that of ``cost.part``'s bytes at 85% of the memory's bandwidth.
        scores: Where attention is not one kernel: passes over the scores in forward.
        is_fused: Element-wise work is fused whatever the workload says.
        fp8: How much faster products are in fp8 than in bf16, scaling and casts included.
        launch_s: The host's time to launch one kernel; the host is never late where it is 0.
        tp_hidden: Share of the collectives of ``tp`` that products hide.
        p2p_blocks: Stages wait for messages to and from their neighbours.
        scatters_messages: Each rank of ``tp`` sends a part of what goes to the next stage (Narayanan et al., SC'21,
            section 4.1).
        overlaps_reductions: Gradients are reduced, and parameters gathered, beside the computation.
        slowdown: Factor of computation and of communication while both run.
        link: Share of the links inside a node that collectives reach.
        network: Share of a node's network that collectives reach.
        divides_evenly: Pipeline stages have equal numbers of blocks; else they are balanced with the head.
        gradient_bytes: Bytes of an element of a gradient where it is reduced.
        selective_products: Share of the products that selective recomputation computes again.
    """

    name: str
    products: Mapping[str, float]
    attention: Mapping[str, float] = field(default_factory=dict)
    elementwise: float = 1.0
    scores: float = 6.6
    is_fused: bool = False
    fp8: float = 1.77
    launch_s: float = 0.0
    tp_hidden: float = 0.0
    p2p_blocks: bool = False
    scatters_messages: bool = False
    overlaps_reductions: bool = True
    slowdown: float = 1.28
    link: float = 0.685
    network: float = 0.835
    divides_evenly: bool = False
    gradient_bytes: int = 2
    selective_products: float = 0.0


_PYTORCH = Software(
    name="pytorch",
    products={"Ampere": 0.74, "Hopper": 0.59, "Ada": 0.85},
    attention={"Ampere": 0.41, "Hopper": 0.22},
    launch_s=8e-6,
    elementwise=1.04,
    gradient_bytes=4,
)
#: "Selective op" of torchtitan computes every second product again (its activation_checkpoint.py).
_TORCHTITAN = replace(_PYTORCH, name="torchtitan", selective_products=0.5)

_PYTORCH_2023 = Software(
    name="pytorch-2023",
    products={"Ampere": 0.762, "Hopper": 0.6},
    attention={"Ampere": 0.41, "Hopper": 0.22},
    elementwise=1.37,
    launch_s=8e-6,
    gradient_bytes=4,
)

#: By name. The default is today's PyTorch with this library's engine.
SOFTWARE = {
    each.name: each
    for each in (
        _PYTORCH,
        _TORCHTITAN,
        # Products and the collectives of tp are cut into pieces that overlap (torch's async tensor parallelism), as
        # Megatron-Core's are: the same share is taken to be hidden.
        replace(_TORCHTITAN, name="torchtitan-async-tp", tp_hidden=0.8),
        _PYTORCH_2023,
        # The products of the year after it, whose rows were fitted; attention was no kernel yet.
        replace(_PYTORCH_2023, name="pytorch-2022", attention={}, gradient_bytes=2),
        Software(
            name="megatron-2021",
            products={"Ampere": 0.693},
            elementwise=0.976,
            is_fused=True,
            p2p_blocks=True,
            scatters_messages=True,
            overlaps_reductions=False,
            divides_evenly=True,
        ),
        Software(
            name="megatron-core-plain",
            products={"Blackwell": 0.627},
            attention={"Blackwell": 0.42},
            elementwise=1.17,
            is_fused=True,
            p2p_blocks=True,
            overlaps_reductions=False,
            divides_evenly=True,
            gradient_bytes=4,
        ),
        Software(
            name="megatron-core",
            products={"Ampere": 0.72, "Hopper": 0.761, "Blackwell": 0.627},
            attention={"Ampere": 0.5, "Hopper": 0.4, "Blackwell": 0.42},
            elementwise=1.17,
            is_fused=True,
            tp_hidden=0.8,
            divides_evenly=True,
        ),
        # Its stages are balanced by cost (``divides_evenly=False`` in its pipeline's configuration).
        replace(_PYTORCH, name="nanotron", p2p_blocks=True),
    )
}


def find_software(name: str) -> Software:
    """The generation of that name.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in SOFTWARE:
        hint = did_you_mean(name, SOFTWARE) or f" Known are: {', '.join(SOFTWARE)}."
        raise ConfigError(f"software={name!r} is not known.\n {hint}")
    return SOFTWARE[name]
