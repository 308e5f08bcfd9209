"""``plan``: one screen, JSON with stable keys, a configuration that trains, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli import main
from shardwise.cli.plan import find_subject, this_gpu
from shardwise.cost.hardware import GIB
from shardwise.launch.elastic import num_workers
from shardwise.launch.process import num_gpus
from shardwise.planner.screen import count
from shardwise.spec.errors import ConfigError
from shardwise.train.predicted.budget import find_device
from tests.report.folders import write_run

FIRST = ["llama-3-8b", "--gpus", "8", "--gpu", "H100-80GB-SXM", "--seq", "8192", "--global-batch", "64"]
TINY = ["gpt-tiny", "--gpus", "2", "--gpu", "L4", "--gpus-per-node", "2", "--global-batch", "8"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PET_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_first_command_fills_one_screen_of_80_by_40(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *FIRST)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[:2] == ["llama-3-8b, 8.03B parameters", "on 8 x H100-80GB-SXM in one node"]
    assert "torchrun --nproc-per-node 8 -m shardwise train plan.yaml" in lines[-1]
    assert "\x1b" not in out


def test_adapters_are_named_and_need_less_than_training_everything(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["gpt2", *TINY[1:], "--strategy", "ddp", "--activation-checkpointing", "none", "--micro-batch", "1"]
    whole, tuned = as_json(capsys, *fixed), as_json(capsys, *fixed, "--lora", "16")
    assert (tuned["workload"]["lora_rank"], tuned["command"]) == (16, None)  # a preset, which `train` does not adapt
    assert tuned["plans"][0]["memory"]["device_bytes"] < whole["plans"][0]["memory"]["device_bytes"]
    assert "adamw, LoRA of rank 16" in run(capsys, *fixed, "--lora", "16")[1]


def test_a_loss_in_chunks_has_no_logits_and_whole_heads(capsys: pytest.CaptureFixture[str]) -> None:
    plans = as_json(capsys, *FIRST, "--chunked-loss")["plans"]
    assert all(plan["plan"].get(axis, 1) == 1 for plan in plans for axis in ("tp", "pp", "cp"))
    fixed = ["--strategy", "zero3", "--activation-checkpointing", "full", "--micro-batch", "1", "--fix", "cp=1"]
    whole = as_json(capsys, *FIRST, *fixed, "--pp", "1", "--tp", "1")["plans"][0]["memory"]
    found = as_json(capsys, *FIRST, *fixed, "--chunked-loss")["plans"][0]["memory"]
    assert found["device_bytes"] < whole["device_bytes"]


def test_a_plan_for_adapters_is_written_for_train(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(
        capsys, "qwen3-0.6b", "--gpus", "2", "--gpu", "L4", "--seq", "64", "--lora", "8", "--out", "p.yaml"
    )
    assert code == 0, err
    assert yaml.safe_load(Path("p.yaml").read_text())["lora"] == {"rank": 8}
    assert main(["plan", "p.yaml", "--gpus", "2", "--gpu", "L4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["lora_rank"] == 8


def test_json_has_what_the_screen_shows_under_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    held = as_json(capsys, *FIRST)
    assert list(held) == [
        *("model", "cluster", "workload", "plans", "recommended", "fastest", "why", "remedies", "command")
    ]
    times = [plan["step_time_s"] for plan in held["plans"] if plan["fits"] and not plan["is_tight"]]
    assert (held["recommended"], held["plans"][held["fastest"]]["step_time_s"]) == (0, min(times))
    assert held["model"]["parameters"] == 8_030_261_248
    best = held["plans"][0]
    assert list(best) == [
        "title", "plan", "micro_batch", "accumulation_steps", "recompute", "in_backward", "chunked_loss",
        "fits", "is_tight", "reason", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "memory",
        "time_by_category_s", "sent_bytes_by_axis",
    ]  # fmt: skip
    assert sum(best["memory"]["by_category"].values()) == best["memory"]["allocated_bytes"]
    assert sum(best["time_by_category_s"].values()) == pytest.approx(best["step_time_s"])
    ranks = best["plan"].get("dp_replicate", 1) * best["plan"].get("dp_shard", 1)
    assert best["micro_batch"] * best["accumulation_steps"] * ranks == 64


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("gpt-tiny", ["--gpus", "2"]),
        ("gpt-tiny", ["--gpus", "8", "--fix", "tp=2", "--fix", "pp=2"]),
        ("gpt-tiny", ["--gpus", "4", "--fix", "cp=2", "--strategy", "hsdp", "--fix", "dp_shard=1"]),
        ("gpt-tiny", ["--gpus", "2", "--fix", "in_backward=true"]),
        ("gpt-tiny", ["--gpus", "2", "--fix", "offload_policy={parameters: false}", "--strategy", "zero3"]),
        ("gpt-tiny", ["--gpus", "8", "--pp", "2", "--fix", "schedule=interleaved-1f1b"]),
        ("llama-3-8b", ["--gpus", "8", "--gpu", "H100-80GB-SXM"]),
        ("qwen3-30b-a3b", ["--gpus", "16", "--gpu", "B200-180GB-SXM", "--seq", "4096", "--fix", "ep=8"]),
    ],
)
def test_what_is_written_passes_the_checks_of_train(
    capsys: pytest.CaptureFixture[str], model: str, more: list[str]
) -> None:
    gpu = [] if "--gpu" in more else ["--gpu", "L4"]
    code, out, err = run(capsys, model, *gpu, *more, "--out", "plan.yaml")
    assert (code, err) == (0, "")
    assert "written to plan.yaml. It trains on random tokens until data.source in it names your data. Start" in out
    gpus = more[more.index("--gpus") + 1]
    code = main(["validate", "plan.yaml", "--nproc", gpus])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    written = yaml.safe_load(Path("plan.yaml").read_text())["train"]
    assert f"# global batch {written['global_batch_size']} = micro batch {written['micro_batch_size']} x" in out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "t5-small",
            "for sequence to sequence: name rows of a data set in data.source. Copy its tokenizer's files into",
        ),
        ("bert-base", "It trains on random tokens until data.source in it names your data. Copy its tokenizer's files"),
        ("vit-base", "`shardwise train` does not train this model: give the fields of `parallel` to sw.parallelize."),
    ],
)
def test_what_train_needs_besides_the_plan_is_said(capsys: pytest.CaptureFixture[str], model: str, said: str) -> None:
    code, out, _ = run(capsys, model, "--gpu", "L4", "--gpus", "2", "--out", "plan.yaml")
    written = Path("plan.yaml").read_text()
    assert code == 0
    assert said in out
    assert said in written
    is_trained = model != "vit-base"
    assert ["-m shardwise train" in text for text in (out, written)] == [is_trained, is_trained]
    assert ("-m shardwise train" in run(capsys, model, "--gpu", "L4", "--gpus", "2")[1]) == is_trained


@pytest.mark.slow
def test_train_runs_what_is_written_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *TINY, "--strategy", "zero2", "--out", "plan.yaml")[0] == 0
    short = ["train.steps=2", "train.eval_every=null", "checkpoint.final=false"]
    code = main(["train", "plan.yaml", "--nproc", "2", *(word for key in short for word in ("--set", key))])
    assert code == 0
    summary = json.loads(Path("runs/plan/summary.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["strategy"]) == (2, 2, "zero2")


def test_a_configuration_fixes_what_it_says_and_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(
        "name: mine\nmodel: {preset: gpt-tiny, num_layers: 8}\ndata: {source: stdlib, seq_len: 32}\n"
        "parallel: {strategy: zero1, tp: 2}\noptimizer: {name: sgd, lr: 0.5}\n"
        "train: {steps: 7, micro_batch_size: 2, global_batch_size: 16}\n"
    )
    held = as_json(capsys, "run.yaml", "--gpus", "4", "--gpu", "L4", "--out", "plan.yaml")
    assert held["model"]["layers"] == 8
    asked = {
        "seq_len": 32,
        "global_batch": 16,
        "precision": "fp32",
        "optimizer": "sgd-momentum",
    }  # train's momentum is 0.9
    assert held["workload"] == {**asked, "lora_rank": None}
    assert {(made["plan"]["strategy"], made["plan"]["tp"], made["micro_batch"]) for made in held["plans"]} == {
        ("zero1", 2, 2)
    }
    written = yaml.safe_load(Path("plan.yaml").read_text())
    assert written["name"] == "mine"
    assert written["data"] == {"source": "stdlib", "seq_len": 32}
    assert written["optimizer"] == {"name": "sgd", "lr": 0.5}
    assert written["train"] == {"steps": 7, "micro_batch_size": 2, "global_batch_size": 16}
    assert main(["validate", "plan.yaml", "--nproc", "4"]) == 0


def test_microbatches_that_a_configuration_fixes_are_those_of_the_global_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The global batch was that of 16,384 tokens a GPU, and no plan was legal."""
    Path("run.yaml").write_text(
        "model: {preset: gpt-tiny}\ndata: {seq_len: 32}\ntrain: {micro_batch_size: 4, gradient_accumulation_steps: 4}\n"
    )
    held = as_json(capsys, "run.yaml", "--gpus", "4", "--gpu", "L4")
    assert held["workload"]["global_batch"] == 64  # as `train` counts it
    halved = as_json(capsys, "run.yaml", "--gpus", "4", "--gpu", "L4", "--tp", "2")
    assert halved["workload"]["global_batch"] == 32


