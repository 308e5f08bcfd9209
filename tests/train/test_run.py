"""``sw.Run`` around a loop of one's own, on one rank and two, beside the loop without it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import shardwise as sw
from shardwise.cli import main
from shardwise.spec.errors import CheckpointError, ConfigError, NonFiniteError
from shardwise.testing import RankFailure, run_on_ranks
from tests.common.ranks import refusal
from tests.train.towers import Pairs, Towers
from tests.train.train_here import losses, metrics, summary

STEPS = 12


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = sw.parallelize(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 10], 0.5)  # keys that are numbers


def mean(output: Any, _batch: Any) -> torch.Tensor:
    return (output[0] - output[1]).square().mean()


def batches(loader: DataLoader, sampler: sw.DistributedSampler) -> Iterator[Any]:
    while True:
        yield from loader
        sampler.set_epoch(sampler.epoch + 1)


def make_steps(run: sw.Run | None, steps: Any, parts: dict[str, Any]) -> list[float]:
    model, optimizer, schedule, sampler = (parts[name] for name in ("model", "optimizer", "scheduler", "sampler"))
    data, found = Pairs(72, 0), []
    loader = DataLoader(data, batch_size=8 // sw.data_parallel_size(model), sampler=sampler)
    feed = batches(loader, sampler)
    for step in steps:
        batch = next(feed)
        value = sw.train_step(model, batch, mean)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(value.item())
        if run is not None:
            weight = batch["weight"]
            run.log(loss=value, tokens=len(weight), weight=sw.Mean(weight.sum(), len(weight)))
            run.log(**({"eval_loss": 0.5} if step == 3 else {}))
    return found


def plain(_folder: str) -> list[float]:
    model, optimizer, schedule = build()
    parts = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    return make_steps(None, range(STEPS), {**parts, "sampler": sw.DistributedSampler(72, model=model)})


def with_run(folder: str, stop_at: int | None = None, **options: Any) -> int:
    """Returns the exit code."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model, optimizer, schedule = build()
    sampler = sw.DistributedSampler(72, model=model)
    parts = {"model": model, "optimizer": optimizer, "scheduler": schedule, "sampler": sampler}
    given = {"checkpoint": {"every": 5}, "log": {"tensorboard": False}, "config": {"lr": 1e-2}, **options}

    def steps(run: sw.Run) -> Iterator[int]:
        for step in run.steps():
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield step

    try:
        with sw.Run(folder, steps=STEPS, **parts, **given) as run:
            make_steps(run, steps(run), parts)
    except SystemExit as left:
        return int(str(left.code))
    return 0


def test_a_loop_with_a_run_is_the_loop_and_goes_on_where_it_was_stopped_on_another_world(tmp_path: Path) -> None:
    expected = run_on_ranks(plain, 1, "")[0]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_on_ranks(with_run, 1, str(whole)) == [0]
    assert losses(whole) == expected
    assert run_on_ranks(with_run, 2, str(cut), 6) == [75, 75]
    assert summary(cut)["reason"] == "stop requested, saved step 7, start the same command again to continue"
    assert run_on_ranks(with_run, 1, str(cut)) == [0]
    assert losses(cut) == pytest.approx(expected, rel=1e-5)
    lines = metrics(cut)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    rates = [1e-2] * 5 + [5e-3] * 5 + [2.5e-3] * 2
    assert [line["lr"] for line in lines] == [line["lr"] for line in metrics(whole)] == rates
    assert [line["tokens"] for line in lines] == [8 * step for step in range(1, STEPS + 1)]
    weights = [line["weight"] for line in metrics(whole)]
    assert [line["weight"] for line in lines] == pytest.approx(weights)
    assert [line.get("eval_loss") for line in lines] == [None] * 3 + [0.5] + [None] * 8
    held = summary(cut)
    assert (held["steps"], held["exit_code"], held["eval_loss_final"]) == (STEPS, 0, 0.5)
    assert "<html" in (cut / "report.html").read_text()
    assert sorted(path.name for path in (cut / "checkpoints").iterdir()) == [
        "step-00000007",
        "step-00000010",
        "step-00000012",
    ]


def loses_its_machine(folder: str) -> tuple[list[float], list[int]]:
    """Is stopped after step 7, loses its folder, and is started again with the same line."""
    expected = plain(folder)
    given = {"checkpoint": {"every": 5, "upload_to": f"{folder}/far"}}
    codes = [with_run(f"{folder}/run", 6, **given)]
    shutil.rmtree(f"{folder}/run")
    return expected, [*codes, with_run(f"{folder}/run", **given)]


