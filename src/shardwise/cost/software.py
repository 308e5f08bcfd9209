"""Constants of generations of software: shares of peaks that are reached, fusion, and overlap.

``products`` and ``attention`` are shares of the dense peak that large products and kernels of attention reach, one
number for each architecture. ``python -m bench.fit`` fits them, and the constants below, on published runs from the
sources in ``bench.predictions.FITTED``, and prints which. An architecture without runs has :data:`OF_BEST` of the best
measured product of its card; the shares of Ada and Blackwell are from unseen runs (planner.md: 0.85 to 0.95, and 0.52).
The other constants are priors; ``bench/fit.py`` has the mean and the source of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.cost.hardware import Gpu
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import did_you_mean

#: Share of a card's best measured product (``Gpu.best_product``) that training reaches, for architectures without
#: published runs: the mean of PyTorch's runs of 2024 (``bench/software.py``), 0.804 / 0.869 on A100 and 0.639 / 0.803
#: on H100.
OF_BEST = 0.85

#: Share of the products' speed that a kernel of attention reaches, likewise: 0.413 / 0.804 and 0.219 / 0.639.
OF_PRODUCTS = 0.43

#: Eager PyTorch: 12 to 20 us for a launch fit unseen runs (planner.md). No published run determines the host's
#: additional time for a unit. It follows from a step of 64 tokens of GPT-2-medium, which one H100's host issued in 66.4
#: ms, with 346 us in each unit for this library's hooks (bench/results/2026-11-26-gpu.md).
LAUNCH_S, UNIT_LAUNCHES = 16e-6, (42, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One generation of a framework.

    Attributes:
        name: Its name.
        products: Share of the dense peak that large, aligned products reach, by architecture.
        attention: Share of the dense peak that a kernel of attention reaches, without masked pairs, by architecture;
            empty: attention consists of products and element-wise work on scores.
        elementwise: Time of element-wise work, relative to ``cost.part``'s bytes at 85% of the memory's bandwidth.
        elementwise_eager: The same for eager kernels, by architecture, if they were measured separately.
        scores: Passes over the scores in forward, if attention is not one kernel.
        is_fused: Element-wise work is always fused, even if the workload is not compiled.
        fp8: Factor by which products are faster in fp8 than in bf16, scaling and casts included.
        launch_s: The host's time to launch one kernel; with 0 the device never waits for the host.
        unit_launches: The host's additional time for a unit's forward, in launches: modules, views, autograd and hooks
            of an eager unit; the hooks of a compiled one.
        tp_hidden: Share of the collectives of ``tp`` that products hide.
        p2p_blocks: Stages wait for messages to and from their neighbours.
        scatters_messages: Each rank of ``tp`` sends a part of the message to the next stage (Narayanan et al., SC'21,
            section 4.1).
        overlaps_reductions: Reductions of gradients and gathers of parameters overlap the computation.
        slowdown: Factor of computation and of communication while both run.
        link: Share of the links' bandwidth inside a node that collectives reach.
        network: Share of a node's network bandwidth that collectives reach.
        divides_evenly: Pipeline stages have equal numbers of blocks; else they are balanced with the head.
        gradient_bytes: Bytes of an element of a reduced gradient.
        selective_products: Share of the products that selective recomputation computes again.
    """

    name: str
    products: Mapping[str, float]
    attention: Mapping[str, float] = field(default_factory=dict)
    elementwise: float = 1.0
    elementwise_eager: Mapping[str, float] = field(default_factory=dict)
    scores: float = 9.83
    is_fused: bool = False
    fp8: float = 1.65
    launch_s: float = 0.0
    unit_launches: tuple[int, int] = UNIT_LAUNCHES
    tp_hidden: float = 0.0
    p2p_blocks: bool = False
    scatters_messages: bool = False
    overlaps_reductions: bool = True
    slowdown: float = 1.29
    link: float = 0.644
    network: float = 0.701
    divides_evenly: bool = False
    gradient_bytes: int = 2
    selective_products: float = 0.0


#: Hopper's values are measured: kernels of seven models, each kind separately (bench/results/2026-11-27-gpu-3.md).
PYTORCH = Software(
    name="pytorch",
    products={"Ampere": 0.804, "Hopper": 0.803, "Blackwell": 0.52, "Ada": 0.85},
    attention={"Ampere": 0.413, "Hopper": 0.55},
    launch_s=LAUNCH_S,
    elementwise=0.939,
    elementwise_eager={"Hopper": 1.46},
    gradient_bytes=4,
)
#: Software by name: PyTorch with this library's engine. ``bench/software.py`` adds generations of other frameworks.
SOFTWARE = {PYTORCH.name: PYTORCH}


def find_software(name: str, gpu: Gpu) -> Software:
    """The software of a name, with its constants multiplied by the GPU's ``speeds``.

    Raises:
        ConfigError: The name is not known.
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
