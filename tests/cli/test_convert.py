"""``convert``: configurations of Accelerate, DeepSpeed and torchtitan, with the keys that these projects document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli import main
from shardwise.cli.convert import Row, convert_file, tables
from shardwise.spec.errors import ConfigError
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import Config, read_config

FSDP1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_backward_prefetch: NO_PREFETCH
  fsdp_min_num_params: 40000
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 8
use_cpu: false
"""
FSDP2 = """
distributed_type: FSDP
mixed_precision: 'no'
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: false
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_cp_size: 2
  parallelism_config_tp_size: 1
dynamo_config:
  dynamo_backend: INDUCTOR
"""
PLUGIN = """
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
mixed_precision: fp16
"""
DEEPSPEED = """
{"bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 0},
 "zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": 5e8, "sub_group_size": 1e9,
   "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "none"},
   "zero_hpz_partition_size": 2, "zero_quantized_weights": true, "zero_quantized_gradients": false},
 "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.9, 0.99], "eps": 1e-6}},
 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 10,
   "total_num_steps": 200}},
 "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "train_batch_size": 32,
 "steps_per_print": 50, "wall_clock_breakdown": false, "some_new_key": 3}
"""
TORCHTITAN = """
[job]
description = "a run"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
beta2 = 0.99
[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.5
min_lr_factor = 0.1
[training]
local_batch_size = 8
seq_len = 1024
max_norm = 1.0
steps = 100
compile = true
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_microbatch_size = 2
[checkpoint]
enable = true
interval = 50
async_mode = "async"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[validation]
enable = false
freq = 5
"""
REPLICAS = """
[training]
batch_size = 4
mixed_precision_param = "float32"
seq_len = 64
max_norm = 0
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 1
[activation_checkpoint]
mode = "none"
"""

#: Name of a file, what it holds, a world that it is for, and what it becomes, without the stand-ins.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp1.yaml": (
        FSDP1,
        8,
        {
            "parallel": {
                "strategy": "hsdp",
                "dp_replicate": 2,
                "offload_policy": "cpu",
                "auto_wrap_policy": {"by_size": 40000},
                "activation_checkpointing": "full",
                "backward_prefetch": 0,
                "mp_policy": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
            }
        },
    ),
    "fsdp2.yaml": (
        FSDP2,
        8,
        {"parallel": {"strategy": "hybrid_shard_grad_op", "dp_replicate": 2, "dp_shard": 2, "cp": 2}},
    ),
    "plugin.yaml": (
        PLUGIN,
        2,
        {
            "parallel": {"strategy": "zero2", "offload_policy": "cpu", "mp_policy": {"param_dtype": "fp16"}},
            "train": {"gradient_accumulation_steps": 4, "clip_grad_norm": 0.5},
        },
    ),
    "ds.json": (
        DEEPSPEED,
        4,
        {
            "parallel": {
                "strategy": "zero3",
                "offload_policy": "cpu",
                "reshard_after_forward": 2,
                "quantized_gather": "int8",
                "mp_policy": {"param_dtype": "bf16"},
            },
            "optimizer": {"name": "adamw", "lr": 2e-5, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0},
            "schedule": {"name": "linear", "warmup_steps": 10, "min_lr_ratio": 0.0},
            "train": {
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 4,
                "clip_grad_norm": None,
                "steps": 200,
            },
            "log": {"every": 50},
        },
    ),
    "titan.toml": (
        TORCHTITAN,
        8,
        {
            "parallel": {
                "strategy": "zero3",
                "tp": 2,
                "pp": 2,
                "pipeline": {"schedule": "1f1b"},
                "sequence_parallel": True,
                "mp_policy": {"param_dtype": "bf16"},
                "activation_checkpointing": "selective",
            },
            "optimizer": {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.99]},
            "schedule": {
                "name": "warmup-stable-decay",
                "warmup_steps": 20,
                "decay_steps": 50,
                "min_lr_ratio": 0.1,
            },
            "train": {
                "steps": 100,
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 4,
                "clip_grad_norm": 1,
                "eval_every": None,
            },
            "checkpoint": {"every": 50, "asynchronous": True, "final": True},
        },
    ),
    "replicas.toml": (
        REPLICAS,
        2,
        {
            "parallel": {"strategy": "ddp", "dp_replicate": 2, "dp_shard": 1, "mp_policy": {"param_dtype": "fp32"}},
            "optimizer": {"lr": 8e-4},
            "schedule": {"name": "linear", "warmup_steps": 200, "min_lr_ratio": 0.0},
            "train": {"steps": 10000, "micro_batch_size": 4, "clip_grad_norm": None, "eval_every": None},
            "checkpoint": {"final": False},
        },
    ),
}


def leaves(values: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += leaves(value, f"{above}{key}.") if isinstance(value, dict) else [above + key]
    return found


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / request.param).write_text(CASES[request.param][0])
    return request.param


