"""The workload of a step: sequences, microbatches, dtypes, optimizer, recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.errors import ConfigError
from shardwise.spec.memory.eight_bit import TENSORS
from shardwise.spec.text import did_you_mean

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
RECOMPUTE = ("none", "selective", "full")

#: State tensors in fp32 of each optimizer for a parameter; for Muon, a parameter that is not a hidden matrix.
OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "muon": 2, "adamw8bit": TENSORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of one step on the whole cluster.

    Attributes:
        seq_len: Tokens of a sequence.
        global_batch: Sequences of a step, over all ranks and microbatches.
        micro_batch: Sequences of one forward on one data-parallel rank.
        precision: Dtype of matrix products. Masters, gradients' sums and optimizer state are fp32.
        optimizer: ``adamw``, ``adam``, ``sgd`` (without momentum), ``sgd-momentum``, ``muon`` (``sw.Muon``, with AdamW
            for parameters that are not hidden matrices) or ``adamw8bit`` (torchao's, with moments in 8 bit).
        recompute: Recomputation in backward: ``"none"``; ``"selective"``, all but products and attention; ``"full"``,
            every block; or the number of blocks that are fully recomputed.
        compile: The model is compiled, so that element-wise operations are fused.
        in_backward: Each unit is updated inside backward, so that gradients exist for one unit at a time.
        decoder_seq_len: Tokens of the decoder's sequence if the model also has an encoder; ``None``: ``seq_len``.
        chunked_loss: The loss is computed for a part of the positions at a time, so that full logits never exist.
        has_average: A moving average of the weights is kept in fp32 (``train.ema_decay``).
        lora_rank: Train low-rank adapters of this rank on every linear layer of the blocks, in a mixture of experts of
            attention; ``None``: train everything.

    Raises:
        ConfigError: A value is out of range or not one of the above.
    """

    seq_len: int
    global_batch: int
    micro_batch: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    recompute: str | int = "none"
    compile: bool = False
    in_backward: bool = False
    chunked_loss: bool = False
    has_average: bool = False
    lora_rank: int | None = None
    decoder_seq_len: int | None = None

    @property
    def optimizer_tensors(self) -> float:
        """State tensors in fp32 for each parameter, average included; for Muon, one that is not a hidden matrix."""
        return OPTIMIZERS[self.optimizer] + self.has_average

    @property
    def matrix_tensors(self) -> float:
        """State tensors in fp32 for a hidden matrix."""
        return self.optimizer_tensors - (self.optimizer == "muon")

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r}: expected a whole number of at least 1.\n    Set for example {name}={default}."
            for name, default in {
                "seq_len": 2048,
                "global_batch": 64,
                "micro_batch": 1,
                "decoder_seq_len": 512,
                "lora_rank": 16,
            }.items()
            if not _is_count(value := getattr(self, name), least=1)
            and not (value is None and name in {"decoder_seq_len", "lora_rank"})
        ]
        for name, choices in {"precision": PRECISIONS, "optimizer": tuple(OPTIMIZERS)}.items():
            if (word := getattr(self, name)) not in choices:
                hint = did_you_mean(str(word), choices) or f" Set {name} to one of them."
                problems.append(f"{name}={word!r}: expected {', '.join(choices)}.\n   {hint}")
        if self.recompute not in RECOMPUTE and not _is_count(self.recompute, least=0):
            hint = did_you_mean(str(self.recompute), RECOMPUTE) or " Set for example recompute='full'."
            problems.append(
                f"recompute={self.recompute!r}: expected {', '.join(RECOMPUTE)} or a number of blocks.\n   {hint}"
            )
        if problems:
            raise ConfigError("workload:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
