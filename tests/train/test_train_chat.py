"""`shardwise train` on conversations: the same numbers on one rank and several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.cli import main
from shardwise.train.config.resolve import data_of, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.model.build import TokenBatch, objective
from tests.train.chats import all_losses, cache_here, save_chats
from tests.train.train_here import losses, sets, train_here

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("datasets", reason="the hf extra is not installed")
pytestmark = pytest.mark.preload("transformers.models.llama.modeling_llama", "datasets")

CONFIG = """
model: {hf: llama}
data: {source: chat.jsonl, seq_len: 160, held_out: 0.4}
train: {steps: 6, micro_batch_size: 1, global_batch_size: 4, eval_every: 6, eval_batches: 1}
checkpoint: {every: 3}
optimizer: {lr: 3e-3}
schedule: {name: constant}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_chats(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("parallel.pp=2", "train.gradient_accumulation_steps=4"),
        ("parallel.tp=2",),
        ("train.chunked_cross_entropy=true",),
        ("parallel.cp=2", "data.packing=false"),  # each microbatch had the same weight, however many tokens it learns
    ],
)
def test_a_step_s_loss_is_the_mean_over_its_learned_tokens_on_any_ranks(
    folder: Path, settings: tuple[str, ...]
) -> None:
    packing = sets(*(each for each in settings if each.startswith("data.")))
    one = train_here(folder, 1, ("--run-dir", "one", *packing), config=CONFIG, before=cache_here)
    two = train_here(folder, 2, ("--run-dir", "two", *sets(*settings)), config=CONFIG, before=cache_here)
    assert [code for code, _ in one + two] == [0, 0], two
    plain, spread = all_losses(folder, "one", "two")
    assert spread == pytest.approx(plain, rel=2e-5)
    assert plain[-2] < 0.9 * plain[0]
    assert "conversations in" in one[0][1]


def test_a_run_goes_on_at_the_sample_on_another_number_of_ranks(folder: Path) -> None:
    whole = train_here(folder, 1, ("--run-dir", "whole"), config=CONFIG, before=cache_here)
    half = ("--run-dir", "half", *sets("train.steps=3"))
    begun = train_here(folder, 2, half, config=CONFIG, before=cache_here)
    again = train_here(folder, 1, ("--run-dir", "half", "--resume"), config=CONFIG, before=cache_here)
    assert [code for code, _ in whole + begun + again] == [0, 0, 0], again
    assert losses(folder / "half") == pytest.approx(losses(folder / "whole"), rel=2e-5)  # a shorter schedule


def test_documents_in_a_row_do_not_see_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "run.yaml").write_text(CONFIG)
    model = AutoModelForCausalLM.from_pretrained("llama")
    sums = []
    for packs in ("true", "false"):
        part = data_of(resolve(read_config("run.yaml", [f"data.packing={packs}"]), 1)).train
        every = range(part.num_samples)
        rows = part.rows(every)
        held = [None if each is None else torch.from_numpy(each) for each in rows]
        batch = TokenBatch(*held[:3], num_targets=1.0)
        sums.append(objective(is_from_hf=True, cp=1).loss(model, batch).item())
        assert part.num_samples == 24 if packs == "false" else part.num_samples < 15
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_only_conversations_have_a_default_of_packing_so_that_cp_may_change_at_a_resume_on_texts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "words.txt").write_text("some words " * 2000)
    for source, defaults in (("words.txt", [None, None]), ("chat.jsonl", [True, False])):
        configs = [read_config("run.yaml", [f"data.source={source}", f"parallel.cp={cp}"]) for cp in (1, 2)]
        assert [resolve(config, 2).config.data.packing for config in configs] == defaults


def test_a_mixture_that_balances_its_experts_adds_the_loss_of_its_routers() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 3}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, router_aux_loss_coef=0.5, output_router_logits=True))
    inputs, targets = torch.randint(30, (2, 2, 8))
    own = model(input_ids=inputs, labels=targets, shift_labels=targets)
    assert own.aux_loss > 1
    usual = objective(is_from_hf=True, cp=1)
    assert usual.loss(model, TokenBatch(inputs, targets)).item() == own.loss.item()
    of_all = usual.loss(model, TokenBatch(inputs, targets, None, 32.0))  # half of the learned tokens
    halved = (own.loss - 0.5 * own.aux_loss) / 2 + 0.5 * own.aux_loss
    assert of_all.item() == pytest.approx(halved.item(), rel=1e-6)
    model.config.output_router_logits = False
    plain = usual.loss(model, TokenBatch(inputs, targets))
    assert plain.item() == pytest.approx((own.loss - 0.5 * own.aux_loss).item(), rel=1e-6)


def test_a_built_in_model_has_a_sample_for_each_conversation(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = CONFIG.replace("{hf: llama}", "{preset: gpt-nano, vocab_size: 300, seq_len: 160}").replace(
        "held_out", "tokenizer: llama, held_out"
    )
    one = train_here(folder, 1, ("--run-dir", "one"), config=preset, before=cache_here)
    two = train_here(folder, 2, ("--run-dir", "two"), config=preset, before=cache_here)
    assert [code for code, _ in one + two] == [0, 0], two
    plain, spread = all_losses(folder, "one", "two")
    assert spread == pytest.approx(plain, rel=2e-5)
    monkeypatch.chdir(folder)
    (folder / "run.yaml").write_text(preset)
    assert main(["validate", "run.yaml", *sets("data.packing=true")]) == 78
    assert "the built-in models see all of a sample" in capsys.readouterr().err