def test_what_is_printed_is_a_configuration_with_these_values_that_train_takes(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, world, expected = CASES[case]
    assert main(["convert", case]) == 0
    text = capsys.readouterr().out
    Path("run.yaml").write_text(text)
    found = yaml.load(text, yaml.CSafeLoader)
    assert found.pop("model")["preset"] == "gpt-tiny"
    assert found.pop("data")["source"] == "random"
    assert found == expected
    resolve(read_config("run.yaml"), world, 4 if world == 8 else None)
    assert main(["convert", case, "--out", "again.yaml"]) == 0
    assert Path("again.yaml").read_text() == text
    assert main(["validate", "again.yaml", "--nproc", str(world)]) == 0


def test_each_key_has_a_comment(case: str) -> None:
    """With what it was set to; keys of the plan name it on their own line."""
    from tomllib import loads

    text, _, _ = CASES[case]
    values = loads(text) if case.endswith(".toml") else yaml.load(text, yaml.CSafeLoader)
    lines = convert_file(Path(case)).splitlines()
    missing = [key for key in leaves(values) if not any(f"{key}: " in line.partition("#")[2] for line in lines)]
    assert missing == []


def test_verbs_that_read_configurations_name_the_verb_that_converts_it(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verbs = (["train", case], ["validate", case], ["plan", case, "--gpu", "L4"], ["parity", case], ["dry-run", case])
    for arguments in verbs:
        code = main([*arguments, *(["--world-size", "2"] if arguments[0] == "dry-run" else [])])
        error = capsys.readouterr().err
        assert (code, f"shardwise convert {case}" in error) == (78, True), (arguments, error)
    assert not Path("runs").exists()


def test_what_has_no_counterpart_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
                "train_batch_size": "auto",
                "optimizer": {"type": "OneBitAdam", "params": {"lr": "auto"}},
                "fp16": {"enabled": "auto"},
                "zero_unheard_of": True,
            }
        )
    )
    text = convert_file(tmp_path / "ds.json", model="gpt-demo", data="stdlib")
    found = yaml.load(text, yaml.CSafeLoader)
    assert found["model"] == {"preset": "gpt-demo"}
    assert found["data"] == {"source": "stdlib"}
    assert found["parallel"] == {"strategy": "zero3"}
    missing, auto = text.partition("# No counterpart:")[2].split("# Filled in by the Trainer")
    assert '"nvme"\n#     -> nvme is not used: cpu is the nearest; set parallel.offload_policy by hand' in missing
    assert "zero_unheard_of: true\n#     -> `shardwise convert` does not know this key" in missing
    assert 'optimizer.type: "OneBitAdam"' in missing
    assert 'train_batch_size: "auto"\n#     -> set train.global_batch_size' in auto
    assert 'fp16.enabled: "auto"\n#     -> set parallel.mp_policy.param_dtype' in auto


def test_a_deepspeed_file_that_accelerate_names_is_converted_with_it(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero1.json}\n"
    )
    assert "there is no such file" in convert_file(tmp_path / "accelerate.yaml")
    (tmp_path / "zero1.json").write_text('{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 3}')
    found = yaml.load(convert_file(tmp_path / "accelerate.yaml"), yaml.CSafeLoader)
    assert found["parallel"] == {"strategy": "zero1"}
    assert found["train"] == {"micro_batch_size": 3, "clip_grad_norm": None}


@pytest.mark.parametrize(
    ("kind", "params", "made"),
    [
        ("WarmupLR", {}, (1e-3, 1000, True)),
        ("WarmupLR", {"warmup_num_steps": 0}, (1e-3, 0, False)),
        ("WarmupDecayLR", {"warmup_num_steps": 5, "warmup_max_lr": 0.2, "warmup_type": "log"}, (0.2, 5, True)),
        ("WarmupCosineLR", {"warmup_type": "linear"}, (0.1, 1000, False)),
    ],
)
def test_deepspeed_s_schedule_has_its_own_defaults_and_the_form_of_its_warm_up_is_told(
    tmp_path: Path, kind: str, params: dict[str, Any], made: tuple[float, int, bool]
) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    given = {"train_batch_size": 8, "optimizer": optimizer, "scheduler": {"type": kind, "params": params}}
    (tmp_path / "ds.json").write_text(json.dumps(given))
    text = convert_file(tmp_path / "ds.json")
    found = yaml.load(text, yaml.CSafeLoader)
    assert (found["optimizer"]["lr"], found["schedule"]["warmup_steps"], "by the logarithm" in text) == made


def test_options_that_do_not_combine_here_are_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("[training]\ncompile = true\n[parallelism]\ncontext_parallel_degree = 2\n")
    text = convert_file(tmp_path / "t.toml")
    assert "compile" not in yaml.load(text, yaml.CSafeLoader)["parallel"]
    assert "training.compile: true\n#     -> left out: compile=True with cp=2" in text
    (tmp_path / "t.toml").write_text("[training]\ncompile = true\n[activation_checkpoint]\nmode = 'selective'\n")
    plan = yaml.load(convert_file(tmp_path / "t.toml"), yaml.CSafeLoader)["parallel"]
    assert plan["compile"] is True
    assert "activation_checkpointing" not in plan


