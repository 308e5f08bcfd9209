"""TRL's DPO, KTO, reward and GRPO trainers by the mixin on two ranks, compared with TRL's own in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.storage.attachment import attachment_of
from shardwise.testing import run_on_ranks
from tests.integrations.test_transformers_trainer import Log, build, close, logged, settings

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL still says gradient_checkpointing
]

KINDS = ("dpo", "kto", "reward", "grpo")
_GROUP = 4  # completions of one prompt, of which GRPO's advantages are taken
_ASKED = [f"what is {n}+{n}? " for n in range(16)]


class Found(NamedTuple):
    """A trainer's run: its log, its parameters before and after, the reference model's parameters.

    ``reference_share`` is the part of the reference model's values that a rank owns, ``None`` without such a model.
    """

    log: Log
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    reference: dict[str, Tensor]
    reference_share: float | None


def tokenizer() -> Any:
    from shardwise.train.data.tokenizer import byte_tokenizer

    made = byte_tokenizer()
    made.eos_token = made.pad_token = chr(0x100)
    return made


def rows(kind: str) -> Any:
    """Samples of the form that the trainer expects."""
    from datasets import Dataset

    chosen = [f"{2 * n}!" for n in range(16)]
    rejected = ["no idea" * (1 + n % 2) for n in range(16)]
    if kind in ("dpo", "reward"):
        return Dataset.from_dict({"prompt": _ASKED, "chosen": chosen, "rejected": rejected})
    if kind == "kto":
        # KTO pairs each prompt with the completion of the next row of this rank's batch. Two completions that
        # alternate give the same pairs in batches of two and of four.
        told = [chosen[n // 4] if n % 2 else rejected[n // 4] for n in range(16)]
        return Dataset.from_dict({"prompt": _ASKED, "completion": told, "label": [n % 2 == 1 for n in range(16)]})
    return Dataset.from_dict({"prompt": _ASKED})


class Draws:
    """Draws for each row of all ranks' generation batch what one process draws for it.

    Low tokens are likelier, the end of text (0) among them: lengths differ between the ranks, and losses are not near
    zero.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.generation, self.step = rank, 0, 0

    def __call__(self, probabilities: Tensor, num_samples: int) -> Tensor:
        assert num_samples == 1
        self.step += 1
        seed = torch.Generator().manual_seed(100 * self.generation + self.step)
        noise = torch.rand(2 * _GROUP, 1, generator=seed).pow(4)
        noise = noise[self.rank * len(probabilities) :][: len(probabilities)]
        return torch.searchsorted(probabilities.cumsum(-1), noise).clamp(max=probabilities.shape[-1] - 1)

    def reward(self, completion_ids: list[list[int]], **_given: Any) -> list[float]:
        """The share of even tokens. It is asked once for each generation, on every rank."""
        self.generation, self.step = self.generation + 1, 0  # a rank whose rows have all ended draws no more
        return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def reward_model() -> nn.Module:
    from transformers import LlamaForSequenceClassification

    config = build().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def whole(model: nn.Module) -> dict[str, Tensor]:
    state = sw.full_state_dict(model) if attachment_of(model) is not None else model.state_dict()
    return {name: value.clone() for name, value in state.items()}


def fit(kind: str, folder: str, world: int, base: str, *, is_adapted: bool, plan: str | None = None) -> Found:
    """Train four steps with TRL's trainer, in one process or by the mixin."""
    import trl
    from peft import LoraConfig
    from transformers import LlamaForCausalLM

    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}[kind]
    owner: Any = getattr(trl, f"{name}Trainer")
    draws = Draws(dist.get_rank() if world > 1 else 0)
    own: dict[str, Any] = {"dpo": {"max_length": 48}, "reward": {"max_length": 48}}.get(kind, {})
    given: dict[str, Any] = {"model": reward_model() if kind == "reward" else build()}
    if kind == "grpo":
        own = {"num_generations": _GROUP, "max_completion_length": 5, "beta": 0.1}
        given |= {"model": LlamaForCausalLM.from_pretrained(base), "reward_funcs": draws.reward}  # TRL reads base again
    elif kind == "kto":
        own = {"max_length": 48, "train_sampling_strategy": "sequential"}
    if kind in ("dpo", "kto") and not is_adapted:
        given["ref_model"] = build()
    if kind == "dpo" and not is_adapted:
        own |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    if is_adapted:
        task, more = ("SEQ_CLS", ["score"]) if kind == "reward" else ("CAUSAL_LM", None)
        sizes = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
        given["peft_config"] = LoraConfig(**sizes, task_type=task, modules_to_save=more)
    if plan is not None:
        given["plan"] = plan
        owner = type("Sharded", (ShardwiseTrainerMixin, owner), {})
    # Adam divides by the gradient's own size: with its usual epsilon an element whose gradient is rounding error moves.
    own |= {"max_steps": 4, "bf16": False, "adam_epsilon": 1e-4}
    args = getattr(trl, f"{name}Config")(**settings(folder, world) | own)
    trainer = owner(args=args, train_dataset=rows(kind), processing_class=tokenizer(), **given)
    before, reference = whole(trainer.model), getattr(trainer, "ref_model", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", draws)
        trainer.train()
    share = None
    if reference is not None:
        owned = sum(each.shape.numel() for each in reference.parameters())
        share = owned / sum(each.numel() for each in build().parameters())
        assert all(each.grad is None for each in reference.parameters())
    return Found(logged(trainer), before, whole(trainer.model), {} if reference is None else whole(reference), share)


def fit_on_rank(folder: str, base: str, kinds: tuple[str, ...], is_adapted: bool, plan: str) -> dict[str, Found]:
    return {kind: fit(kind, f"{folder}/{kind}", 2, base, is_adapted=is_adapted, plan=plan) for kind in kinds}


@pytest.mark.parametrize(
    ("is_adapted", "plan", "kinds"), [(False, "zero3", KINDS), (True, "zero3", KINDS), (False, "zero2", ("dpo",))]
)
def test_preference_and_reward_trainers_train_as_in_one_process(
    tmp_path: Path, is_adapted: bool, plan: str, kinds: tuple[str, ...]
) -> None:
    base = str(tmp_path / "base")
    build().save_pretrained(base)
    found = run_on_ranks(fit_on_rank, 2, str(tmp_path / "shards"), base, kinds, is_adapted, plan, timeout_s=280)[0]
    for kind in kinds:
        plain = fit(kind, str(tmp_path / "plain" / kind), 1, base, is_adapted=is_adapted)
        assert any(line[1] for line in plain.log)
        close(found[kind].log, plain.log)
        for name, value in plain.after.items():
            torch.testing.assert_close(found[kind].before[name], plain.before[name], rtol=0, atol=0)
            torch.testing.assert_close(found[kind].after[name], value, rtol=1e-4, atol=1e-5)
            is_trained = not is_adapted or "lora" in name or "modules_to_save" in name
            assert torch.equal(value, plain.before[name]) != is_trained
        if is_adapted or kind == "reward":
            assert found[kind].reference_share is None  # the adapter is switched off in place of a second model
            continue
        for name, value in plain.reference.items():
            torch.testing.assert_close(found[kind].reference[name], value, rtol=1e-4, atol=1e-5)
            if kind != "dpo":
                assert torch.equal(found[kind].reference[name], plain.before[name])
        assert found[kind].reference_share == pytest.approx(0.5, rel=0.01)
