"""Forms in which groups are stored and moved: packed (int8, 16 bit), on the host, kept over a few ranks.

Also the facts about shards that extensions, weights and optimizers share: ignored parameters (``ignored``), gradients
that wait for their reduction (``waiting``), and how optimizers store shards (``flat_parameters``, ``optimizer``).
"""

from __future__ import annotations

from shardwise.engine.group import Form
from shardwise.engine.storage.host import OnHost
from shardwise.engine.storage.inner import Inner
from shardwise.engine.storage.packed import Frozen, Packed
from shardwise.spec.policies import OffloadPolicy
from shardwise.spec.unit_facts import GroupFacts


def form_of(facts: GroupFacts, offload: OffloadPolicy | None) -> Form:
    """Make the form of a group; ``offload`` is the policy of its unit, ``None``: nothing is stored on the host."""
    form = Form()
    if facts.stored_as is not None:
        form = Frozen()
    elif facts.gathered_as is not None or facts.reduced_as is not None:
        form = Packed()
    if facts.is_offloaded and offload is not None:
        form = OnHost(form, offload)
    return Inner(form, facts.inner_size) if facts.inner_size else form
