"""What a step trains: sequences, microbatches, dtypes, optimizer, recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step computes on the whole cluster.

    Attributes:
        seq_len: Tokens of a sequence.
        global_batch: Sequences of a step, over all ranks and microbatches.
        micro_batch: Sequences of one forward on one data-parallel rank.
        precision: Dtype that products run in. Masters, gradients' sums and optimizer state are fp32.
        optimizer: ``adamw``, ``adam``, ``sgd`` (without momentum) or ``sgd-momentum``.
        recompute: What backward computes again: ``"none"``; ``"selective"``, all but products and attention;
            ``"full"``, every block; or the number of blocks of which everything is recomputed.
        compile: The model is compiled, so that element-wise operations are fused.
        in_backward: Each unit is updated inside backward, so that gradients exist for one unit at a time.
        decoder_seq_len: Tokens of the decoder's sequence where the model has an encoder, too; ``None``: ``seq_len``.
        lora_rank: Train low-rank adapters of this rank on every linear layer of the blocks; ``None``: train everything.

    Raises:
        ConfigError: A value is not one of those above.
    """

    seq_len: int
    global_batch: int
    micro_batch: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    recompute: str | int = "none"
    compile: bool = False
    in_backward: bool = False
    lora_rank: int | None = None
    decoder_seq_len: int | None = None

    @property
    def optimizer_tensors(self) -> int:
        """State tensors that the optimizer keeps for each parameter."""
        return {"sgd": 0, "sgd-momentum": 1}.get(self.optimizer, 2)

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r}; expected a whole number of at least 1"
            for name in ("seq_len", "global_batch", "micro_batch")
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int) or value < 1
        ]
        if self.precision not in PRECISIONS:
            problems.append(f"precision={self.precision!r}; expected one of {', '.join(PRECISIONS)}")
        if not isinstance(self.recompute, int) and self.recompute not in RECOMPUTE:
            problems.append(f"recompute={self.recompute!r}; expected {', '.join(RECOMPUTE)} or a number of blocks")
        if problems:
            raise ConfigError("workload:\n" + "\n".join(f"  - {problem}" for problem in problems))
