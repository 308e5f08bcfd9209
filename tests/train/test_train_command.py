"""`shardwise train` as users run it: real processes, killed, stopped, resumed, resharded.

Where it is about the launcher or about processes that come and go, the command itself is started. What only trains and
resumes does so on ranks that exist already (``train_here``), with the same code but for the launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.launch import inject
from shardwise.train import folder as rundir
from tests.train.job import command, environment, wait_for_step, workers
from tests.train.train_here import losses, metrics, sets, summary, train_here, train_well


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 20 steps on 2 ranks."""
    folder = tmp_path_factory.mktemp("whole")
    train_well(folder, 2, ("--run-dir", "whole"))
    return folder / "whole"


def check_contract(run: Path) -> None:
    """A run of 20 steps that has ended well leaves what the contract names."""
    found = summary(run)
    wanted = {"config.yaml", "plan.json", "metrics.jsonl", "logs", "checkpoints", "LATEST", "summary.json"}
    assert wanted | {"environment.json", "memory.json", "predicted.json", "report.html"} <= {
        path.name for path in run.iterdir()
    }
    page = (run / "report.html").read_text()
    assert all(f"{loss:.6g}<" in page for loss in (losses(run)[0], losses(run)[-1], found["eval_loss_final"]))
    units = json.loads((run / "plan.json").read_text())["units"]
    assert [unit["name"] for unit in units[:2]] == ["root", "blocks.0"]
    assert all(sum(unit["owned"]) == unit["numel"] and len(unit["owned"]) == 2 for unit in units)
    memory = json.loads((run / "memory.json").read_text())
    assert memory["step"] >= 3
    assert found["peak_memory_bytes"] >= max(memory["bytes"]) >= 0.8 * found["peak_memory_bytes"]
    held = memory["held_bytes"]
    assert min(memory["bytes"]) >= 0.95 * (held["parameters"] + held["optimizer"])  # the rest comes and goes in a step
    assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.01)
    parts = found["steps_time_s"] + found["eval_time_s"] + found["checkpoint_time_s"]
    assert 0 < parts < found["wall_time_s"]
    assert not (run / "run.lock").exists()
    assert "order of gathers" in (run / "model.txt").read_text()
    assert (run / "LATEST").read_text().strip() == "checkpoints/step-00000020"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (5, 10, 15, 20)
    ]
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert (found["steps"], found["first_loss"], found["final_loss"]) == (20, losses(run)[0], losses(run)[-1])
    assert found["eval_loss_final"] < found["eval_loss_first"]
    assert (found["world_size"], found["strategy"], found["exit_code"]) == (2, "zero3", 0)
    assert all(line["collective_bytes"] > 0 for line in lines)


def test_the_predicted_peak_is_near_the_measured_one(whole: Path) -> None:
    found = summary(whole)
    assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.02)


def test_the_same_run_twice_the_second_time_under_torchrun_is_bitwise_the_same(whole: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *command(tmp_path, "--run-dir", "again")[1:]],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    again = metrics(tmp_path / "again")
    for line in (*again, *(before := metrics(whole))):
        del line["peak_memory_bytes"]  # what was freed when differs by a buffer or two
    assert again == before
    check_contract(tmp_path / "again")


