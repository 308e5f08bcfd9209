"""The record of a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Record:
    """A line of ``metrics.jsonl``: one step.

    Attributes:
        step: From 1: steps done after this one.
        loss: Mean training loss of the step over all ranks and microbatches; ``None`` where a loop of one's own has
            not said any.
        grad_norm: Global norm of the gradient before clipping. Not finite in a step that fp16's loss scaling skipped;
            ``None`` where backward updates, as all gradients are never there at once.
        lr: Learning rate of the step.
        tokens: Tokens trained on so far, over all ranks.
        tokens_per_s: Tokens of this step over its time, over all ranks.
        step_time_s: Wall time of the step.
        data_time_s: Part of it that was spent waiting for data.
        mfu: Share of the devices' dense peak, per GPU; ``None`` where the peak is unknown.
        peak_memory_bytes: Most bytes of tensors held at once so far, the largest over the ranks.
        collective_bytes: Bytes that rank 0 sent in this step.
        exposed_time_s: Part of ``step_time_s`` in which rank 0 waited for communication of the model (gathers,
            reductions, ``tp``, ``pp``, ``cp``, ``ep``), a wait for a rank that comes later included; measured by the
            host where it waits. ``None`` on a GPU, where the host does not wait: ``--profile-steps`` shows it there.
        optimizer_time_s: Part of ``step_time_s`` for clipping and the optimizer's step, on rank 0; ``None`` where
            backward updates.
        loss_scale: What the loss was multiplied by for the backward; ``None`` where nothing is in fp16.
        eval_loss: The held-out loss after this step, left out of the line where it was not taken. The one before the
            first step is in ``summary.json``.
        values: Other values of the step or its evaluation, by name: each is a key of its own in the line.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_s: float
    step_time_s: float
    data_time_s: float
    mfu: float | None
    peak_memory_bytes: int
    collective_bytes: int
    loss_scale: float | None = None
    optimizer_time_s: float | None = None
    exposed_time_s: float | None = None
    eval_loss: float | None = None
    values: dict[str, float] = field(default_factory=dict)
