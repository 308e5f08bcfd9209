"""Configuration: strict, all mistakes at once, each at its line; batch sizes derived; the resolved file reads back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.spec.plan import plan_fields
from shardwise.spec.schedule import PipelinePolicy
from shardwise.train.checkpoints.checkpoints import differences
from shardwise.train.config.hf import read_language_model
from shardwise.train.config.resolve import RunConfig, resolve, stored_dtype
from shardwise.train.config.sections import Config, read_config, schema

GOOD = "train: {steps: 10, micro_batch_size: 2, global_batch_size: 8}\ndata: {source: random}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def resolved(folder: Path, text: str = GOOD, *overrides: str, world_size: int = 2) -> RunConfig:
    return resolve(read_config(write(folder, text), overrides), world_size)


def mistakes(folder: Path, text: str, *overrides: str, world_size: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(folder, text, *overrides, world_size=world_size)
    return str(caught.value)


def test_a_short_file_resolves_and_is_named_after_itself(tmp_path: Path) -> None:
    config = resolved(tmp_path).config
    assert config.name == "run"
    assert config.model.preset == "gpt-tiny"
    assert config.data.seq_len == 64
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.train.gradient_accumulation_steps == 2


def test_all_mistakes_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    text = """model:
  preset: gpt-tny
  hiden: 64
optimizer:
  lr: abc
  learning: 1
train:
  steps: -1
  micro_batch_size: 2
  global_batch_size: 7
parallel:
  strategy: zero33
  ep: 0
