"""Other engines, set up as their documentation recommends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Trainee:
    """A model under an engine.

    Attributes:
        model: Called for the loss.
        backward: From the loss to gradients, reduced over the ranks.
        update: From gradients to new parameters; gradients are cleared.
    """

    model: nn.Module
    backward: Callable[[Tensor], None]
    update: Callable[[], None]

    @classmethod
    def with_optimizer(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
        """A model whose loss runs backward by itself, and torch's kind of optimizer."""

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return cls(model, backward=Tensor.backward, update=update)


def load_deepspeed() -> None:
    """Import the package, which takes seconds and tens of megabytes."""
    import deepspeed  # noqa: F401  # pyrefly: ignore[missing-import]


def deepspeed_zero(stage: int) -> Callable[[nn.Module, list[nn.Module], torch.device], Trainee]:
    """ZeRO of that stage over the whole world."""

    def build(model: nn.Module, _units: list[nn.Module], device: torch.device) -> Trainee:
        import deepspeed  # pyrefly: ignore[missing-import]

        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only its ratio to the global batch matters, for its own counters
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # it clips to 1 where nothing is said
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

        def backward(loss: Tensor) -> None:
            engine.backward(loss)

        return Trainee(engine, backward=backward, update=engine.step)

    return build


#: From a plain model, the modules that become units, and the device, to a model that trains.
Build = Callable[[nn.Module, list[nn.Module], torch.device], Trainee]


def single(model: nn.Module, _units: list[nn.Module], _device: torch.device) -> Trainee:
    """One process, nothing around the model."""
    return Trainee.with_optimizer(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def ddp(model: nn.Module, _units: list[nn.Module], device: torch.device) -> Trainee:
    """DistributedDataParallel whose gradients live in its buckets."""
    wrapped = _ddp(model, device)
    return Trainee.with_optimizer(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=LEARNING_RATE))


def zero1(model: nn.Module, _units: list[nn.Module], device: torch.device) -> Trainee:
    """The same with the optimizer's state dealt out over the ranks."""
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,
    )  # importing it warns that torch.jit.script is deprecated

    wrapped = _ddp(model, device)
    return Trainee.with_optimizer(
        wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE)
    )


def fsdp1(model: nn.Module, units: list[nn.Module], device: torch.device) -> Trainee:
    """FullyShardedDataParallel over the units' classes, with the original parameters."""
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(unit) for unit in units})
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy if units else None, use_orig_params=True, device_id=device
    )
    return Trainee.with_optimizer(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=LEARNING_RATE))


def fsdp2(model: nn.Module, units: list[nn.Module], device: torch.device) -> Trainee:
    """``fully_shard`` per unit, then on the root."""
    return _fsdp2(model, units, device, reshard_after_forward=None)


def fsdp2_noreshard(model: nn.Module, units: list[nn.Module], device: torch.device) -> Trainee:
    """The same, with parameters kept whole from forward to backward."""
    return _fsdp2(model, units, device, reshard_after_forward=False)


BUILDS: dict[str, Build] = {
    "deepspeed-1": deepspeed_zero(1),
    "deepspeed-2": deepspeed_zero(2),
    "deepspeed-3": deepspeed_zero(3),
    "single": single,
    "torch-ddp": ddp,
    "torch-fsdp1": fsdp1,
    "torch-fsdp2": fsdp2,
    "torch-fsdp2-noreshard": fsdp2_noreshard,
    "torch-zero1": zero1,
}


def _ddp(model: nn.Module, device: torch.device) -> nn.Module:
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def _fsdp2(
    model: nn.Module, units: list[nn.Module], device: torch.device, *, reshard_after_forward: bool | None
) -> Trainee:
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for module in [*units, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return Trainee.with_optimizer(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