def test_a_loop_goes_on_from_where_its_checkpoints_were_copied_to(tmp_path: Path) -> None:
    ((expected, codes),) = run_on_ranks(loses_its_machine, 1, str(tmp_path))
    assert codes == [75, 0]
    assert losses(tmp_path / "run") == expected[7:]
    assert sw.newest_checkpoint(tmp_path / "far") == tmp_path / "far" / "checkpoints" / "step-00000012"


def reuses(folder: str) -> None:
    """Logs a buffer that it writes to in each step, leaves by ``break``, and lets one rank end a second run."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model, optimizer, _ = build()
    buffer = torch.zeros((), requires_grad=True)
    log = {"tensorboard": False, "every": 5}
    with sw.Run(f"{folder}/left", model=model, optimizer=optimizer, steps=50, log=log) as run:
        for step in run.steps():
            if step == 7:
                break
            buffer.data.fill_(step)
            run.log(loss=buffer * 1, other=buffer, mean=sw.Mean(buffer, 2))
    with sw.Run(f"{folder}/ended", model=model, optimizer=optimizer, steps=50, log=log) as run:
        for step in run.steps():
            run.log(loss=1.0)
            if step == 3 and sw.data_parallel_rank(model) == 1:
                run.stop("one rank has seen enough")


def test_values_are_those_of_their_step_and_a_loop_that_is_left_keeps_what_it_has_made(tmp_path: Path) -> None:
    run_on_ranks(reuses, 2, str(tmp_path))
    lines = metrics(tmp_path / "left")
    assert [(line["loss"], line["other"], line["mean"]) for line in lines] == [(i, i, i / 2) for i in range(7)]
    assert summary(tmp_path / "left")["reason"] == "left by its loop after step 7"
    assert (tmp_path / "left" / "checkpoints" / "step-00000007").is_dir()
    held = summary(tmp_path / "ended")
    assert (held["reason"], held["steps"]) == ("one rank has seen enough", 5)


def test_a_damaged_checkpoint_is_left_by_moving_it_away(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, newest = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000012"
    assert run_on_ranks(with_run, 1, str(run)) == [0]
    expected = losses(run)
    for file in newest.glob("shard-*"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    capfd.readouterr()
    assert run_on_ranks(with_run, 1, str(run)) == [65]
    told = capfd.readouterr()
    assert f"If you move {newest} away, the run continues from the checkpoint before it." in told.out + told.err
    newest.rename(tmp_path / "away")
    assert run_on_ranks(with_run, 1, str(run)) == [0]
    assert losses(run) == expected


def adds_up(folder: str) -> None:
    """An update every second step, and so none in the last of three."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model, optimizer, _ = build()
    batch = default_collate([Pairs(4, 0)[index] for index in range(4)])
    with sw.Run(folder, model=model, optimizer=optimizer, steps=3, checkpoint={"every": 2}) as run:
        for step in run.steps():
            with sw.gradient_sync(model, step % 2 == 1):
                mean(model(**batch), batch).backward()
            if step % 2 == 1:
                optimizer.step()


def test_gradients_that_a_checkpoint_leaves_out_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(adds_up, 2, str(tmp_path / "run"))
    told = "".join(capfd.readouterr())
    assert told.count("made no update, and its gradients are not saved") == 1
    assert "WARNING: step 3 made no update" in told


