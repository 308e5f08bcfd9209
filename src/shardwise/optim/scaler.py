"""Loss scaling for fp16, with a common decision of all ranks about gradients that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.engine.storage import part
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.storage.optimizer import engines_of
from shardwise.engine.storage.waiting import refuse_sums
from shardwise.optim.in_backward import refuse
from shardwise.spec.errors import StateError


class GradScaler(torch.amp.GradScaler):
    """torch's ``GradScaler`` for a parallelized model: an inf or nan on one rank skips the step on all ranks.

    fp16 gradients vanish below 6e-8 and overflow above 65504, so the loss is multiplied by a scale as large as the
    gradients allow. A step whose gradients have an inf or nan is skipped and the scale falls; after ``growth_interval``
    good steps it grows. If gradients are sharded, an inf is in one rank's shard only, and torch's scaler would skip the
    step on that rank only. Here ``unscale_`` (which ``step`` calls if you have not) reduces the findings of all ranks.
    ::

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        sw.clip_grad_norm(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        device: ``"cuda"`` or ``"cpu"``; by default CUDA if available.
        init_scale: The scale of the first step.
        growth_factor: Factor of the scale after ``growth_interval`` good steps.
        backoff_factor: Factor of the scale after a step with inf or nan.
        growth_interval: Number of good steps after which the scale grows.
        enabled: ``False``: no scaling, and no check.

    Collective:
        For each ``unscale_`` one all-reduce of one float32 over the data-parallel ranks (if gradients are sharded,
        parameters ignored or experts divided), and one on each of ``tp`` and ``pp`` that the mesh has. All ranks must
        call.
    """

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: FBT001 - torch's signature
    ) -> dict[torch.device, Tensor]:
        """Unscale as torch does, and reduce the finding over all ranks.

        ``torch.distributed.fsdp.sharded_grad_scaler`` overrides this method too: all users of the finding, including
        fused optimizers, get it from here. There is no public hook between finding and use.
        """
        engines = engines_of(optimizer)
        for engine in engines:
            refuse(engine, "sw.GradScaler")
            refuse_sums(engine, "sw.GradScaler's unscale_()")
            for group in engine.groups:
                if group.dtype is torch.float16 and group.wants_gradients and not allow_fp16:
                    raise StateError(
                        f"parameter {group.layout.params[0].name!r} is kept in fp16: unscaled, its gradients would"
                        " vanish.\n  Keep masters in fp32: PrecisionPolicy(param_dtype='fp16', master_dtype='fp32')."
                    )
        with part.as_plain_tensors():
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        total = torch.zeros(1, dtype=torch.float32, device=found_inf.device)
        for value in found.values():
            total += value.to(total.device)
        for engine in engines:
            # Ranks of one shard group have different gradients; of ignored parameters all ranks have.
            comm = engine.comms.control if ignored_of(engine).parameters else engine.comms.reduce
            has_own = engine.placements.shards_optimizer or ignored_of(engine).parameters or engine.comms.ep
            if has_own:  # otherwise all ranks have checked the same gradients
                shared = total.to(comm.device)
                comm.all_reduce(shared, unit="found_inf").wait()
                total = shared.to(total.device)
            for comm in engine.comms.model_parallel:
                shared = total.to(comm.device)
                comm.all_reduce(shared, unit="found_inf").wait()
                total = shared.to(total.device)
        # Also on a rank that owns no gradient. Fused optimizers skip a step if this is 1, not if it is 2.
        return {found_inf.device: total.clamp(max=1).squeeze(0)}

    @property
    def has_found_inf(self) -> bool:
        """Whether gradients unscaled since the last ``update`` have an inf or nan on some rank, so that steps skip."""
        if not self.is_enabled():
            return False
        found = [v for state in self._per_optimizer_states.values() for v in state["found_inf_per_device"].values()]
        return any(value.item() != 0 for value in found)


def needs_scaler(model: nn.Module) -> bool:
    """Whether gradients of ``model`` are computed or reduced in fp16."""
    engine = engine_of(model, "needs_scaler")
    return any(
        torch.float16 in (group.compute_dtype, group.reduce_dtype) for group in engine.groups if group.wants_gradients
    )
