"""Scripts that TRL and Accelerate ship, on two ranks, with the class and the plan changed and nothing else."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.integrations.test_transformers_trainer import build, close
from tests.integrations.test_trl_preference import tokenizer

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL still says gradient_checkpointing
]


def make_folders(folder: Path) -> None:
    """A model with its tokenizer, and a data set for each script, as ``load_dataset`` finds them."""
    build().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    asked = [f"what is {n}+{n}? " for n in range(48)]
    rows = {
        "sft": [{"prompt": asked[n], "completion": f"{2 * n}!"} for n in range(48)],
        "dpo": [{"prompt": asked[n], "chosen": f"{2 * n}!", "rejected": "no idea" * (1 + n % 2)} for n in range(48)],
    }
    for name, lines in rows.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))


def run_trl(name: str, folder: str, out: str, world: int, plan: str | None) -> None:
    """``python -m trl.scripts.NAME``, with the trainer's class replaced where there is a plan."""
    import trl

    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    script = importlib.import_module(f"trl.scripts.{name}")
    plain = getattr(trl, f"{name.upper()}Trainer")

    class Ours(ShardwiseTrainerMixin, plain):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, plan=plan, **kwargs)

    given = {
        "model_name_or_path": f"{folder}/model", "dataset_name": f"{folder}/{name}", "output_dir": out,
        "per_device_train_batch_size": 4 // world, "gradient_accumulation_steps": 2, "max_steps": 6,
        "logging_steps": 1, "save_strategy": "steps", "save_steps": 6, "learning_rate": 1e-2, "max_grad_norm": 0.5,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "seed": 1, "bf16": False, "max_length": 48,
        "gradient_checkpointing": False, "dtype": "float32",
    }  # fmt: skip
    arguments = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    with pytest.MonkeyPatch.context() as patched:
        if plan is not None:
            patched.setattr(trl, f"{name.upper()}Trainer", Ours)
        script.main(*script.make_parser().parse_args_and_config(arguments, fail_with_unknown_args=False))


def told(out: Path) -> list[tuple[float | None, ...]]:
    """Loss and norm of each step, from the checkpoint of the last one."""
    lines = json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_trls_own_script_gives_the_numbers_of_one_process(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    make_folders(tmp_path)
    outs = {"plain": (1, None), "zero3": (2, "zero3"), "ddp": (2, "ddp")}
    for out, (world, plan) in outs.items():
        run_on_ranks(run_trl, world, name, str(tmp_path), str(tmp_path / out), world, plan, timeout_s=150)
    expected = told(tmp_path / "plain")
    assert len(expected) == 6
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    for out in ("zero3", "ddp"):
        close(told(tmp_path / out), expected)
        for key, value in AutoModelForCausalLM.from_pretrained(tmp_path / out).state_dict().items():
            torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-5)


def run_accelerate(name: str, plan: str) -> None:
    """``main()`` of a script of Accelerate's, which asserts by itself."""
    import accelerate
    from accelerate.test_utils.training import RegressionModel

    from shardwise.integrations.accelerate import ShardwiseAccelerator

    class Ours(ShardwiseAccelerator):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, plan=plan, **kwargs)
            assert self.num_processes == 2

        def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            """A plain model with the whole values, whose parameters the script compares."""
            whole = RegressionModel()
            with sw.full_parameters(model):
                whole.load_state_dict(model.state_dict())
            return whole

    real = torch.allclose

    def allclose(one: Any, other: Any, **kwargs: Any) -> bool:
        """Gradients that wait for their reduction cannot be read: the script says that they are not equal then."""
        try:
            return real(one, other, **kwargs)
        except StateError:
            return False

    sys.modules.setdefault(
        "evaluate", types.ModuleType("evaluate")
    )  # of metrics on data of the hub, which is not asked
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_USE_CPU", "true")  # else, without a GPU, it takes each rank for the only one
        patched.setattr(script, "Accelerator", Ours)
        patched.setattr(torch, "allclose", allclose)
        patched.setattr(script, "is_fp16_available", lambda: False, raising=False)  # refused: use "bf16"
        if name.endswith("test_metrics"):
            for split, dispatch in ((False, False), (True, False), (False, True)):
                config = accelerate.DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
                script.test_torch_metrics(Ours(dataloader_config=config), 99)
        else:
            script.main()


@pytest.mark.parametrize(
    ("name", "plan"),
    [("test_script", "ddp"), ("test_script", "zero3"), ("test_sync", "ddp"), ("external_deps.test_metrics", "zero3")],
)
def test_accelerates_own_scripts_pass(name: str, plan: str) -> None:
    run_on_ranks(run_accelerate, 2, name, plan, timeout_s=150)
