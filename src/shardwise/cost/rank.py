"""One rank of a plan, and what it holds of a microbatch: the numbers that every unit's work is counted with."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.part import Arithmetic
from shardwise.cost.unit import Exchange
from shardwise.cost.workload import Workload
from shardwise.spec.shape import ModelShape


def item_bytes(workload: Workload) -> int:
    """Bytes of an element of an activation; with fp8 products, too, activations are 16 bit."""
    return 4 if workload.precision == "fp32" else 2


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees that divide a unit's work.

    Attributes:
        tp: Ranks that divide the layers.
        cp: Ranks that divide a sequence.
        ep: Ranks that divide the experts.
        divides_sequence: Norms, dropouts and the residual stream are divided by ``tp``, too.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    divides_sequence: bool = False


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank and one microbatch, of sequences of one length.

    Attributes:
        shape: The model.
        degrees: What is divided.
        workload: What is trained.
        seq_len: Positions of a sequence.
    """

    shape: ModelShape
    degrees: Degrees
    workload: Workload
    seq_len: int

    @property
    def tokens(self) -> float:
        """Positions of the microbatch on this rank, ``n``."""
        return self.workload.micro_batch * self.seq_len / self.degrees.cp

    @property
    def stream(self) -> float:
        """Elements of the residual stream, ``n h``."""
        return self.tokens * self.shape.hidden

    @property
    def between(self) -> float:
        """Elements of the residual stream between the layers that ``tp`` divides."""
        return self.stream / (self.degrees.tp if self.degrees.divides_sequence else 1)

    @property
    def item(self) -> int:
        """Bytes of an element of an activation."""
        return item_bytes(self.workload)

    @property
    def trains(self) -> bool:
        """Whether the model's own weights are trained, not adapters."""
        return self.workload.lora_rank is None

    @property
    def arithmetic(self) -> Arithmetic:
        """The form in which parts are computed."""
        return Arithmetic(self.item, is_fused=self.workload.compile, trains=self.trains)

    def exchanges(self, num_pairs: int) -> list[Exchange]:
        """The exchanges of ``num_pairs`` pairs of layers that ``tp`` divides by columns and then by rows."""
        if self.degrees.tp == 1:
            return []
        moved = self.item * self.stream
        if self.degrees.divides_sequence:
            pair = [Exchange(kind, "tp", moved, moved) for kind in ("all_gather", "reduce_scatter")]
        else:
            pair = [Exchange("all_reduce", "tp", moved, moved)]
        return pair * num_pairs
