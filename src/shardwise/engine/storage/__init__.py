"""Forms of a shard, and of its way into the gathered buffer: in int8, on the host, kept over a few ranks.

Also what extensions, weights and optimizers all know of shards: what is left alone (``ignored``), gradients
that wait for their reduction (``waiting``), and how optimizers hold shards (``flat_parameters``, ``optimizer``).
"""

from __future__ import annotations

from shardwise.engine.group import Form
from shardwise.engine.storage.host import OnHost
from shardwise.engine.storage.inner import Inner
from shardwise.engine.storage.packed import Frozen, Packed
from shardwise.spec.facts import GroupFacts
from shardwise.spec.policies import OffloadPolicy


def form_of(facts: GroupFacts, offload: OffloadPolicy | None) -> Form:
    """The form of a group; ``offload`` says what of its unit is kept on the host, ``None``: nothing."""
    form = Form()
    if facts.held_as is not None:
        form = Frozen()
    elif facts.sent_as is not None or facts.reduced_as is not None:
        form = Packed()
    if facts.is_offloaded and offload is not None:
        form = OnHost(form, offload)
    return Inner(form, facts.inner_size) if facts.inner_size else form