@pytest.mark.parametrize("policy", ["bf16", "{param_dtype: bf16}"])
def test_a_precision_policy_may_be_its_dtype_alone(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    Path("run.yaml").write_text(f"model: {{preset: gpt-tiny}}\nparallel: {{mp_policy: {policy}}}\n")
    held = as_json(capsys, "run.yaml", "--gpus", "2", "--gpu", "L4", "--seq", "32", "--global-batch", "4")
    assert held["workload"]["precision"] == "bf16"


@pytest.mark.parametrize(("given", "momentum"), [("sgd", 0.0), ("sgd-momentum", 0.9)])
def test_the_momentum_that_was_planned_for_is_written(
    capsys: pytest.CaptureFixture[str], given: str, momentum: float
) -> None:
    assert run(capsys, *TINY, "--optimizer", given, "--out", "plan.yaml")[0] == 0
    written = yaml.safe_load(Path("plan.yaml").read_text())["optimizer"]
    assert (written["name"], written.get("momentum", 0.9)) == ("sgd", momentum)  # train's own is 0.9
    assert find_subject("plan.yaml").optimizer == given


ONE_PLAN = [*FIRST, "--strategy", "zero3", "--micro-batch", "1", "--activation-checkpointing", "selective"]
#: Two runs that one pair of constants cannot explain.
_SAME_CONSTANTS = "41000", "40000,micro_batch=2,recompute=full,seq=4096,global_batch=16"


def test_a_measured_run_is_the_first_plan_and_moves_the_times_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    before = as_json(capsys, *ONE_PLAN)["plans"]
    held = as_json(capsys, *ONE_PLAN, "--measured", "41000", "--save-hardware", "mine.json")
    tokens = 64 * 8192
    assert held["plans"][0]["step_time_s"] == pytest.approx(tokens / 41000, rel=1e-5)
    assert held["measured"]["speeds"] == {"products": pytest.approx(0.528, abs=0.01)}
    assert held["cluster"]["gpu"] == "H100-80GB-SXM"
    out = " ".join(run(capsys, *ONE_PLAN, "--measured", "41000")[1].split())
    assert "Measured: 12.8 s a step of zero3 (1x8, recompute selective), predicted 8.45 s." in out
    assert "Plan 1 stays zero3 (1x8, recompute selective): 12.8 s a step, before 8.45 s." in out
    saved = as_json(capsys, *[word.replace("H100-80GB-SXM", "mine.json") for word in ONE_PLAN])["plans"]
    assert [made["step_time_s"] for made in saved] == [made["step_time_s"] for made in held["plans"]]
    assert saved[0]["step_time_s"] > 1.2 * before[0]["step_time_s"]


def test_a_measured_run_that_names_its_strategy_has_no_axis_that_it_does_not_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = "--measured", "18000,strategy=zero3,micro_batch=1,recompute=full"
    slow = [*FIRST[:1], "--gpus", "16", *FIRST[3:], "--network", "100"]
    assert " pp2 " in as_json(capsys, *slow, "--strategy", "zero3")["plans"][0]["title"]
    assert " a step of zero3 (1x4, recompute full), " in as_json(capsys, *slow, *ran)["measured"]["lines"][0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["llama-3-8b", "--gpus", "4", "--gpu", "L40S", "--seq", "4096", "--global-batch", "33"],
            "33 sequences cannot be divided over 4 GPUs, so each plan has another axis than data parallelism;",
        ),
        (
            ["deepseek-v3", "--gpus", "2048", "--gpu", "H200-141GB-SXM"],
            "Only data parallelism is known to work for deepseek_v3 models: tp, pp, cp and ep are not tried.",
        ),
        (["gpt2", "--gpus", "1", "--gpu", "L4", "--global-batch", "1"], "a step: 1 sequence of 1,024 tokens,"),
        (
            ["gpt2", "--gpus", "1", "--gpu", "L4", "--precision", "fp32"],
            "in fp32 matrix products take 4 times as long as in bf16: try --precision bf16",
        ),
    ],
)
def test_the_page_says_what_a_reader_may_miss(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert sentence in " ".join(run(capsys, *words)[1].split())


def test_a_number_that_rounds_to_the_next_unit_is_said_in_it() -> None:
    assert [count(number) for number in (999_885_952, 999_400_000, 8.03e9)] == ["1B", "999M", "8.03B"]


def test_a_measured_run_may_be_of_another_plan_batch_and_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    other = [*FIRST[:1], "--gpus", "16", *FIRST[3:], "--strategy", "zero3", "--fix", "cp=1", "--tp", "1", "--pp", "1"]
    found = as_json(capsys, *other, "--measured", "41000,gpus=8,micro_batch=1,recompute=selective")
    assert "12.8 s a step of zero3 (1x8, recompute selective), predicted 8.45 s" in found["measured"]["lines"][0]


def test_the_folder_of_a_run_says_its_plan_batch_and_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = "model: {preset: gpt-tiny}\ndata: {source: random, seq_len: 64}\nparallel: {strategy: zero2}\n"
    config += "train: {micro_batch_size: 2, global_batch_size: 8}\n"
    folder = write_run(tmp_path / "runs" / "mine", step_time_s=0.011)
    (folder / "config.yaml").write_text(config)
    predicted = as_json(capsys, str(folder / "config.yaml"), "--gpus", "2", "--gpu", "L4")["plans"][0]["step_time_s"]
    (folder / "summary.json").write_text(json.dumps({"step_time_s": 1.2 * predicted}))
    (folder / "environment.json").write_text(json.dumps({"devices": ["NVIDIA L4"]}))
    held = as_json(capsys, *TINY, "--measured", str(folder))["measured"]
    assert f"{1200 * predicted:.3g} ms a step of zero2 (2x2), predicted {1000 * predicted:.3g} ms." in held["lines"][0]
    assert list(held["speeds"]) == ["launch"]
    code, _, err = run(capsys, *TINY, "--measured", str(tmp_path))
    assert code != 0
    assert "holds no run" in err
    for last_start in ({"step_time_s": None, "timed_steps": 0}, {"step_time_s": predicted, "world_size": 1}):
        (folder / "summary.json").write_text(json.dumps(last_start))
        code, _, err = run(capsys, *TINY, "--measured", str(folder))
        assert code == 78
        assert "its last start timed no step" in err
    (folder / "summary.json").write_text(json.dumps({"step_time_s": predicted}))
    (folder / "environment.json").write_text(json.dumps({"devices": ["cpu"]}))
    code, _, err = run(capsys, *TINY, "--measured", str(folder))
    assert code == 78
    assert "the run was made on a CPU, which says nothing of L4" in err


def test_without_a_batch_each_gpu_gets_a_power_of_two_of_about_16_384_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, seq, samples in (("vit-base", [], 64), ("gpt2", ["--seq", "1000"], 16), ("gpt2", ["--seq", "700"], 32)):
        held = as_json(capsys, name, "--gpus", "2", "--gpu", "L4", "--strategy", "ddp", *seq)
        assert held["workload"]["global_batch"] == 2 * samples


def test_where_nothing_fits_the_page_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    held = as_json(capsys, "llama-3-70b", "--gpus", "8", "--gpu", "L4", "--fix", "offload_policy=none")
    assert not held["plans"][0]["fits"]
    assert held["command"] is None
    changes = {remedy["change"]: remedy["plan"] for remedy in held["remedies"]}
    assert all(made["fits"] for made in changes.values())
    assert any("GPUs instead of 8" in change for change in changes)
    assert "leave offload_policy open, which is fixed to none" in changes


def test_the_largest_model_grows_with_what_is_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_json(capsys, "--largest", "--gpus", "8", "--gpu", "A100-40GB-SXM")
    sizes = {row["strategy"]: row["parameters"] for row in rows if row["saving"] == "nothing recomputed"}
    assert sizes["ddp"] < sizes["zero1"] < sizes["zero2"] <= sizes["shard_grad_op"] < sizes["zero3"]
    assert 1e9 < sizes["ddp"] < 40 * GIB / 16  # 16 bytes of states for each parameter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama-3-8b", "--gpu", "L4"], "Did you mean 'llama-3-8b'?"),
        (["gpt2", "--gpu", "H100-80GB"], "H100-80GB is one of H100-80GB-SXM, H100-80GB-PCIe"),
        (["gpt2"], "torch sees no GPU on this machine, and no --gpu was given"),
        (["--gpu", "L4"], "no model was named"),
        (["gpt2", "--gpu", "L4", "--fix", "stratgy=ddp"], "Did you mean 'strategy'?"),
        (["gpt2", "--gpu", "L4", "--fix", "tp"], "--fix tp: expected field=value"),
        (["gpt2", "--gpu", "L4", "--strategy", "zero4"], "unknown strategy 'zero4'"),
        (["gpt2", "--gpu", "L4", "--tp", "5"], "is legal with tp=5"),
        (["gpt2", "--gpu", "L4", "--gpus", "0"], "--gpus 0: expected a number above 0"),
        (["gpt2", "--gpu", "A100"], "A100 is one of A100-40GB-SXM, A100-80GB-SXM"),
        (["gpt2", "--gpu", "A100-40GB-PCIe"], "Did you mean 'A100-40GB-SXM'?"),
        (["gpt2", "--gpu", "L4", "--fix", "recompute=4"], "the search tries none, selective, full"),
        (["gpt2", "--gpu", "L4", "--lora", "0"], "--lora 0: expected a rank of at least 1"),
        (["gpt2", "--gpu", "L4", "--lora", "8", "--out", "p.yaml"], "adapters into Hugging Face models"),
        (["gpt2", "--gpu", "L4", "--seq", "4096"], "--seq 4096: gpt2 has 1,024 learned positions"),
        (["gpt2", "--gpu", "L4", "--precision", "bf17"], "precision='bf17'"),
        (["gpt2", "--gpu", "L4", "--activation-checkpointing", "some"], "activation_checkpointing='some'"),
        (["none.yaml", "--gpu", "L4"], "none.yaml"),
        (["gpt2", "--gpu", "L4", "--gpus", "12"], "Set --gpus 8 or 16, or --gpus-per-node to a divisor of 12"),
        (["gpt2", "--gpu", "L4", "--global-batch", "0"], "global_batch=0: expected a whole number of at least 1"),
        (["gpt2", "--gpu", "L4", "--seq", "0"], "--seq 0: expected a whole number of at least 1"),
        (["gpt2", "--gpu", "L4", "--optimizer", "lion"], "expected adamw, adam, sgd, sgd-momentum"),
        ([*FIRST, "--chunked-loss", "--tp", "2"], "tp=2 does not go with a loss in chunks"),
        ([*ONE_PLAN, "--measured", "fast"], "'fast' is not a number of tokens/s, and no folder of a run"),
        ([*ONE_PLAN, "--measured", "410000"], "products and attention at 0.923 of the card's peak do not explain that"),
        ([*ONE_PLAN, "--measured", "4100"], "those of all GPUs"),
        ([*ONE_PLAN, "--measured", "41000,micro_bach=1"], "Did you mean 'micro_batch'?"),
        ([*ONE_PLAN, "--measured", "0"], "tokens/s above 0"),
        ([*ONE_PLAN, "--measured", "41000", "--largest"], "--measured with --largest"),
        ([*ONE_PLAN, "--save-hardware", "mine.json"], "Add for example --measured 41000"),
        ([*ONE_PLAN, *(f"--measured={each}" for each in _SAME_CONSTANTS)], "depend on the same constants"),
    ],
)
def test_mistakes_end_with_78_and_say_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (78, "")
    assert message in " ".join(err.split())
    assert not Path("mine.json").exists()