def drifts(folder: str) -> int:
    """Nine samples, two in a batch: in the third step rank 1 is in its second epoch."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model, optimizer, _ = build()
    sampler = sw.DistributedSampler(9, model=model)
    try:
        with sw.Run(folder, model=model, optimizer=optimizer, steps=3, sampler=sampler) as run:
            feed = batches(DataLoader(Pairs(9, 0), batch_size=2, sampler=sampler), sampler)
            for _ in run.steps():
                run.log(loss=mean(model(**next(feed)), None))
    except SystemExit as left:
        return int(str(left.code))
    return 0


def test_ranks_in_different_epochs_are_told_so_before_a_save(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on_ranks(drifts, 2, str(tmp_path / "run")) == [78, 78]
    told = capfd.readouterr()
    assert "sampler.epoch: rank 0 has 0, rank 1 has 1" in told.out + told.err
    assert "sw.DistributedSampler(..., drop_last=True)" in told.out + told.err


def diverges(folder: str) -> str:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model, optimizer, _ = build()
    try:
        with sw.Run(folder, model=model, optimizer=optimizer, steps=5, log={"tensorboard": False}) as run:
            for step in run.steps():
                run.log(loss=float("nan") if step == 2 and sw.data_parallel_rank(model) == 1 else 1.0)
    except (NonFiniteError, SystemExit) as error:
        return repr(error)
    return "it went on"


def test_a_loss_that_is_not_finite_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    assert run_on_ranks(diverges, 2, str(tmp_path / "run")) == ["SystemExit(80)", "SystemExit(80)"]
    held = summary(tmp_path / "run")
    assert held["reason"].startswith("step 3: the loss is nan on rank 1. Nothing was saved since")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


def bare(folder: str, stop_after: int) -> list[float]:
    """A loop of plain torch around a plain model; with a folder, in a run that is left after some steps."""
    torch.manual_seed(0)
    model, data, told = Towers(), Pairs(72, 0), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    run = sw.Run(folder, model=model, optimizer=optimizer, steps=9, log={"tensorboard": False}) if folder else None
    with run or contextlib.nullcontext():
        for step in run.steps() if run else range(9):
            batch = default_collate([data[index] for index in range(8 * step, 8 * step + 8)])
            loss = mean(model(**batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
            if run:
                run.log(loss=loss)
                if step + 1 == stop_after:
                    break
    return losses(Path(folder)) if run else told


def test_a_plain_model_on_one_process_needs_no_plan_and_on_two_is_refused(tmp_path: Path) -> None:
    (expected,) = run_on_ranks(bare, 1, "", 9)
    for stop_after in (4, 9):
        (found,) = run_on_ranks(bare, 1, str(tmp_path / "run"), stop_after)
    assert found == expected
    with pytest.raises(RankFailure, match=r"sw.Run got a Towers that is not parallelized"):
        run_on_ranks(bare, 2, str(tmp_path / "two"), 9)
    apart = run_on_ranks(two_models, 2, str(tmp_path / "apart"))[0]
    assert "Its 'generator' and 'critic' are, each as a model of its own; call sw.parallelize() once" in apart


def two_models(folder: str) -> str:
    parts = {name: sw.parallelize(torch.nn.Linear(8, 8)) for name in ("generator", "critic")}
    model = torch.nn.ModuleDict(parts)
    return refusal(ConfigError, sw.Run, folder, model=model, optimizer=torch.optim.SGD(model.parameters()), steps=1)


def by_epochs(folder: str) -> None:
    """A loop for each epoch, each of which is left by ``break``."""
    model, optimizer, _ = build()
    log, saving = {"tensorboard": False, "every": 3}, {"every": 3, "keep": 9}
    with sw.Run(folder, model=model, optimizer=optimizer, steps=9, log=log, checkpoint=saving) as run:
        for _ in range(3):
            for step in run.steps():
                model.scale.grad = torch.ones_like(model.scale)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=float(step))
                if step % 3 == 2:
                    break


def test_a_loop_that_is_left_and_entered_again_saves_what_was_due(tmp_path: Path) -> None:
    run_on_ranks(by_epochs, 1, str(tmp_path))
    assert losses(tmp_path) == [float(step) for step in range(9)]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000003", "step-00000006", "step-00000009"]


def adversaries(folder: str, stop_at: int | None = None) -> tuple[int, list[float]]:
    """A generator and its critic, each with an optimizer: the exit code, and the generator's losses."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.manual_seed(0)
    both = torch.nn.ModuleDict(
        {
            "generator": torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)),
            "critic": torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)),
        }
    )
    model = sw.parallelize(both, strategy="zero3")
    generator, critic = model["generator"], model["critic"]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (generator, critic)]
    schedules, found = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.3) for each in optimizers], []
    given = {"scheduler": schedules, "checkpoint": {"every": 2}, "log": {"tensorboard": False}}
    try:
        with sw.Run(folder, model=model, optimizer=optimizers, steps=6, **given) as run:
            for step in run.steps():
                if step == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                draws = torch.Generator().manual_seed(step)  # the same on every rank
                fake, real = generator(torch.randn(4, 4, generator=draws)), torch.randn(4, 8, generator=draws)
                (critic(fake.detach()).mean() - critic(real).mean()).backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
                loss = -critic(fake).mean()
                loss.backward()
                optimizers[0].step()
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.zero_grad()
                    schedule.step()
                run.log(loss=loss)
                found.append(loss.item())
    except SystemExit as left:
        return int(str(left.code)), found
    return 0, found