def test_a_linear_warm_up_of_deepspeed_is_as_here_and_another_has_no_counterpart(tmp_path: Path) -> None:
    for kind, title in {"linear": "# Nothing to set:", "log": "# No counterpart:"}.items():
        scheduler = {"type": "WarmupLR", "params": {"warmup_type": kind}}
        (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "scheduler": scheduler}))
        below = convert_file(tmp_path / "ds.json").partition(title)[2].partition("\n\n")[0]
        assert f'warmup_type: "{kind}"' in below


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.yaml", "train: {steps: 3}\n", r"is not a configuration of .*DeepSpeed, torchtitan.*\n.*\n.*validate"),
        ("bad.toml", "[training\n", r"bad.toml: not valid TOML"),
        (
            "tp.toml",
            "[training]\n[parallelism]\ntensor_parallel_degree = 0\n",
            r"asks for a plan that is refused here: tp=0",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        convert_file(tmp_path / name)


def rows() -> list[Row]:
    return [row for _, table in tables().values() for row in table]


def test_every_target_of_the_tables_is_a_key_of_a_configuration() -> None:
    sections = {name: held.annotation for name, held in Config.model_fields.items() if name != "name"}
    for target in {row.to for row in rows() if row.sets}:
        section, key, *_ = target.split(".")
        assert key in sections[section].model_fields, target  # type: ignore[union-attr]
    for row in rows():
        assert row.sets or row.text, row
        assert "](" not in row.text, row  # a comment of a YAML file cannot follow a link


def test_every_key_of_accelerate_is_known() -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    table = tables()["Accelerate"][1]
    options = [option.dest for option in launch_command_parser()._actions]
    keys = [f"fsdp_config.{name}" for name in options if name.startswith("fsdp_")]
    keys += [f"parallelism_config.{name}" for name in options if name.startswith("parallelism_config_")]
    keys += [f"megatron_lm_config.{name}" for name in options if name.startswith("megatron_lm_")]
    keys += [name for name in ClusterConfig.__dataclass_fields__ if not name.endswith("_config")]
    assert len(keys) > 40
    assert [key for key in keys if not any(row.matches(key) for row in table)] == []


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "made"),
    [
        ({"type": "AdamW", "params": {"lr": 0.1}}, 0.2, {"lr": 0.2}),
        ({"type": "AdamW", "params": {}}, 0.2, {"lr": 0.2, "weight_decay": 0}),
        ({"type": "SGD", "params": {}}, None, {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0}),
        ({"type": "Muon", "params": {}}, None, {"lr": 0.02, "adamw_lr": 3e-4, "weight_decay": 0}),
        ({"type": "Muon", "params": {"muon_lr": 0.03, "lr": 1e-5}}, None, {"lr": 0.03, "adamw_lr": 1e-5}),
        ({"type": "Muon", "params": {"adam_lr": 2e-4, "lr": 0.03}}, None, {"lr": 0.03, "adamw_lr": 2e-4}),
    ],
)
def test_numbers_of_a_deepspeed_optimizer_are_its_own_in_any_order_of_the_keys(
    tmp_path: Path, optimizer: dict[str, Any], scheduler: float | None, made: dict[str, float]
) -> None:
    given: dict[str, Any] = {"train_batch_size": 8}
    if scheduler is not None:
        given["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": scheduler}}
    (tmp_path / "ds.json").write_text(json.dumps({**given, "optimizer": optimizer}))
    found = yaml.load(convert_file(tmp_path / "ds.json"), yaml.CSafeLoader)
    assert {key: found["optimizer"].get(key) for key in made} == made


def test_what_is_off_in_deepspeed_is_off_and_two_machines_meet(tmp_path: Path) -> None:
    off = {"train_batch_size": 8, "torch_autocast": {"enabled": False, "dtype": "bfloat16"}}
    (tmp_path / "ds.json").write_text(json.dumps(off))
    assert "mp_policy" not in yaml.load(convert_file(tmp_path / "ds.json"), yaml.CSafeLoader)["parallel"]
    on = {"train_batch_size": 8, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    (tmp_path / "ds.json").write_text(json.dumps(on))
    found = yaml.load(convert_file(tmp_path / "ds.json"), yaml.CSafeLoader)["parallel"]
    assert found["mp_policy"] == {"param_dtype": "bf16"}
    plugin = "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 4\ndeepspeed_config: {zero_stage: 2}\n"
    (tmp_path / "plugin.yaml").write_text(plugin)
    text = convert_file(tmp_path / "plugin.yaml")
    assert yaml.load(text, yaml.CSafeLoader)["train"] == {"clip_grad_norm": None}
    assert "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 2 " in text
