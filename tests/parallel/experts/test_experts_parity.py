"""Expert parallelism against one plain process: float64, where only the order of sums differs, and fp32."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise.parallel.experts.layer import apply_experts, find_mixtures
from shardwise.spec.slice import slice_of
from tests.common.split import SEQ, VOCAB, Case, check

pytestmark = pytest.mark.preload(
    "transformers.models.mixtral.modeling_mixtral", "transformers.models.qwen3_moe.modeling_qwen3_moe"
)


@dataclass(frozen=True)
class Mixture(Case):
    """A run under expert parallelism."""

    tp: int = 1
    ep: int = 2
    family: str = "gpt"
    capacity: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        return super().fields | {"ep": self.ep, "expert_capacity": self.capacity}

    def build(self) -> nn.Module:
        torch.manual_seed(7)
        if self.family == "gpt":
            sizes = {"num_layers": 3, "hidden": 16, "num_heads": 2, "vocab_size": VOCAB, "seq_len": SEQ}
            sizes |= {"num_experts": 4, "tied": False}
            return sw.models.gpt("gpt-tiny", **(sizes | dict(self.model))).to(self.dtype)
        transformers = pytest.importorskip("transformers")
        sizes = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCAB}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
        sizes |= {"output_router_logits": True, "max_position_embeddings": SEQ, "attn_implementation": "eager"}
        if self.dtype is torch.float64:
            sizes["experts_implementation"] = "eager"  # torch's grouped products are for narrower dtypes
        if self.family == "mixtral":
            config = transformers.MixtralConfig(**(sizes | dict(self.model)), num_local_experts=4)
            return transformers.MixtralForCausalLM(config).to(self.dtype)
        config = transformers.Qwen3MoeConfig(
            **(sizes | dict(self.model)), num_experts=4, moe_intermediate_size=24, head_dim=8
        )
        return transformers.Qwen3MoeForCausalLM(config).to(self.dtype)

    def batch(self, step: int, microbatch: int, reader: int) -> Any:
        tokens_BT, targets_BT = super().batch(step, microbatch, reader)
        return (tokens_BT, targets_BT) if self.family == "gpt" else {"input_ids": tokens_BT, "labels": tokens_BT}

    def loss(self, model: nn.Module, step: int, microbatch: int, reader: int) -> Tensor:
        read = self.batch(step, microbatch, reader)
        return model(*read) if self.family == "gpt" else model(**read).loss

    def prepare_plain(self, model: nn.Module) -> None:
        """The capacity alone."""
        if self.capacity is not None:
            apply_experts(find_mixtures(model, 1), None, self.capacity)

    def inspect(self, model: nn.Module) -> None:
        marks = [mark for mark in map(slice_of, model.parameters()) if mark is not None and mark.is_expert]
        assert bool(marks) == (self.ep > 1)
        fields = self.fields
        if marks and self.family != "gpt":
            assert {len(mark.cuts) for mark in marks} == {2 if fields["tp"] > 1 and "tp_plan" not in fields else 1}
        state = sw.full_state_dict(model)
        assert distributed.get_rank() or list(state) == list(self.build().state_dict())

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return AllInDouble() if self.by_train_step and self.dtype is torch.float64 else contextlib.nullcontext()


RECOMPUTED = (("activation_checkpointing", "full"),)


def test_two_ranks_with_half_of_the_experts_each_equal_one_process():
    check(
        2,
        Mixture(),
        Mixture(strategy="ddp", max_norm=0.5),
        Mixture(strategy="zero1", num_microbatches=2),
        Mixture(strategy="zero2", plan=RECOMPUTED),
        Mixture(family="mixtral"),
        Mixture(family="qwen3", strategy="shard_grad_op"),
        Mixture(capacity=0.7),
        Mixture(capacity=0.7, ep=1),
        Mixture(family="mixtral", capacity=0.7, plan=RECOMPUTED),
        Mixture(dtype=torch.float32),
        Mixture(family="mixtral", dtype=torch.float32),
    )


@pytest.mark.transports
def test_four_ranks_that_share_experts_or_hold_one_each_equal_one_process():
    check(
        4,
        Mixture(max_norm=0.5),
        Mixture(strategy="ddp"),
        Mixture(strategy="hsdp", plan=(("dp_replicate", 2),), num_microbatches=2),
        Mixture(ep=4),
        Mixture(ep=4, family="mixtral", capacity=0.6),
    )


class AllInDouble(TorchFunctionMode):
    """Nothing of float64 is narrowed: models of transformers compute norms, scores and losses in float32 otherwise.

    There a last bit of float64, by which sums in parts differ, now and then turns into one of float32.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if function is Tensor.float:
                return args[0]
            if function is Tensor.to:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def check_beside(world: int, *cases: Mixture) -> None:
    """Beside another axis: clipped steps of ``sw.train_step``, in as many microbatches as there are stages."""
    check(
        world,
        *(
            dataclasses.replace(
                case,
                by_train_step=True,
                max_norm=0.3,
                num_microbatches=max(case.fields.get("pp", 1), case.num_microbatches),
            )
            for case in cases
        ),
    )


TP = (("tp", 2),)
#: A table that leaves experts whole on every rank of tp.
WHOLE_EXPERTS = (
    *TP,
    ("tp_plan", {f"model.layers.*.mlp.experts{name}": "replicate" for name in ("", ".gate_up_proj", ".down_proj")}),
)


def test_stacked_experts_cut_by_tp_too_equal_one_process():
    check_beside(
        4,
        Mixture(family="mixtral", plan=TP),
        Mixture(family="qwen3", strategy="ddp", capacity=0.7, plan=TP),
        Mixture(family="mixtral", strategy="zero2", num_microbatches=2, plan=WHOLE_EXPERTS),
        Mixture(family="mixtral", dtype=torch.float32, plan=(*TP, *RECOMPUTED)),
        Mixture(family="mixtral", ep=1, capacity=0.7, plan=TP),
    )


@pytest.mark.long
def test_experts_beside_tensor_pipeline_and_context_parallelism_equal_one_process():
    single = Mixture(dtype=torch.float32, family="mixtral")
    check_beside(
        4,
        Mixture(plan=TP),
        Mixture(strategy="ddp", plan=TP),
        Mixture(plan=(("cp", 2),)),
        Mixture(plan=(("pp", 2),)),
        Mixture(strategy="zero1", plan=(("pp", 2),)),
        dataclasses.replace(single, strategy="zero1", num_microbatches=2, plan=TP),
        dataclasses.replace(single, strategy="shard_grad_op", plan=(*TP, ("offload_policy", "cpu"))),
        Mixture(family="mixtral", plan=(("pp", 2),), model=(("output_router_logits", False),)),
    )


@pytest.mark.long
def test_stacked_experts_under_every_axis_equal_one_process():
    silent = (("output_router_logits", False),)
    check_beside(
        8,
        Mixture(family="mixtral", plan=TP),
        Mixture(family="mixtral", strategy="hsdp", plan=(*TP, ("dp_replicate", 2))),
        Mixture(family="qwen3", plan=(*TP, ("pp", 2)), model=silent),
    )
