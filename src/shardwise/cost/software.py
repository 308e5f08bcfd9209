"""Generations of software on the same hardware: shares of peaks, what is fused, what is hidden.

``products`` and ``attention`` are shares of the dense peak that large products and kernels of attention reach, one
number for each architecture. ``python -m bench.fit`` fits them, and the constants below them, on rows of the sources
that ``bench.predictions.FITTED`` names, and prints which. An architecture without rows has :data:`OF_BEST` of what was
measured at best on its card; Ada's share and Blackwell's are from unseen runs (planner.md: 0.85 to 0.95, and 0.52). The
other constants are priors; ``bench/fit.py`` gives the mean and the source of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.cost.hardware import Gpu
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import did_you_mean

#: Share of the best product that was measured on a card (``Gpu.best_product``) where no row says what training reaches:
#: the mean of PyTorch's runs of 2024 (``bench/software.py``), 0.804 / 0.869 on A100 and 0.639 / 0.803 on H100.
OF_BEST = 0.85

#: The same of one kernel of attention, of the share of products: 0.413 / 0.804 and 0.219 / 0.639.
OF_PRODUCTS = 0.43

#: Eager PyTorch: 12 to 20 us a launch fit unseen runs (planner.md). No published row depends on what a unit takes
#: besides: it follows from the 66.4 ms in which the host of one H100 issued a step of 64 tokens of GPT-2-medium, and
#: the 346 us of each of its units that are this library's hooks (bench/results/2026-11-26-gpu.md).
LAUNCH_S, UNIT_LAUNCHES = 16e-6, (42, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One generation of a framework.

    Attributes:
        name: Its name.
        products: Share of the dense peak that large, aligned products reach, by architecture.
        attention: The same of one kernel of attention, masked pairs not counted; empty: attention is products and
            element-wise work on scores.
        elementwise: Time of element-wise work over that of ``cost.part``'s bytes at 85% of the memory's bandwidth.
        elementwise_eager: The same of eager kernels, by architecture, where they were measured by themselves.
        scores: Where attention is not one kernel: passes over the scores in forward.
        is_fused: Element-wise work is fused whatever the workload says.
        fp8: How much faster products are in fp8 than in bf16, scaling and casts included.
        launch_s: The host's time to launch one kernel; the host is never late where it is 0.
        unit_launches: The host's time for the rest of a unit's forward, in launches: modules, views, autograd and hooks
            of an eager unit; the hooks of a compiled one.
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
    elementwise_eager: Mapping[str, float] = field(default_factory=dict)
    scores: float = 6.41
    is_fused: bool = False
    fp8: float = 1.65
    launch_s: float = 0.0
    unit_launches: tuple[int, int] = UNIT_LAUNCHES
    tp_hidden: float = 0.0
    p2p_blocks: bool = False
    scatters_messages: bool = False
    overlaps_reductions: bool = True
    slowdown: float = 1.29
    link: float = 0.717
    network: float = 0.706
    divides_evenly: bool = False
    gradient_bytes: int = 2
    selective_products: float = 0.0


#: Hopper's are those of the kernels of seven models, each kind by itself (bench/results/2026-11-27-gpu-3.md).
PYTORCH = Software(
    name="pytorch",
    products={"Ampere": 0.804, "Hopper": 0.803, "Blackwell": 0.52, "Ada": 0.85},
    attention={"Ampere": 0.413, "Hopper": 0.55},
    launch_s=LAUNCH_S,
    elementwise=0.939,
    elementwise_eager={"Hopper": 1.46},
    gradient_bytes=4,
)
#: By name: today's PyTorch with this library's engine. ``bench/software.py`` adds other frameworks' generations.
SOFTWARE = {PYTORCH.name: PYTORCH}


def find_software(name: str, gpu: Gpu) -> Software:
    """The generation of that name on a GPU, as fast as its ``speeds`` say.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in SOFTWARE:
        hint = did_you_mean(name, SOFTWARE) or f" Known are: {', '.join(SOFTWARE)}."
        raise ConfigError(f"software={name!r} is not known.\n {hint}")
    found = SOFTWARE[name]
    if not gpu.speeds:
        return found
    products, link, network, launch = (gpu.speeds.get(name, 1.0) for name in ("products", "link", "network", "launch"))
    return replace(
        found,
        products={gpu.arch: products * found.products.get(gpu.arch, OF_BEST * gpu.best_product)},
        attention={arch: products * share for arch, share in found.attention.items()},
        link=link * found.link,
        network=network * found.network,
        launch_s=found.launch_s / launch,
    )