def test_killed_after_step_12_it_resumes_from_10_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("--run-dir", "run", *sets("checkpoint.every=10"))
    with subprocess.Popen(command(tmp_path, *arguments), cwd=tmp_path, env=environment()) as process:
        wait_for_step(run, 12, process)
        for pid in workers(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert process.wait(90) == 128 + signal.SIGKILL
    assert (run / "LATEST").read_text().strip() == "checkpoints/step-00000010"
    (text,) = train_well(tmp_path, 2, ("--run-dir", "run", "--resume", *sets("checkpoint.every=10")))
    assert "resumed at step 10" in text
    assert losses(run) == losses(whole)
    assert [line["grad_norm"] for line in metrics(run)] == [line["grad_norm"] for line in metrics(whole)]


@pytest.mark.long  # each half is a test of its own in test_launcher.py and tests/launch/test_elastic.py
def test_a_second_run_is_refused_and_a_killed_launcher_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("--run-dir", "run", *sets("train.steps=100000", "checkpoint.every=null"))
    with subprocess.Popen(command(tmp_path, *arguments), cwd=tmp_path, env=environment()) as process:
        wait_for_step(tmp_path / "run", 2, process)
        assert main(["train", "run.yaml", *arguments, "--resume"]) == 84
        assert "belongs to another run: process" in capfd.readouterr().err
        assert len(workers(process.pid)) >= 2
        process.kill()
        process.wait(60)
        limit = time.monotonic() + 30
        while workers(process.pid) and time.monotonic() < limit:
            time.sleep(0.05)
        assert workers(process.pid) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_asked_to_stop_it_saves_the_step_and_says_so(whole: Path, tmp_path: Path, number: int, code: int) -> None:
    run = tmp_path / "run"
    with subprocess.Popen(
        command(tmp_path, "--run-dir", "run", *sets("checkpoint.every=null")),
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        wait_for_step(run, 3, process)
        process.send_signal(number)
        out = process.communicate(timeout=200)[0].decode()
    assert process.returncode == code, out
    step = len(losses(run))
    assert f"stop requested, saved step {step}" in out
    assert "did not save" not in out
    assert "Traceback" not in out
    assert summary(run)["exit_code"] == code
    if number == signal.SIGTERM:
        train_well(tmp_path, 2, ("--run-dir", "run", "--resume", *sets("checkpoint.every=null")))
        assert losses(run) == losses(whole)


QUIET = sets("model.dropout=0.0", "train.global_batch_size=12", "train.micro_batch_size=1")


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without dropout whose global batch 1, 2, 3 and 4 ranks can cut."""
    folder = tmp_path_factory.mktemp("divisible")
    train_well(folder, 2, ("--run-dir", "run", *QUIET))
    return folder / "run"


ON_2_X_2 = sets("parallel.dp_replicate=2", "parallel.accumulation=defer_replicate")


@pytest.mark.parametrize(
    ("nproc", "strategy", "more"),
    [
        pytest.param(1, "ddp", (), marks=pytest.mark.long),
        (3, "zero2", ()),
        pytest.param(4, "zero1", (), marks=pytest.mark.long),
        pytest.param(2, "shard_grad_op", (), marks=pytest.mark.long),
        pytest.param(4, "hsdp", ON_2_X_2, marks=pytest.mark.long),
    ],
)
def test_it_continues_on_another_world_and_under_another_strategy(
    divisible: Path, tmp_path: Path, nproc: int, strategy: str, more: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(divisible, run)
    other = (*sets(f"parallel.strategy={strategy}"), *more)
    (out,) = train_well(tmp_path, nproc, ("--run-dir", "run", "--resume", "step-00000010", *QUIET, *other))
    assert f"parallel.strategy: zero3 -> {strategy}" in out
    assert "step-00000015 is set aside" in out
    difference = max(abs(x - y) for x, y in zip(losses(divisible), losses(run), strict=True))
    assert difference < 1e-5
    if more:
        assert f"on {nproc} x cpu, {strategy} on dp_replicate=2 x dp_shard=2" in out
        # From there on to other ranks and another strategy again.
        shutil.rmtree(run / "checkpoints" / "step-00000020")
        train_well(tmp_path, 2, ("--run-dir", "run", "--resume", "step-00000015", *QUIET))
        assert max(abs(x - y) for x, y in zip(losses(divisible), losses(run), strict=True)) < 1e-5


def test_another_configuration_is_refused_with_a_table(whole: Path) -> None:
    again = ("--run-dir", "whole")
    refused = train_here(whole.parent, 1, (*again, "--resume", *sets("train.seed=5")), again)
    assert [code for code, _ in refused] == [78, 78]
    assert "train.seed  0            5" in refused[0][1]
    assert "holds a run already" in refused[1][1]


@pytest.mark.long  # the next test asks for more steps too
def test_more_steps_may_be_asked_for(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    train_well(tmp_path, 2, ("--run-dir", "run", "--resume", *sets("train.steps=22", "log.every=5")))
    assert losses(tmp_path / "run")[:20] == losses(whole)
    assert len(losses(tmp_path / "run")) == 22


def test_the_rate_and_the_clipping_may_be_changed_where_asked_for(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    asked = (
        "optimizer.lr=1e-4",
        "optimizer.weight_decay=0.2",
        "schedule={name: constant}",
        "train.clip_grad_norm=0.5",
        "train.steps=22",
    )
    settings = (word for setting in (*asked, "train.eval_every=2") for word in ("--set", setting))
    (text,) = train_well(tmp_path, 2, ("--run-dir", "run", "--resume", *settings))
    for change in (
        "optimizer.lr: 0.001 -> 0.0001",
        "weight_decay: 0.1 -> 0.2",
        "name: cosine -> constant",
        "clip_grad_norm: 1.0 -> 0.5",
    ):
        assert change in text
    assert "train.eval_every: 10 -> 2" in text
    assert losses(tmp_path / "run")[:20] == losses(whole)
    assert [line["lr"] for line in metrics(tmp_path / "run")[20:]] == [1e-4, 1e-4]


def test_a_damaged_shard_is_named_and_latest_good_goes_around_it(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shard = min((run / "checkpoints" / "step-00000020").glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-10] ^= 1
    shard.write_bytes(raw)
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    cut = sorted((other / "checkpoints" / "step-00000020").glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-100])
    (run / "LATEST").write_text("../../elsewhere\n")
    resume = ("--run-dir", "run", "--resume")
    results = train_here(tmp_path, 2, resume, (*resume, "latest-good"), ("--run-dir", "other", "--resume"))
    assert [code for code, _ in results] == [65, 0, 65]
    assert shard.name in results[0][1]
    assert "shardwise: step-00000020 cannot be used and is passed over: " in results[1][1]
    assert "resumed at step 15" in results[1][1]
    assert losses(run) == losses(whole)
    assert (run / "LATEST").read_text() == "checkpoints/step-00000020\n"
    assert cut.name in results[2][1]


def test_changed_data_stops_the_resume(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text to read. " * 500)
    arguments = ("--run-dir", "run", *sets("data.source=text.txt", "data.max_bytes=null"))
    train_well(tmp_path, 2, (*arguments, *sets("train.steps=2")))
    (tmp_path / "text.txt").write_text("more text to read. " * 500)
    ((code, out),) = train_here(tmp_path, 2, (*arguments, "--resume", *sets("train.steps=3")))
    assert code == 65
    assert "its hash has changed" in out


def test_a_loss_that_is_not_finite_stops_all_ranks(tmp_path: Path) -> None:
    settings = ("optimizer.name=sgd", "optimizer.lr=1e30", "train.clip_grad_norm=null", "checkpoint.every=1")
    ((code, out),) = train_here(tmp_path, 2, ("--run-dir", "run", *sets(*settings)))
    assert code == 80
    assert "Nothing was saved since; safe: checkpoint of step" in out
    assert summary(tmp_path / "run")["exit_code"] == 80


@pytest.mark.long  # tests/launch/test_elastic.py starts workers again
def test_a_lost_worker_is_replaced_and_the_run_goes_on_from_its_newest_checkpoint(whole: Path, tmp_path: Path) -> None:
    settings = sets("checkpoint.every=2", "checkpoint.asynchronous=true")
    faults = "after_step@rank=1@step=7:kill;after_step@rank=0@step=13@attempt=1:kill"
    armed = environment() | {inject.ARMED: "1", inject.FAULT: faults}
    words = command(tmp_path, "--run-dir", "run", "--max-restarts", "1", *settings)
    ended = subprocess.run(words, cwd=tmp_path, env=armed, capture_output=True, text=True, timeout=200, check=False)
    run = tmp_path / "run"
    assert ended.returncode == 81, ended.stdout + ended.stderr
    assert "Connection" not in ended.stdout + ended.stderr  # words of rank 0 about its peer, which come after the cause
    lost = r"rank 1 \(pid \d+\) killed by SIGKILL at step [78] .*?\nshardwise: restart 1/1 from step ([46])\n"
    restarted = re.search(lost, ended.stderr, re.DOTALL)
    assert restarted is not None, ended.stderr
    assert ended.stdout.count(f"resumed at step {restarted[1]}\n") == 1
    train_well(tmp_path, 2, ("--run-dir", "run", "--resume", "latest", *settings))
    assert losses(run) == losses(whole)


def each_rank_on_a_machine_of_its_own() -> None:
    """As torchrun on two machines, each with a disk of its own (the second rank's folder)."""
    rundir.APPEARS_S = 0.3
    os.environ |= {"GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if os.environ["RANK"] == "1":
        Path("disk").mkdir()
        shutil.copy("run.yaml", "disk")
        os.chdir("disk")


def test_a_folder_that_machines_do_not_share_is_refused_before_the_first_step(tmp_path: Path) -> None:
    shared, apart = str(tmp_path / "shared"), "apart"
    plain = (*sets("train.steps=2", "train.eval_every=null"), "--run-dir")
    (code, text), (shared_code, _) = train_here(
        tmp_path, 2, [*plain, apart], [*plain, shared], before=each_rank_on_a_machine_of_its_own
    )
    assert code == 74
    assert "the run's folder is not one folder for all machines: rank 1 does not find in" in text
    assert "Name a folder of a file system that all machines share, with --run-dir or in sw.Run." in text
    assert not (tmp_path / "apart" / "metrics.jsonl").exists()
    assert shared_code == 0
    for folder in (tmp_path / "apart", tmp_path / "shared"):
        assert not list(folder.glob(".shared-*"))


def let_the_disk_be_full() -> None:
    """For processes that are started from here on: those that write checkpoints."""
    os.environ[inject.ARMED] = "1"
    os.environ[inject.FAULT] = "mid_shard_write@rank=1@step=10:enospc"


def test_checkpoints_are_written_while_training_goes_on(tmp_path: Path) -> None:
    asynchronous = ("--run-dir", "a", *sets("checkpoint.asynchronous=true"))
    resumes = (*asynchronous, "--resume", "step-00000015")
    results = train_here(tmp_path, 2, ("--run-dir", "b"), asynchronous, resumes, before=let_the_disk_be_full)
    assert [code for code, _ in results] == [0, 0, 0], results
    _, text, resumed = (text for _, text in results)
    assert text.count("WARNING: step 10 was not saved; step 5 is kept. ") == 1
    assert re.search(r"rank 1: No space left on device \([\d.]+ \w+ needed, [\d.]+ \w+ free\): ", text)
    assert "resumed at step 15" in resumed
    run = tmp_path / "a"
    assert losses(run) == losses(tmp_path / "b")
    names = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step"))
    assert names == ["step-00000005", "step-00000015", "step-00000020"]
    assert summary(run)["failed_saves"] == []


#: One microbatch a step: strategies add several up in orders of their own.
AVERAGES = sets("train.ema_decay=0.9", "train.steps=10", "train.global_batch_size=4")


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("average")
    train_well(folder, 2, ("--run-dir", "run", *AVERAGES))
    return folder / "run"


def held_out(run: Path) -> tuple[float, float]:
    summary = json.loads((run / "summary.json").read_text())
    return summary["eval_loss_first"], summary["eval_loss_final"]


@pytest.mark.long
def test_held_out_losses_are_of_the_average_and_training_is_the_same(averaged: Path, tmp_path: Path) -> None:
    train_well(tmp_path, 2, ("--run-dir", "without", *sets("train.steps=10", "train.global_batch_size=4")))
    without = tmp_path / "without"
    assert losses(without) == losses(averaged)
    assert held_out(without)[0] == held_out(averaged)[0]
    first, final = held_out(averaged)
    assert held_out(without)[1] < final < first  # it lags behind


def test_a_run_resumes_with_its_average_and_an_optimizer_by_name(averaged: Path, tmp_path: Path) -> None:
    shutil.copytree(averaged, tmp_path / "run")
    resume = ("--resume", "step-00000005", *sets("optimizer.flat=false", "parallel.strategy=zero1"))
    (shown,) = train_well(tmp_path, 2, ("--run-dir", "run", *AVERAGES, *resume))
    assert "resumed at step 5" in shown
    assert losses(tmp_path / "run") == losses(averaged)
    assert held_out(tmp_path / "run") == held_out(averaged)


def test_predicted_and_measured_peak_agree_with_an_average(averaged: Path) -> None:
    summary = json.loads((averaged / "summary.json").read_text())
    plan = json.loads((averaged / "plan.json").read_text())
    assert plan["predicted_bytes_per_rank"]["average"] > 0
    assert summary["peak_memory_bytes"] == pytest.approx(summary["predicted_peak_memory_bytes"], rel=0.02)