@pytest.mark.parametrize(("driver", "count"), [("nvidiactl", 2), ("nvidia0", 2), ("dxg", 2), ("kfd", 2), ("fuse", 0)])
def test_gpus_are_what_torch_sees_where_a_driver_of_any_maker_is(
    monkeypatch: pytest.MonkeyPatch, driver: str, count: int
) -> None:
    """WSL 2 has /dev/dxg, ROCm /dev/kfd: two processes were started there whatever torch saw."""
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == f"/dev/{driver}")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert num_gpus() == count
    assert num_workers() == 2
    if count:
        with pytest.raises(ConfigError, match="3 processes need 3 GPUs, this machine has 2"):
            num_workers(3)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
        assert find_device(1) is not None  # a driver without a GPU: the host's memory counts


@pytest.mark.parametrize(
    ("name", "found"),
    [("NVIDIA H200", "H200-141GB-SXM"), ("NVIDIA H100 NVL", "H100-94GB-NVL"), ("NVIDIA GH200 144G HBM3e", None)],
)
def test_this_machines_gpu_is_taken_for_no_other(monkeypatch: pytest.MonkeyPatch, name: str, found: str | None) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: True)
    for attribute, value in (("get_device_name", name), ("device_count", 8)):
        monkeypatch.setattr(f"torch.cuda.{attribute}", lambda *_, value=value: value)
    if found is None:
        with pytest.raises(ConfigError, match="not in the hardware table"):
            this_gpu()
    else:
        assert this_gpu() == (found, 8)


def test_parts_of_a_small_model_are_not_said_to_be_nothing(capsys):
    assert main(["plan", "gpt-nano", "--gpus", "8", "--gpu", "H100-80GB-SXM"]) == 0
    text = capsys.readouterr().out
    assert "parameters        <0.1" in text
    assert " 0.0 " not in text.replace("\n", " \n")


def test_a_dtype_without_units_is_said(capsys):
    assert main(["plan", "gpt2", "--gpu", "V100-16GB-SXM2", "--gpus", "2", "--precision", "bf16"]) == 0
    assert "V100-16GB-SXM2 has no units for bf16" in capsys.readouterr().out
    assert main(["plan", "gpt2", "--gpu", "V100-16GB-SXM2", "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "no units" not in text
    assert "tokens, fp16, adamw" in text
