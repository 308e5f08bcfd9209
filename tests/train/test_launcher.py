"""What does not fit the model is refused by the command itself, before a process is started."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.launch import stop_request
from shardwise.launch.stop_request import REQUESTS, StopRequest
from shardwise.launch.world import World
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.train.config.sections import read_config
from shardwise.train.launcher import step_range_of

GOOD = "data: {source: random}\ntrain: {steps: 1}\nmodel: {preset: gpt-nano, num_layers: 3}\n"  # two heads


@pytest.fixture(autouse=True)
def _never_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(*_args: object, **_options: object) -> int:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr("shardwise.launch.elastic.launch", launch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(GOOD)


def test_a_package_that_is_missing_is_named_before_data_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(*_args: object, **_options: object) -> None:
        raise AssertionError("data would have been tokenized")

    monkeypatch.setattr("shardwise.train.launcher.resolve", resolve)
    monkeypatch.setattr("shardwise.train.log.recorder.importlib.util.find_spec", lambda _name: None)
    assert main(["train", "run.yaml", "--nproc", "1", "--set", "log.wandb=true"]) == 78
    assert "log.wandb=true, but wandb is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nproc", "settings", "message"),
    [
        (3, ["parallel.tp=3"], "num_heads=2 is not divisible"),
        (6, ["parallel.pp=6"], "cannot be divided into 6 pipeline stages"),
        (2, ["parallel.ep=2"], "no mixture of experts"),
        (2, ["parallel.ep=2", "model.num_experts=3"], "ep=2 does not divide the 3 experts"),
        (4, ["parallel.tp=3"], "axes tp=3 make groups of 3 ranks"),
        (2, ["parallel.expert_capacity=1.5"], "no mixture of experts"),
        (2, ["parallel.auto_wrap_policy={by_class: [Nothing]}"], "matches no module of GPT"),
        (2, ["parallel.activation_checkpointing={by_class: [Nothing]}"], "matches no module of GPT"),
        (2, ["parallel.ignored=[nothing]"], "'nothing' matches no module and no parameter"),
        (2, ["parallel.row_sharded=[nothing]"], "'nothing' matches no module"),
        (2, ["parallel.mp_policy={overrides: {nothing: {}}}"], "no module of GPT has such a name"),
        (2, ["parallel.tp=2", "parallel.sequence_parallel=true", "data.seq_len=7"], "not a multiple of tp=2"),
        (2, ["parallel.quantize_frozen=int8"], "no frozen weight"),
        (2, ["parallel.strategy=ddp", "parallel.reshard_after_forward=true"], "it keeps parameters whole"),
        (2, ["parallel.strategy=ddp", "parallel.quantized_gather=int8"], "nothing is gathered"),
        (
            2,
            ["parallel.pp=2", "optimizer.in_backward=true", "train.clip_grad_norm=null"],
            "a pipeline adds up gradients of several microbatches",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_model_starts_nothing(
    nproc: int, settings: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = [word for setting in settings for word in ("--set", setting)]
    for verb in ("train", "validate"):
        assert main([verb, "run.yaml", "--nproc", str(nproc), *overrides]) == 78
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_hugging_face_folder_is_rehearsed_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes).save_pretrained(tmp_path / "llama")
    (tmp_path / "run.yaml").write_text("model: {hf: llama}\ndata: {source: random}\nparallel: {tp: 3}\n")
    assert main(["train", "run.yaml", "--nproc", "3"]) == 78
    assert "4 heads of 8 cannot be divided" in capsys.readouterr().err
    assert main(["train", "run.yaml", "--nproc", "3", "--set", "data.seq_len=4096"]) == 78
    assert "4096 tokens are more than the model's 2048 positions; lower it\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ("{rank: 4, targets: [nothing]}", 78, "Target modules {'nothing'} not found in the base model"),
        ("{adapter: of_another}", 65, "of_another: Can't find 'adapter_config.json'"),
    ],
)
def test_adapters_that_do_not_fit_the_folder_start_nothing(
    setting: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="the lora extra is not installed")
    from tests.common.tokenizers import save_model

    save_model(tmp_path / "llama", vocab_size=64)
    (tmp_path / "run.yaml").write_text(f"model: {{hf: llama}}\ndata: {{source: random}}\nlora: {setting}\n")
    for verb in ("train", "validate"):
        assert main([verb, "run.yaml", "--nproc", "2"]) == code
        assert message in capsys.readouterr().err


def test_a_plan_that_any_model_fits_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from shardwise.cli import main;"
        " code = main(['validate', 'run.yaml', '--set', 'parallel.mp_policy={param_dtype: bf16}']);"
        " sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("text", "steps"), [(None, []), ("10:12", [10, 11, 12]), ("3", [3]), ("3:3", [3])])
def test_profiled_steps_are_named_by_the_first_and_the_last(text: str | None, steps: list[int]) -> None:
    assert list(step_range_of(text)) == steps


@pytest.mark.parametrize("text", ["", "a", "0:2", "3:2", "1:", "1:2:3", "-1:2"])
def test_other_words_for_steps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected FIRST:LAST"):
        step_range_of(text)


def test_the_folder_is_the_run_s_own_from_before_its_workers_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []

    def launch(*_args: object, **_options: object) -> int:
        codes.append(main(["train", "run.yaml", "--nproc", "1", "--run-dir", "run"]))  # another start, at the same time
        return 0

    monkeypatch.setattr("shardwise.launch.elastic.launch", launch)
    assert main(["train", "run.yaml", "--nproc", "1", "--run-dir", "run"]) == 0
    assert codes == [84]
    assert f"run belongs to another run: process {os.getpid()} on " in capsys.readouterr().err
    assert not Path("run/run.lock").exists()


#: What srun gives a step of one task.
ONE_TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}


def test_a_signal_of_slurm_that_comes_before_the_ranks_take_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_worker(*_args: object, **_options: object) -> int:
        os.kill(os.getpid(), signal.SIGUSR1)  # which comes once, and ends a process that does not catch it
        with StopRequest() as stop:
            return stop_request.exit_code(stop.signal_number) if stop.signal_number else 0

    for name, value in ONE_TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shardwise.train.launcher.train_worker", train_worker)
    monkeypatch.setattr(stop_request, "_early", [])
    kept = {number: signal.getsignal(number) for number in REQUESTS}
    try:
        assert main(["train", "run.yaml"]) == 75
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_one_task_of_slurm_starts_the_ranks_that_nproc_names(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("shardwise.launch.elastic.launch", lambda _entry, _args, nproc, **_: started.append(nproc) or 0)
    for name, value in ONE_TASK.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "run.yaml", "--nproc", "2"]) == 0
    assert started == [2]


def test_after_nan_the_next_command_has_a_lower_rate_and_after_a_refusal_the_cause_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr("shardwise.launch.elastic.launch", lambda *_args, **given: told.update(given) or 80)
    words = ["run.yaml", "--nproc", "2", "--set", "optimizer.lr=30", "--set=train.steps=5", "--set=optimizer.lr=20"]
    assert main(["train", *words, "--run-dir", "run"]) == 80
    assert "optimizer.lr=20 --resume" in told["advice"]
    assert "lr=20" not in told["advice_by_code"][80]
    assert told["advice"].startswith("continue with `")
    for code in (1, 78):
        assert told["advice_by_code"][code] == f"correct the cause, then {told['advice']}"
    (command,) = re.findall("`shardwise (.*)`", told["advice_by_code"][80])
    expected = ["run.yaml", "--nproc", "2", "--set=train.steps=5", "--set", "optimizer.lr=2", "--resume"]
    assert shlex.split(command) == ["train", "--run-dir=run", *expected]


@pytest.mark.parametrize(
    "words",
    [
        ["runs/mine", "--resume"],
        ["--resume", "runs/mine"],
        ["--resume", "runs/mine/checkpoints/step-00000001"],
        ["--resume", "runs/mine/best/checkpoints/step-00000001"],
        ["--resume", "--run-dir", "runs/mine"],
    ],
)
def test_a_run_s_folder_alone_brings_its_configuration_and_place(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "mine"
    for holder in (run, run / "best"):
        (holder / "checkpoints" / "step-00000001").mkdir(parents=True)
    run.joinpath("config.yaml").write_text(
        f"{GOOD}name: other\ntrain: {{steps: 3, global_batch_size: 8, gradient_accumulation_steps: 4}}\n".replace(
            "train: {steps: 1}\n", ""
        )
    )
    started: list[list[str]] = []
    monkeypatch.setattr("shardwise.train.checkpoints.checkpoints.find_checkpoint", lambda *_args: run)
    monkeypatch.setattr("shardwise.train.checkpoints.checkpoints.saved_config", lambda _path: {})
    monkeypatch.setattr("shardwise.train.checkpoints.checkpoints.check_config", lambda *_args: [])
    monkeypatch.setattr("shardwise.launch.elastic.launch", lambda _entry, words, *_, **__: started.append(words) or 0)
    assert main(["train", *words, "--nproc", "1", "--set", "train.micro_batch_size=2"]) == 0
    ((verb, place, *_),) = started
    assert (verb, Path(place.removeprefix("--run-dir=")).resolve()) == ("train", run)
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "shardwise.train.launcher.train_worker", lambda raw, *_args, **options: given.update(options, raw=raw) or 0
    )
    monkeypatch.setattr("shardwise.launch.world.read_world", lambda: World(source="launcher"))
    assert main(started[0]) == 0  # as a worker reads the words
    train = given["raw"].config.train
    assert (train.steps, train.global_batch_size, train.gradient_accumulation_steps) == (3, 8, None)
    assert given["run_dir"].resolve() == run


def test_a_run_s_folder_is_a_configuration_for_a_new_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(f"name: mine\n{GOOD}")
    started: list[list[str]] = []
    monkeypatch.setattr("shardwise.launch.elastic.launch", lambda _entry, words, *_, **__: started.append(words) or 0)
    assert main(["train", "mine", "--run-dir", "new", "--nproc", "1"]) == 0
    assert started == [["train", "--run-dir=new", "mine", "--run-dir", "new", "--nproc", "1"]]
    assert main(["validate", "mine", "--nproc", "1"]) == 0
    capsys.readouterr()
    assert main(["train", "mine", "--nproc", "1"]) == 78
    assert "mine holds a run already.\n  Continue it with --resume" in capsys.readouterr().err
    for words in (["train", "new/logs", "--resume"], ["validate", "new/logs"]):
        assert main(words) == 78
        assert "new/logs is a folder without a config.yaml, not a run's.\n" in capsys.readouterr().err


def test_sw_train_continues_a_run_that_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(f"name: other\n{GOOD}")

    def launch(_entry: str, words: list[str], *_args: object, **_options: object) -> int:
        assert words == ["train", "--run-dir=mine", "mine", "--resume", "latest"]
        (tmp_path / "mine" / "summary.json").write_text('{"steps": 1}')
        return 0

    monkeypatch.setattr("shardwise.launch.elastic.launch", launch)
    assert sw.train("mine", nproc=1, resume=True) == {"steps": 1, "directory": "mine"}


def test_calls_take_numbers_of_numpy_and_functions_that_exit_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    def launch(_entry: str, words: list[str], *_args: object, **_options: object) -> int:
        (file,) = [word for word in words if word.endswith("run.yaml")]
        assert read_config(file).config.optimizer.lr == 0.25
        return 78

    monkeypatch.setattr("shardwise.launch.elastic.launch", launch)
    with pytest.raises(ShardwiseError, match="ended with exit code 78"):
        sw.train({"train": {"steps": 1}, "optimizer": OrderedDict(lr=np.float64(0.25))}, nproc=1)
    monkeypatch.setattr("shardwise.launch.function.launch_module", lambda *_, **__: 0)
    assert sw.launch(sys.exit, 0, nproc=2) == [None, None]


def test_sw_train_and_sw_launch_are_sent_by_pickle_and_by_cloudpickle_in_a_function_that_names_them() -> None:
    def work() -> tuple[object, object]:
        return sw.train, sw.launch

    for module in (sw.train, sw.launch):
        assert pickle.loads(pickle.dumps(module)) is module
    assert cloudpickle.loads(cloudpickle.dumps(work))() == (sw.train, sw.launch)


def test_a_run_in_a_function_of_sw_launch_locks_its_folder_and_checks_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []

    def session(*_args: object, is_prepared: bool, **_options: object) -> None:
        prepared.append(is_prepared)
        raise ConfigError("enough")

    monkeypatch.setattr("shardwise.train.worker.session", session)
    monkeypatch.setattr("shardwise.train.call.read_world", lambda: World(source="launcher"))
    with pytest.raises(SystemExit):
        sw.train("run.yaml")
    monkeypatch.setattr("shardwise.launch.world.read_world", lambda: World(source="launcher"))
    assert main(["train", "run.yaml"]) == 78
    assert prepared == [False, True]


def test_the_folder_of_a_loop_with_a_run_is_resumed_by_its_program_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    (tmp_path / "mine" / "config.yaml").write_text("name: mine\ntrain:\n  steps: 3\nconfig: {}\n")
    assert main(["train", "--resume", "--run-dir", "mine", "--nproc", "2"]) == 78
    said = capfd.readouterr().err
    assert "mine is of a loop with sw.Run, which no verb starts.\n  Start its program again" in said
