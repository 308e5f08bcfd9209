"""verl's engine ``shardwise`` on two ranks beside the plain model in one process: steps of supervised fine-tuning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal

pytest.importorskip("verl", reason="verl asks for an older transformers: `make test-verl` has an environment for it")
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
LENGTHS = (5, 9, 7, 6, 8, 4, 9, 5)


def be_on_cpu() -> None:
    """verl takes a machine without an accelerator for one with NVIDIA's; its platforms are open to others."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    class PlatformCPU(PlatformCUDA):
        device_name = "cpu"
        vendor_name = "none"
        device_module = torch.cpu

        def current_device(self) -> Any:
            return torch.device("cpu")

        def empty_cache(self) -> None:
            pass

    set_platform(PlatformCPU())


def samples(step: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens, and which of them are learned."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randint(0, 64, (length,), generator=generator) for length in LENGTHS]
    return [(tokens, (torch.arange(len(tokens)) >= 2).float()) for tokens in made]


def engine(folder: str, plan: Any, **options: Any) -> Any:
    from torch.distributed import init_process_group, is_initialized
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from shardwise.integrations.contrib.verl import ShardwiseEngineConfig

    if not is_initialized():
        init_process_group("gloo")
    model = HFModelConfig(
        path=folder, load_tokenizer=False, use_remove_padding=False, override_config={"attn_implementation": "eager"}
    )
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    settings = ShardwiseEngineConfig(plan=plan, mixed_precision=fp32, use_torch_compile=False, **options)
    optimizer = FSDPOptimizerConfig(lr=1e-2, weight_decay=0.01, clip_grad=0.5, total_training_steps=4)
    checkpoint = CheckpointConfig(save_contents=["model", "optimizer", "hf_model"])
    made = EngineRegistry.new(
        "language_model", "shardwise", model_config=model, engine_config=settings, optimizer_config=optimizer,
        checkpoint_config=checkpoint,
    )  # fmt: skip
    made.initialize()
    return made


def train(folder: str, plan: Any, saved: str | None, steps: range, out: str) -> tuple[list[tuple[float, float]], Any]:
    be_on_cpu()
    import functools

    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import sft_loss

    trained = engine(folder, plan)
    if saved is not None:
        trained.load_checkpoint(saved)
    rank, world = trained.get_data_parallel_rank(), trained.get_data_parallel_size()
    told = []
    for step in steps:
        own = samples(step)[rank::world]
        parts = {
            "input_ids": [tokens for tokens, _ in own],
            "position_ids": [torch.arange(len(tokens)) for tokens, _ in own],
            "loss_mask": [mask for _, mask in own],
        }
        nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in parts.items()}
        others = {
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "temperature": 1.0,
        }
        data = tu.get_tensordict(tensor_dict=nested, non_tensor_dict=others)
        with trained.train_mode():
            output = trained.train_batch(data, functools.partial(sft_loss, config=None))
            trained.lr_scheduler_step()
        told.append((sum(output["loss"]), output["metrics"]["grad_norm"]))
    trained.save_checkpoint(f"{out}-older", global_step=steps.stop)
    trained.save_checkpoint(out, global_step=steps.stop, max_ckpt_to_keep=1)
    weights, _ = trained.get_per_tensor_param()
    return told, {name: value.float() for name, value in weights}


def plain(folder: str, steps: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
    told = []
    for step in range(steps):
        count = sum(mask.sum() for _, mask in samples(step))
        loss = torch.zeros(())
        for tokens, mask in samples(step):
            log_probs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            loss = loss - (log_probs.gather(-1, tokens[1:, None])[:, 0] * mask[1:]).sum() / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told.append((float(loss.detach()), float(norm)))
    return told, dict(model.named_parameters())


def model_folder(path: Path) -> str:
    from tests.integrations.test_transformers_trainer import build

    build().save_pretrained(path)
    return str(path)


def test_steps_are_those_of_the_plain_model_and_go_on_under_another_plan(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = model_folder(tmp_path / "model")
    expected, weights = plain(folder, 4)
    first, second = str(tmp_path / "global_step_2"), str(tmp_path / "global_step_4")
    begun = run_on_ranks(train, 2, folder, "zero3", None, range(2), first, timeout_s=200)
    ended = run_on_ranks(train, 2, folder, {"strategy": "zero1"}, first, range(2, 4), second, timeout_s=200)
    assert not Path(f"{first}-older").exists()
    for step, (loss, norm) in enumerate(expected):
        parts = [rank[0][step % 2] for rank in (begun if step < 2 else ended)]
        assert (parts[0][0] + parts[1][0]) / 2 == pytest.approx(loss, rel=1e-5)
        assert parts[0][1] == parts[1][1] == pytest.approx(norm, rel=1e-5)
    for rank in ended:
        assert rank[1].keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(rank[1][name], value.detach(), rtol=2**-8, atol=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_4" / "huggingface")
    for name, value in exported.named_parameters():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


def refuse(folder: str) -> None:
    be_on_cpu()
    from shardwise.integrations.contrib.verl import ShardwiseEngineConfig
    from shardwise.spec.errors import PlanError, StateError

    assert "tp=2: verl's engine" in refusal(PlanError, ShardwiseEngineConfig, plan={"tp": 2})
    assert "engine.fsdp_size=2" in refusal(PlanError, ShardwiseEngineConfig, fsdp_size=2)
    assert "engine.strategy='fsdp'" in refusal(PlanError, ShardwiseEngineConfig, strategy="fsdp")
    here = engine(folder, "zero3")
    here.to("cpu")
    assert "cannot move shards" in refusal(StateError, here.to, "cuda")


def test_what_the_engine_cannot_do_is_refused(tmp_path: Path) -> None:
    run_on_ranks(refuse, 2, model_folder(tmp_path / "model"), timeout_s=200)


def compose() -> None:
    """What the page tells verl's command line becomes the engine's configuration."""
    be_on_cpu()
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    overrides = re.findall(r"\+?engine\S*=\S+", (PAGE.read_text().split("## verl")[1]).split("```")[1])
    assert len(overrides) == 4
    with initialize_config_dir(str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        found = omega_conf_to_dataclass(compose("sft_trainer_engine", overrides).engine)
    assert found.parallel_plan.strategy == "zero3"
    assert EngineRegistry.get_engine_cls("language_model", found.strategy).__name__ == "ShardwiseEngine"


def test_the_pages_command_line_finds_the_engine() -> None:
    run_on_ranks(compose, 1, timeout_s=200)