def test_a_run_of_two_optimizers_goes_on_where_it_was_stopped_on_another_world(tmp_path: Path) -> None:
    ((code, expected),) = run_on_ranks(adversaries, 1, str(tmp_path / "whole"))
    assert (code, len(expected)) == (0, 6)
    before = run_on_ranks(adversaries, 2, str(tmp_path / "cut"), 3)
    assert [code for code, _ in before] == [75, 75]
    ((code, rest),) = run_on_ranks(adversaries, 1, str(tmp_path / "cut"))
    assert code == 0
    assert before[0][1] + rest == expected


def other_schedules(folder: str) -> list[str]:
    """What a resume says of a run of two schedules that comes back with other ones."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model, optimizer, schedule = build()
    given = {"model": model, "optimizer": optimizer, "log": {"tensorboard": False}, "checkpoint": {"every": 1}}
    with sw.Run(folder, steps=2, scheduler=[schedule, schedule], **given) as run:
        for _ in run.steps():
            optimizer.step()
    said = []
    for scheduler in (schedule, [schedule], [None, schedule]):
        shown = io.StringIO()
        try:
            with contextlib.redirect_stderr(shown), sw.Run(folder, steps=4, scheduler=scheduler, **given):
                pass
        except ConfigError as error:
            said.append(str(error))
        except SystemExit:
            said.append(shown.getvalue())
    return said


def test_other_schedules_than_those_saved_are_refused(tmp_path: Path) -> None:
    one, fewer, nothing = run_on_ranks(other_schedules, 1, str(tmp_path / "run"))[0]
    assert "has the state of a list of 2 schedules, and sw.Run(scheduler=...) has one schedule" in one
    assert "has the state of a list of 2 schedules, and sw.Run(scheduler=...) has a list of 1 schedules" in fewer
    assert "sw.Run(scheduler=...): NoneType has no state_dict and load_state_dict" in nothing


def alone(folder: str) -> list[str]:
    """What a wrong use says, in a process that nothing has started as a rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    model, optimizer, _ = build()
    said = []

    def tried(*, name: str = "run", steps: int = 3, values: Any = types.MappingProxyType({}), **options: Any) -> None:
        given = {"model": model, "optimizer": optimizer, "log": {"tensorboard": False}, **options}
        try:
            with sw.Run(Path(folder) / name, steps=steps, **given) as run:
                for _ in run.steps():
                    run.log(**values)
        except (ConfigError, CheckpointError, TypeError) as error:
            said.append(str(error))
        else:
            said.append("")

    tried(checkpoint={"evry": 3})
    tried(train={"clip_grad_norm": 1.0})
    tried(checkpoint={"best": "eval_loss"})
    tried(sampler=object())
    tried(optimizer=torch.optim.LBFGS(model.parameters()))
    tried(optimizer=[model])
    tried(callbacks=[sw.Callback])
    tried()
    tried(sampler=sw.DistributedSampler(8, model=model), steps=4)
    tried(name="a", values={"loss": torch.zeros(2)})
    tried(name="b", values={"mfu": 1.0})
    tried(name="c", scheduler=types.SimpleNamespace(state_dict=lambda: {"a": object()}, load_state_dict=None))
    with (
        contextlib.redirect_stdout(io.StringIO()) as text,
        sw.Run(Path(folder) / "short", model=model, optimizer=optimizer, steps=9, log={"tensorboard": False}) as run,
    ):
        for step in run.steps():
            run.log(loss=1.0)
            if step == 1:
                run.stop("enough")
    said.append(text.getvalue())
    return said


class Loader:
    """A loader that knows where it is, and shuffles by a generator of its own; the ranks read streams of their own."""

    def __init__(self, rank: int) -> None:
        self.at, self.generator = 100 * rank, torch.Generator().manual_seed(rank)

    def begin_alike(self, _rank: int) -> None:
        self.at, self.generator = 0, torch.Generator().manual_seed(0)

    def next(self, step: int) -> int:
        self.at += step + int(torch.randint(7, (), generator=self.generator))
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


def read_together(folder: str, until: int) -> str:
    """What a run says whose ranks' loaders are all at one place."""
    text = io.StringIO()
    with mock.patch.object(Loader, "__init__", Loader.begin_alike), contextlib.redirect_stdout(text):
        read_apart(folder, until)
    return text.getvalue()


def read_apart(folder: str, until: int) -> list[int]:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model, optimizer, _ = build()
    loader, found = Loader(torch.distributed.get_rank()), []
    with sw.Run(f"{folder}/run", model=model, optimizer=optimizer, steps=4, sampler=loader) as run:
        for step in run.steps():
            found.append(loader.next(step))
            sw.train_step(model, default_collate([Pairs(4, 0)[0]]), mean)
            optimizer.step()
            if step + 1 == until:
                break
    return found


