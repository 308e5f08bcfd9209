"""What is kept on the host instead of the compute device: the policy as plain data, and the choice of units.

====================  ===========================  ======================================  ===================
of a unit, groups     on the host                  on the device                           sent to the device
====================  ===========================  ======================================  ===================
trained, sharded      master, gradients, state     slot and gradient buffer while it runs  master, each gather
... parameters=False  the same                     also the shard, in the compute dtype    master, once a step
trained, replicated   master, gradients, state     replica; gradient buffer                master, once a step
frozen, sharded       shard                        slot while it runs                      shard, each gather
====================  ===========================  ======================================  ===================

A reduced gradient is sent to the host, once for each reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from shardwise.spec.errors import PlanError
from shardwise.spec.placement import Placements


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """What lives on the host.

    Attributes:
        parameters: Shards go back to the device for each gather. ``False``: of what the optimizer updates on the host,
            the device keeps its shard in the compute dtype, so that it is sent once after each update; frozen shards
            stay on the device. ``"auto"``: ``True`` where the strategy shards parameters; where it replicates them, the
            replica is on the device by definition.
        gradients: Where ``.grad`` lives: where the optimizer works.
        optimizer: The optimizer updates masters, and keeps its state, on the host, with the host's processor. ``False``
            offloads frozen parameters alone.
        ratio: The fraction of the bytes to offload. Whole units are chosen, spread evenly over the model.
        pin_memory: With CUDA, in page-locked memory, from which copies are asynchronous.

    Raises:
        PlanError: A value is out of range, or the combination offloads nothing or cannot work.
    """

    parameters: bool | str = "auto"
    gradients: bool = True
    optimizer: bool = True
    ratio: float = 1.0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("gradients", "optimizer", "pin_memory"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"OffloadPolicy({name}={getattr(self, name)!r}): expected True or False.")
        if not (isinstance(self.parameters, bool) or self.parameters == "auto"):
            raise PlanError(f"OffloadPolicy(parameters={self.parameters!r}): expected 'auto', True or False.")
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise PlanError(
                f"OffloadPolicy(ratio={self.ratio!r}): expected a number above 0 and at most 1.\n"
                "  To offload nothing, set offload_policy='none'."
            )
        if self.gradients != self.optimizer:
            raise PlanError(
                f"OffloadPolicy(gradients={self.gradients}, optimizer={self.optimizer}): torch's optimizers update a"
                " parameter where it lies, with its gradient and state beside it.\n  Give both the same value."
            )
        if not (self.optimizer or self.parameters):
            raise PlanError("OffloadPolicy offloads nothing.\n  Set offload_policy='none'.")

    def covers(self, row: Placements, *, is_trainable: bool) -> bool:
        """Whether a group of this row is kept on the host, if its unit is chosen."""
        if is_trainable:
            return self.optimizer
        return row.shards_parameters and bool(self.parameters)

    def keeps_shard(self, row: Placements) -> bool:
        """Whether the device keeps a shard of what the optimizer updates on the host."""
        return row.shards_parameters and not self.parameters


def offload_policy(value: object) -> OffloadPolicy | None:
    """The policy that ``offload_policy`` means; ``None`` where nothing is offloaded.

    Raises:
        PlanError: The value means none.
    """
    if value == "none":
        return None
    if value == "cpu":
        return OffloadPolicy()
    if isinstance(value, OffloadPolicy):
        return value
    known = tuple(field.name for field in fields(OffloadPolicy))
    if not isinstance(value, Mapping):
        raise PlanError(
            f"offload_policy={value!r}: expected 'none', 'cpu', or an OffloadPolicy (in a file a mapping of its"
            f" fields).\n  Its fields are: {', '.join(known)}."
        )
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise PlanError(f"offload_policy has no field {', '.join(unknown)}.\n  Its fields are: {', '.join(known)}.")
    return OffloadPolicy(**value)


def check_offload(policy: OffloadPolicy | None, row: Placements) -> None:
    """Refuse a policy that means nothing for a strategy.

    Raises:
        PlanError: It does.
    """
    if policy is None or row.shards_parameters:
        return
    if policy.parameters is True:
        raise PlanError(
            "OffloadPolicy(parameters=True) needs sharded parameters, but this strategy keeps them whole on every"
            f" device ({row.describe()}).\n  Use zero3 or shard_grad_op, or leave parameters at 'auto': masters,"
            " gradients and optimizer state are then on the host."
        )
    if not policy.optimizer:
        raise PlanError(
            "OffloadPolicy(optimizer=False) offloads frozen shards alone, but this strategy has no shards of"
            f" parameters ({row.describe()}).\n  Use zero3 or shard_grad_op."
        )


def choose(sizes: Sequence[int], ratio: float) -> list[bool]:
    """Which of some units are offloaded, so that their bytes come to ``ratio`` of all, spread evenly over the units.

    The sum is off by at most half of the largest unit.
    """
    chosen, due = [], 0.0
    for size in sizes:
        due += ratio * size
        is_chosen = size > 0 and due >= size / 2
        due -= size if is_chosen else 0
        chosen.append(is_chosen)
    return chosen
