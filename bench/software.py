"""Other frameworks' generations of software, which published rows were measured with: importing this adds them.

``python -m bench.fit`` fits their constants, as it fits those of ``shardwise.cost.software``.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost.software import LAUNCH_S, PYTORCH, SOFTWARE, Software

#: Runs of 2024 and early 2025: attention of Hopper is FlashAttention-2, and products are those of whole steps.
_PYTORCH_2024 = replace(
    PYTORCH,
    name="pytorch-2024",
    products={"Ampere": 0.804, "Hopper": 0.639, "Blackwell": 0.52},
    attention={"Ampere": 0.413, "Hopper": 0.219},
    elementwise=0.965,
    elementwise_eager={},
)

#: "Selective op" of torchtitan computes every second product again (its activation_checkpoint.py).
_TORCHTITAN = replace(_PYTORCH_2024, name="torchtitan", selective_products=0.5)

_PYTORCH_2023 = Software(
    name="pytorch-2023",
    products={"Ampere": 0.77, "Hopper": 0.613},
    attention={"Ampere": 0.413, "Hopper": 0.219},
    elementwise=1.32,
    launch_s=LAUNCH_S,
    gradient_bytes=4,
)

_MEGATRON_2021 = Software(
    name="megatron-2021",
    products={"Ampere": 0.817},
    is_fused=True,
    p2p_blocks=True,
    scatters_messages=True,
    overlaps_reductions=False,
    divides_evenly=True,
)

SOFTWARE.update(
    (each.name, each)
    for each in (
        _PYTORCH_2024,
        _TORCHTITAN,
        # Products and the collectives of tp are cut into pieces that overlap (torch's async tensor parallelism), as
        # Megatron-Core's are: the same share is taken to be hidden.
        replace(_TORCHTITAN, name="torchtitan-async-tp", tp_hidden=0.8),
        _PYTORCH_2023,
        # The products of the year after it, whose rows were fitted; attention was no kernel yet.
        replace(_PYTORCH_2023, name="pytorch-2022", attention={}, gradient_bytes=2),
        _MEGATRON_2021,
        # DeepSpeed's fork of it on Jean Zay, where BLOOM was trained.
        replace(_MEGATRON_2021, name="megatron-deepspeed", products={"Ampere": 0.672}, elementwise=1.09),
        Software(
            name="megatron-core-plain",
            products={"Blackwell": 0.64},
            attention={"Blackwell": 0.444},
            elementwise=1.07,
            is_fused=True,
            p2p_blocks=True,
            overlaps_reductions=False,
            divides_evenly=True,
            gradient_bytes=4,
        ),
        Software(
            name="megatron-core",
            products={"Ampere": 0.72, "Hopper": 0.724, "Blackwell": 0.64},
            attention={"Ampere": 0.5, "Hopper": 0.481, "Blackwell": 0.444},
            elementwise=1.07,
            is_fused=True,
            tp_hidden=0.8,
            divides_evenly=True,
        ),
        # Its stages are balanced by cost (``divides_evenly=False`` in its pipeline's configuration).
        # What its host takes besides launches nobody has measured.
        replace(_PYTORCH_2024, name="nanotron", p2p_blocks=True, launch_s=8e-6, unit_launches=(0, 0)),
    )
)