checkpont: {}
lr: 1
"""
    message = mistakes(tmp_path, text, "log.every=x")
    file = tmp_path / "run.yaml"
    for line in (
        f"{file}:2: model.preset: unknown model preset 'gpt-tny'; Did you mean 'gpt-tiny'?",
        f"{file}:3: model.hiden: unknown key. Did you mean 'hidden'?",
        f"{file}:5: optimizer.lr: expected a valid number, got 'abc'",
        f"{file}:6: optimizer.learning: unknown key.",
        f"{file}:8: train.steps: expected greater than or equal to 1, got '-1'",
        f"{file}:12: parallel.strategy: unknown strategy 'zero33'",
        f"{file}:13: parallel.ep: ep=0: expected a positive integer",
        f"{file}:14: unknown section 'checkpont'. Did you mean 'checkpoint'?",
        f"{file}:15: unknown section 'lr'. Did you mean optimizer.lr?",
        "--set log.every: expected a valid integer, got 'x'",
    ):
        assert line in message
    assert message.startswith("10 mistakes in ")
    assert "Nothing was started." in message


def test_losses_are_logged_less_often_on_gpus_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(tmp_path).config.log.every == 1
    monkeypatch.setattr("shardwise.train.config.resolve.num_gpus", lambda: 8)
    assert resolved(tmp_path).config.log.every == 10
    assert resolved(tmp_path, GOOD, "log.every=1").config.log.every == 1


def test_words_and_odd_numbers_are_taken_by_declared_type(tmp_path: Path) -> None:
    assert resolved(tmp_path, GOOD + "name: 010\n").config.name == "010"
    assert resolved(tmp_path, GOOD + "name: 1e5\n").config.name == "1e5"
    assert resolved(tmp_path, GOOD + "optimizer: {lr: 1e-5}\n").config.optimizer.lr == 1e-5
    assert "expected a valid boolean, got 'no'" in mistakes(tmp_path, GOOD + "checkpoint: {final: no}\n")
    assert "expected a valid integer, got '010'" in mistakes(tmp_path, GOOD + "log: {every: 010}\n")
    assert "expected a valid number, got '1:30'" in mistakes(tmp_path, GOOD + "optimizer: {lr: 1:30}\n")
    assert "expected a valid integer, got 'true'" in mistakes(tmp_path, GOOD + "log: {every: true}\n")
    assert "expected a valid integer, got '8'" in mistakes(tmp_path, GOOD + "log: {every: '8'}\n")


@pytest.mark.parametrize("value", [".nan", ".inf", "-1", "0", "1e999"])
def test_a_rate_is_a_positive_finite_number(tmp_path: Path, value: str) -> None:
    assert "optimizer.lr: expected" in mistakes(tmp_path, GOOD, f"optimizer.lr={value}")


def test_set_values_are_yaml_and_reach_every_depth(tmp_path: Path) -> None:
    config = resolved(
        tmp_path,
        GOOD,
        "optimizer.betas=[0.8, 0.99]",
        "parallel.auto_wrap_policy={by_size: 1000}",
        "train.clip_grad_norm=null",
        "train.steps=12",
        "model.num_layers=3",
        "name=other",
    ).config
    assert config.optimizer.betas == (0.8, 0.99)
    assert config.parallel.auto_wrap_policy == {"by_size": 1000}
    assert config.train.clip_grad_norm is None
    assert (config.train.steps, config.model.overrides, config.name) == (12, {"num_layers": 3}, "other")
    nested = resolved(tmp_path, GOOD, "parallel.auto_wrap_policy.by_name=['blocks.*']").config
    assert nested.parallel.auto_wrap_policy == {"by_name": ["blocks.*"]}
    assert "expected section.field=value" in mistakes(tmp_path, GOOD, "steps")


@pytest.mark.parametrize(("value", "shown"), [("[1, 2]", "[1, 2]"), ("{a: 1}", "{'a': 1}")])
def test_a_list_or_mapping_in_place_of_a_text_is_refused(tmp_path: Path, value: str, shown: str) -> None:
    found = mistakes(tmp_path, GOOD, f"data.source={value}", f"train.steps={value}")
    assert f"data.source: expected a valid string, got {shown}" in found
    assert f"train.steps: expected a valid integer, got {shown}" in found


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        ("micro_batch_size: 2, global_batch_size: 12", 2, (2, 3, 12)),
        ("micro_batch_size: 2, gradient_accumulation_steps: 3", 2, (2, 3, 12)),
        ("global_batch_size: 12, gradient_accumulation_steps: 3", 2, (2, 3, 12)),
        ("micro_batch_size: 2, global_batch_size: 12, gradient_accumulation_steps: 3", 2, (2, 3, 12)),
        ("global_batch_size: 12", 3, (4, 1, 12)),
        ("micro_batch_size: 2", 4, (2, 1, 8)),
        ("steps: 5", 1, (8, 1, 8)),
    ],
)
def test_of_three_batch_sizes_two_make_the_third(
    tmp_path: Path, given: str, world_size: int, expected: tuple[int, int, int]
) -> None:
    result = resolved(tmp_path, f"train: {{{given}}}\ndata: {{source: random}}\n", world_size=world_size)
    train = result.config.train
    assert (train.micro_batch_size, train.gradient_accumulation_steps, train.global_batch_size) == expected
    assert f"global batch {expected[2]} = micro batch {expected[0]} x accumulation {expected[1]}" in str(result.batch)


def test_batch_sizes_that_contradict_show_the_arithmetic(tmp_path: Path) -> None:
    text = "train: {micro_batch_size: 2, global_batch_size: 7}\ndata: {source: random}\n"
    assert "not a multiple of micro_batch_size=2 * 2 ranks = 4; use 4 or 8" in mistakes(tmp_path, text)
    text = (
        "train: {micro_batch_size: 2, global_batch_size: 8, gradient_accumulation_steps: 3}\ndata: {source: random}\n"
    )
    assert "2 * gradient_accumulation_steps=3 * 2 ranks = 12, but global_batch_size=8" in mistakes(tmp_path, text)


def test_degrees_that_do_not_make_the_world_show_the_arithmetic(tmp_path: Path) -> None:
    message = mistakes(tmp_path, GOOD, "parallel.dp_shard=3")
    assert "axis dp_shard=3 makes 3 ranks, but the world has 2; Set dp_shard=2, or launch 3 ranks" in message


def test_sequence_parallelism_is_read_with_the_ranks_that_it_divides_over(tmp_path: Path) -> None:
    values = ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.tp_plan={lm_head: colwise_gather_output}")
    found = resolved(tmp_path, GOOD, *values, world_size=4).plan
    assert (found.tp, found.sequence_parallel) == (2, True)
    assert found.tp_plan == {"lm_head": "colwise_gather_output"}
    alone = mistakes(tmp_path, GOOD, "parallel.sequence_parallel=true")
    assert "parallel.sequence_parallel: sequence_parallel=True with tp=1" in alone


def test_a_pipeline_is_read_beside_its_degree(tmp_path: Path) -> None:
    assert "parallel.pipeline: pipeline='zb-h1' with pp=1" in mistakes(tmp_path, GOOD, "parallel.pipeline=zb-h1")
    values = ("parallel.pp=2", "parallel.pipeline={schedule: gpipe, num_microbatches: 2}")
    policy = resolved(tmp_path, GOOD, *values, world_size=4).plan.pipeline_policy
    assert policy == PipelinePolicy("gpipe", 2)
    wrong = ("parallel.pp=2", "parallel.pipeline={schedule: interleaved-1f1b, num_microbatches: 3}")
    assert "pipeline: schedule='interleaved-1f1b' takes" in mistakes(tmp_path, GOOD, *wrong, world_size=4)


def test_options_that_would_be_ignored_are_errors(tmp_path: Path) -> None:
    assert "adamw has no momentum" in mistakes(tmp_path, GOOD, "optimizer.momentum=0.9")
    assert "sgd has no betas" in mistakes(tmp_path, GOOD, "optimizer.name=sgd", "optimizer.betas=[0.9, 0.9]")
    assert "has no decay_steps" in mistakes(tmp_path, GOOD, "schedule.decay_steps=3")
    assert "has no end rate" in mistakes(tmp_path, GOOD, "schedule.name=constant", "schedule.min_lr_ratio=0.2")
    assert "offload: unknown key" in mistakes(tmp_path, GOOD, "parallel.offload=cpu")
    assert "exclude each other" in mistakes(tmp_path, GOOD, "model.preset=gpt-tiny", "model.hf=x")


def test_a_mistake_is_not_laid_on_another_key_of_its_section() -> None:
    base = {"schedule": {"min_lr_ratio": 0.1}}
    with pytest.raises(ConfigError, match=r"  the demo: schedule\.min_lr_ratio: .* take it out, or set it to null"):
        resolve(read_config(None, ["schedule.name=constant"], base=base, title="the demo"), 1)


def test_a_folder_takes_the_place_of_the_file_s_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256}))
    found = resolved(tmp_path, GOOD + "model: {preset: gpt-tiny}\n", f"model.hf={tmp_path}").config.model
    assert (found.preset, found.hf) == (None, str(tmp_path))
    assert resolved(tmp_path, GOOD + "model: {hf: x}\n", "model.preset=gpt-tiny").config.model.hf is None


def test_names_of_code_are_not_run_and_nothing_is_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_FOR_TEST", "hush-hush")
    assert "unknown key" in mistakes(tmp_path, GOOD + "model: {_target_: os.system}\n")
    assert "expected 'adamw', 'adam', 'sgd', 'muon' or 'adamw8bit'" in mistakes(
        tmp_path, GOOD, "optimizer.name=os.system"
    )
    config = resolved(tmp_path, GOOD.replace("random", "stdlib") + "schedule: {warmup_steps: 1}\n").config
    assert "hush" not in config.to_yaml()
    message = mistakes(tmp_path, GOOD, "model.preset=${env:SECRET_FOR_TEST}")
    assert "hush" not in message


def test_files_build_on_files_and_circles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    write(tmp_path, GOOD + "optimizer: {lr: 0.5, weight_decay: 0.2}\n", "base.yaml")
    write(tmp_path / "sub", "extends: ../base.yaml\noptimizer:\n  lr: 0.25\n", "run.yaml")
    config = resolve(read_config(tmp_path / "sub" / "run.yaml"), 2).config
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.train.steps) == (0.25, 0.2, 10)
    monkeypatch.chdir(tmp_path / "sub")
    with pytest.raises(ConfigError, match=r"extends names '../base.yaml', which lies outside of .*/sub"):
        read_config(tmp_path / "sub" / "run.yaml")
    write(tmp_path, "hunter2", "secret.yaml")
    with pytest.raises(ConfigError, match=r"expected sections \(a mapping\), got a text"):
        read_config(write(tmp_path, "extends: secret.yaml", "d.yaml"))
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"extends goes in a circle: a.yaml -> b.yaml -> a.yaml"):
        read_config(tmp_path / "a.yaml")
    write(tmp_path, "extends: none.yaml\n", "c.yaml")
    with pytest.raises(ConfigError, match=r"c.yaml:1: extends names 'none.yaml', which is not a file"):
        read_config(tmp_path / "c.yaml")


def test_json_is_read_too_and_toml_is_refused_with_what_it_becomes(tmp_path: Path) -> None:
    train = {"steps": 3, "micro_batch_size": 1}
    path = write(tmp_path, json.dumps({"data": {"source": "random"}, "train": train}, indent=2), "run.json")
    assert resolve(read_config(path), 2).batch.total == 2
    path = write(tmp_path, '[data]\nsource = "random"\n', "run.toml")
    with pytest.raises(ConfigError, match=r"run.toml is TOML; a configuration is YAML or JSON.\n  Write it as YAML"):
        read_config(path)
    assert resolve(read_config(write(tmp_path, "data:\n  source: random\n", "run.yaml")), 2).config.data


def test_the_resolved_file_reads_back_to_the_same_run(tmp_path: Path) -> None:
    first = resolved(tmp_path, GOOD + "model: {num_layers: 2}\n", "optimizer.name=sgd", "parallel.strategy=FSDP").config
    again = resolve(read_config(write(tmp_path, first.to_yaml(), "again.yaml")), 2).config
    assert again == first
    assert differences(first.model_dump(), again.model_dump()) == []


def test_differences_are_dotted_keys() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": 4}}) == [("a.c", 2, 3), ("a.d", None, 4)]


def test_the_schema_knows_every_key(tmp_path: Path) -> None:
    text = schema()
    assert set(text["properties"]) == {*Config.model_fields, "extends"}
    assert "hidden" in text["$defs"]["ModelSection"]["properties"]
    parallel = text["$defs"]["ParallelSection"]["properties"]
    assert list(parallel) == list(plan_fields())
    assert all(len(held["description"]) > 20 for held in parallel.values())


def test_sequences_and_vocabularies_must_fit_the_model(tmp_path: Path) -> None:
    assert "more than the model's 64 positions" in mistakes(tmp_path, GOOD, "data.seq_len=65")
    small = GOOD.replace("random", "stdlib")
    assert "vocabulary of 256, the model's has 100; set model.vocab_size=256" in mistakes(
        tmp_path, small, "model.vocab_size=100"
    )


def test_a_hugging_face_folder_is_checked_without_loading_it(tmp_path: Path) -> None:
    assert "no readable" in mistakes(tmp_path, GOOD, f"model.hf={tmp_path}/none")
    text = mistakes(tmp_path, GOOD, "model.hf=none")
    assert f"no readable none/config.json in the current folder, {Path.cwd()}" in text
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "auto_map": {"AutoModel": "evil.Model"}}')
    assert "code of its own, which is never run" in mistakes(tmp_path, GOOD, f"model.hf={tmp_path}")
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "n_positions": 32}')
    result = resolved(tmp_path, GOOD, f"model.hf={tmp_path}")
    assert (result.vocab_size, result.config.data.seq_len, result.model) == (300, 32, None)


@pytest.mark.parametrize(("positions", "expected"), [("131072", 2048), ("2048", 2048), ("100", 100), ("null", 2048)])
def test_samples_of_models_for_long_texts_are_2048_tokens_unless_told(
    tmp_path: Path, positions: str, expected: int
) -> None:
    (tmp_path / "config.json").write_text(f'{{"vocab_size": 300, "max_position_embeddings": {positions}}}')
    found = resolved(tmp_path, GOOD, f"model.hf={tmp_path}")
    assert found.config.data.seq_len == expected
    assert found.positions == (None if positions == "null" else int(positions))


def test_reading_a_configuration_loads_no_torch() -> None:
    code = "import sys, shardwise.train.config.resolve, shardwise.train.data.samples; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (
            {"is_encoder_decoder": True, "num_mel_bins": 80, "architectures": ["WhisperForConditionalGeneration"]},
            "another task",
        ),
        ({"model_type": "bert", "architectures": ["BertForQuestionAnswering"]}, "is made for another task"),
        ({"is_encoder_decoder": True, "architectures": ["BartForQuestionAnswering"]}, "is made for another task"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "examples/finetune_vit.py"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "label2id": {"LABEL_0": 0}},
            "one class of several.*spec",
        ),
        ({"architectures": ["BertForSequenceClassification"], "problem_type": "regression"}, "problem_type regression"),
        (
            {"architectures": ["HubertForSequenceClassification"], "feat_extract_norm": "group"},
            "reads pictures or sounds",
        ),
        ({"model_type": "vit", "vocab_size": None}, "names no vocab_size: not a language model; .*a loop of your own"),
    ],
)
def test_a_folder_of_another_kind_of_model_is_refused_with_what_to_do(tmp_path, held, reason) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256, **held}))
    if "feat_extract_norm" in held:
        (tmp_path / "preprocessor_config.json").write_text("{}")
    assert re.search(reason, mistakes(tmp_path, GOOD, f"model.hf={tmp_path}"))


@pytest.mark.parametrize(
    ("held", "task"),
    [
        ({"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}, "sequence to sequence"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "masked"),
        ({"model_type": "roberta"}, "masked"),
        ({"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}, "masked"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "classification"),
    ],
)
def test_what_a_folder_s_model_is_trained_for_follows_from_its_configuration(tmp_path, held, task) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256, **held}))
    assert read_language_model(tmp_path).task.name == task


@pytest.mark.parametrize(
    "held",
    [
        {"model_type": "bert", "is_decoder": True, "architectures": ["BertLMHeadModel"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaModel"]},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "xglm"},
    ],
)
def test_a_folder_of_a_causal_language_model_is_taken(tmp_path, held) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256, **held}))
    assert resolved(tmp_path, GOOD, f"model.hf={tmp_path}").vocab_size == 256


@pytest.mark.parametrize(
    ("named", "given", "expected"),
    [
        ('"dtype": "bfloat16"', [], ("bf16", "bf16", "fp32")),
        ('"torch_dtype": "float16"', [], ("fp16", "fp16", "fp32")),
        ('"dtype": "float32"', [], (None, None, None)),
        ('"dtype": null', [], (None, None, None)),
        ('"dtype": "bfloat16"', ["{param_dtype: fp32}"], ("bf16", "fp32", "fp32")),
        ('"dtype": "bfloat16"', ["{master_dtype: bf16}"], (None, "bf16", "bf16")),
    ],
)
def test_weights_stored_in_16_bit_get_fp32_masters_unless_told_otherwise(tmp_path, named, given, expected) -> None:
    (tmp_path / "config.json").write_text(f'{{"vocab_size": 256, "model_type": "llama", {named}}}')
    overrides = [f"model.hf={tmp_path}", *(f"parallel.mp_policy={policy}" for policy in given)]
    base = {"data": {"source": "random"}, "train": {"steps": 1}}
    draft = read_config(None, overrides, base=base, title="test")
    found = resolve(draft, 1)
    policy = found.plan.precision
    assert (found.raised_from, policy.param_dtype, policy.master_dtype) == expected
    held = found.config.parallel.mp_policy
    assert (held or {}).get("master_dtype") == expected[2]
    assert resolve(draft, 1, raises_masters=False).raised_from is None


def test_the_dtype_of_a_folder_is_read_from_its_files_where_its_configuration_names_none(tmp_path) -> None:
    header = b'{"a": {"dtype": "I64"}, "b": {"dtype": "F16"}}'
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    assert stored_dtype(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert stored_dtype(tmp_path) == "fp16"
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "one.safetensors"}}')
    assert stored_dtype(tmp_path) == "fp16"
    (tmp_path / "one.safetensors").write_bytes(b"x")
    assert stored_dtype(tmp_path) is None


def test_weights_that_are_not_read_are_refused_by_name_before_anything_starts(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 257, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_language_model(tmp_path)  # without weights they are drawn
    (tmp_path / "training_args.bin").touch()
    read_language_model(tmp_path)
    for name in ("model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=name) as raised:
            read_language_model(tmp_path)
        assert raised.value.exit_code == 65