def test_each_rank_s_loader_goes_on_at_its_own_place(tmp_path: Path) -> None:
    loaders = [Loader(0), Loader(1)]
    expected = [[loader.next(step) for step in range(4)] for loader in loaders]
    assert run_on_ranks(read_apart, 2, str(tmp_path), 2, timeout_s=100) == [each[:2] for each in expected]
    with pytest.raises(RankFailure, match="was that of each of 2 ranks, and this run has 3"):
        run_on_ranks(read_apart, 3, str(tmp_path), 4, timeout_s=100)
    assert run_on_ranks(read_apart, 2, str(tmp_path), 4, timeout_s=100) == [each[2:] for each in expected]


def test_one_place_of_all_loaders_goes_on_on_other_ranks_with_a_warning(tmp_path: Path) -> None:
    assert "sampler:" not in run_on_ranks(read_together, 2, str(tmp_path), 2, timeout_s=100)[0]
    said = run_on_ranks(read_together, 1, str(tmp_path), 4, timeout_s=100)[0]
    assert "sampler: the place of Loader is that of the ranks before; samples are left out or read twice" in said


def test_what_is_wrong_is_said_with_what_to_do(tmp_path: Path) -> None:
    (said,) = run_on_ranks(alone, 1, str(tmp_path))
    for text, words in zip(
        said,
        (
            "checkpoint.evry: unknown key. Did you mean 'every'?",
            "'clip_grad_norm': ...}): what a step does is the loop's own",
            "'best': ...}): evaluations and code are the loop's own",
            "sw.Run(sampler=...): object has no state_dict and load_state_dict",
            "sw.Run(optimizer=...): LBFGS keeps lists of directions, which a checkpoint cannot hold.",
            "sw.Run(optimizer=...): expected a torch optimizer, or several, got",
            "<class 'shardwise.train.callback.Callback'> is not an sw.Callback",
            "",
            "the checkpoint has no state of the sampler",
            "run.log(loss=...): expected a number or a tensor of one element, got a tensor of shape [2]",
            "run.log(mfu=...): the record has this already",
            "sw.Run(scheduler=...): state_dict() cannot be kept: it.a is a object",
            "finished 2 steps: enough",
        ),
        strict=True,
    ):
        assert words in text, (words, text)
    assert (tmp_path / "short" / "checkpoints" / "step-00000002").is_dir()
    assert summary(tmp_path / "short")["steps"] == 2


CELLS = """
import torch, shardwise as sw
from torch import nn
# %%
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()
data = [(torch.full((4,), float(i)), torch.ones(1)) for i in range(32)]
# %%
config = {"name": "cells", "train": {"steps": 4, "micro_batch_size": 2}, "log": {"tensorboard": False}}
found = sw.train(config, sw.TrainSpec(model=Net, data=data), nproc=2)
print(found["steps"], found["world_size"], found["directory"])
config["train"] |= {"steps": 6, "gradient_accumulation_steps": 2}
found = sw.train(config, sw.TrainSpec(model=Net, data=data), nproc=1, resume=True)
print("resumed", found["steps"], found["world_size"])
# %%
def place(base):
    torch.manual_seed(0)
    model = sw.parallelize(nn.Linear(2, 2))
    return base + sw.data_parallel_rank(model)
sw.launch(place, 10, nproc=2)
# %%
def fails():
    raise sw.ConfigError("as it should")
try:
    sw.launch(fails, nproc=1)
except sw.ShardwiseError as error:
    print(error.exit_code, error)
"""


def test_functions_and_runs_start_from_the_cells_of_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = CELLS.split("# %%\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    for cell in notebook.cells:
        cell.pop("id", None)
    client = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    shown = ["".join(_texts(cell)) for cell in notebook.cells]
    assert "4 2 runs/cells" in shown[2]
    assert "resumed 6 1" in shown[2]
    assert "[10, 11]" in shown[3]
    assert "78 sw.launch(fails): its ranks ended with exit code 78." in shown[4]
    assert json.loads((tmp_path / "runs" / "cells" / "summary.json").read_text())["exit_code"] == 0
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "--run-dir", "runs/cells"]) == 78  # the spec is in no file
    assert "the run's spec was given to sw.train" in capsys.readouterr().err


def _texts(cell: Any) -> Iterator[str]:
    for output in cell.outputs:
        yield output.get("text", "") + output.get("data", {}).get("text/plain", "")
