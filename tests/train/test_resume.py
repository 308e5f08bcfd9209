"""What may differ when a run is taken up again, and how a missing checkpoint is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.launch.world import World
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.train import elastic
from shardwise.train.checkpoints.checkpoints import check_config, find_checkpoint, pointer_problem
from shardwise.train.config.sections import Config, read_config
from shardwise.train.elastic import save_launchers
from shardwise.train.folder import create, read_run_id
from shardwise.train.worker import begins_from, open_directory
from tests.train.train_here import sets, train_well


def changed(**sections: dict[str, object]) -> Config:
    base = Config()
    return base.model_copy(
        update={name: getattr(base, name).model_copy(update=values) for name, values in sections.items()}
    )


SAVED = Config().model_dump(mode="json")
_NEW_LENGTH = "(from here on the learning rate is that of a schedule of the new length)"


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, []),
        ({"log": {"every": 7}}, []),
        ({"checkpoint": {"every": 3, "keep": 9}}, []),
        ({"optimizer": {"flat": False, "in_backward": True}}, []),
        ({"train": {"chunked_cross_entropy": True}}, []),  # which tp, pp and cp refuse
        ({"train": {"steps": 5}}, [f"train.steps: 1000 -> 5 {_NEW_LENGTH}"]),
        (
            {"parallel": {"strategy": "ddp"}, "train": {"micro_batch_size": 4}},
            ["parallel.strategy: zero3 -> ddp", "train.micro_batch_size: (not set) -> 4"],
        ),
        (
            {"train": {"eval_every": 7, "eval_batches": 2}},
            ["train.eval_every: 100 -> 7", "train.eval_batches: 8 -> 2"],
        ),
        (
            {"data": {"source": "/scratch/words.txt", "eval_source": "/scratch/more.txt"}},
            [
                "data.source: (not set) -> /scratch/words.txt",
                "data.eval_source: (not set) -> /scratch/more.txt",
            ],
        ),
    ],
)
def test_what_may_differ_is_told_where_it_matters(sections: dict[str, dict[str, object]], told: list[str]) -> None:
    assert check_config(SAVED, changed(**sections)) == told


def test_what_the_same_agent_of_torchrun_starts_again_goes_on_in_its_folder_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = World(source="torchrun", restart_count=1)
    # It was lost before it had begun.
    assert open_directory("x", None, None, again, ["an agent"]) == ("runs/x", False, None)
    (tmp_path / "runs/x/config.yaml").touch()
    save_launchers(tmp_path / "runs/x", ["an agent", None])
    for count in (0, 1):  # it is 0 where a machine was lost or has come back
        world = World(source="torchrun", restart_count=count)
        assert open_directory("x", None, None, world, ["a new agent", "an agent"]) == ("runs/x", True, None)
        assert open_directory("x", Path("runs/x"), None, world, ["a new agent", "an agent"]) == ("runs/x", True, None)
        assert open_directory("x", None, None, world, ["another agent"])[0].startswith("runs/x-2")
        with pytest.raises(ConfigError, match="holds a run already"):  # a first attempt that was refused stays refused
            open_directory("x", Path("runs/x"), None, world, ["another agent"])
    assert open_directory("x", None, None, World(), [None]) == ("runs/x-2", False, None)


def test_each_run_of_a_program_has_its_folder_and_continues_in_it_if_torchrun_starts_the_program_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world, agents = World(source="torchrun"), ["an agent"]
    for is_again in (False, True):
        monkeypatch.setattr(elastic, "_made", [])  # a new process
        for run in ("runs/x", "runs/x-2"):
            assert elastic.begun_run("x", None) == (Path(run) if is_again else None)  # whose batch is kept
            assert open_directory("x", None, None, world, agents) == (run, is_again, None)
            (tmp_path / run / "config.yaml").touch()
            save_launchers(tmp_path / run, agents)
            elastic.count_run(Path(run))
    with pytest.raises(ConfigError, match="holds a run already"):
        open_directory("x", Path("runs/x"), None, world, agents)


def test_the_rate_decay_schedule_and_clipping_may_differ_where_asked_for_and_are_told() -> None:
    other = changed(
        optimizer={"lr": 1.0, "weight_decay": 0.2}, schedule={"name": "linear"}, train={"clip_grad_norm": None}
    )
    asked = {"optimizer.lr", "optimizer.weight_decay", "schedule.name", "train.clip_grad_norm"}
    assert check_config(SAVED, other, asked) == [
        "optimizer.lr: 0.0003 -> 1.0",
        "optimizer.weight_decay: 0.1 -> 0.2",
        "schedule.name: cosine -> linear",
        "train.clip_grad_norm: 1.0 -> (not set)",
    ]
    for key in asked:
        with pytest.raises(ConfigError, match="where --set asks for it") as caught:
            check_config(SAVED, other, asked - {key})
        assert f"  {key}  " in str(caught.value)
    with pytest.raises(ConfigError, match=r"optimizer.name"):
        check_config(SAVED, changed(optimizer={"name": "adam"}), {"optimizer.name"})


def test_what_was_asked_for_is_known_from_the_command_line_only(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("optimizer: {lr: 1e-3}\ntrain: {steps: 3}\n")
    draft = read_config(tmp_path / "run.yaml", ["optimizer.lr=1e-4", "schedule={name: linear}", "log.every=2"])
    assert draft.overridden_keys() == {"optimizer.lr", "schedule.name", "log.every"}


def test_everything_else_is_refused_in_a_table() -> None:
    saved = {**SAVED, "train": {**SAVED["train"], "global_batch_size": 16}}
    with pytest.raises(ConfigError) as caught:
        check_config(saved, changed(optimizer={"lr": 1.0}, train={"seed": 3, "global_batch_size": 64, "steps": 9}))
    text = str(caught.value)
    assert caught.value.exit_code == 78
    assert "optimizer.lr             0.0003       1.0" in text
    assert "train.seed" in text
    assert "train.global_batch_size" in text
    assert "train.steps  " not in text
    # What a file says of its microbatches makes another global batch on another number of ranks.
    assert "(--set train.global_batch_size=16 --set train.gradient_accumulation_steps=null), or start" in text
    for key in ("train.steps", "parallel", "train.micro_batch_size", "optimizer.flat", "optimizer.in_backward"):
        assert key in text.splitlines()[-1]


def test_a_missing_checkpoint_is_refused_with_near_names(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"--resume step-00000011: there is no such checkpoint. Near: step-0000001"
    ):
        find_checkpoint(tmp_path, "step-00000011")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        find_checkpoint(tmp_path, "latest")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        find_checkpoint(tmp_path / "none", "latest-good")


def test_after_a_restart_a_run_goes_on_from_its_own_newest_checkpoint_whatever_it_was_started_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert begins_from(run, None, is_restart=True) is None
    assert begins_from(run, "/elsewhere/step-00000005", is_restart=True) == "/elsewhere/step-00000005"
    assert begins_from(run, "latest", is_restart=False) is None
    assert "holds no checkpoint yet: the run starts from the beginning" in capsys.readouterr().err
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)  # damaged: somebody has to decide
    assert begins_from(run, "latest", is_restart=False) == "latest"
    assert begins_from(run, "/elsewhere/step-00000005", is_restart=True) == "latest"


def test_a_renamed_run_keeps_its_retention_and_what_was_set_aside_goes_when_it_was_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = sets("checkpoint.keep=2", "train.eval_every=null")
    train_well(tmp_path, 1, ("--run-dir", "a", *few))
    (tmp_path / "a").rename(tmp_path / "b")
    (text,) = train_well(tmp_path, 1, ("--run-dir", "b", "--resume", "step-00000015", *few))
    assert "step-00000020 is set aside" in text
    assert sorted(path.name for path in (tmp_path / "b" / "checkpoints").iterdir()) == [
        "step-00000015",
        "step-00000020",
    ]
    # The folder vanishes: neither the launcher nor a rank, restarted or not, begins anew; put back, it is as before.
    monkeypatch.chdir(tmp_path)
    run, aside = tmp_path / "b", tmp_path / "aside"
    (run / "checkpoints").rename(aside)
    for word in ("--resume", "--resume=latest-good"):
        assert main(["train", "run.yaml", "--run-dir", "b", word]) == 65
        found = capsys.readouterr()
        assert "b has saved checkpoints, as its LATEST says, but checkpoints/ holds none" in found.err + found.out
    for is_restart in (False, True):
        wanted = begins_from(run, "latest", is_restart=is_restart)
        with pytest.raises(CheckpointError, match="Put checkpoints/ back"):
            find_checkpoint(run, wanted)
    aside.replace(run / "checkpoints")
    assert find_checkpoint(run, "latest").name == "step-00000020"


def test_a_checkpoint_of_another_run_is_taken_only_where_its_path_is_given(tmp_path: Path) -> None:
    few = sets("checkpoint.keep=9", "train.eval_every=null")
    train_well(tmp_path, 1, ("--run-dir", "b", *few), ("--run-dir", "a", "--set", "train.seed=1", *few))
    runs = {name: tmp_path / name / "checkpoints" for name in "ab"}
    ids = {name: read_run_id(tmp_path / name) for name in "ab"}
    assert None not in ids.values()
    assert ids["a"] != ids["b"]
    shutil.rmtree(runs["a"] / "step-00000020")
    shutil.copytree(runs["b"] / "step-00000020", runs["a"] / "step-00000020")
    with pytest.raises(
        CheckpointError, match=rf"step-00000020: it is of the run '{ids['b']}', and this is '{ids['a']}'"
    ):
        find_checkpoint(tmp_path / "a", "latest")
    told: list[str] = []
    assert find_checkpoint(tmp_path / "a", "latest-good", say=told.append).name == "step-00000015"
    assert "passed over: it is of the run" in told[0]
    assert find_checkpoint(tmp_path / "a", "step-00000020").name == "step-00000020"
    (tmp_path / "a/run-id").unlink()  # which checkpoints are its own is not known
    assert find_checkpoint(tmp_path / "a", "latest").name == "step-00000020"


def test_a_folder_whose_name_cannot_be_printed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a name for a run's folder: expected at most 200 characters"):
        create(tmp_path / "a\x1b[2Jb")


def test_what_latest_names_wrongly_is_told(tmp_path: Path) -> None:
    path, pointer = tmp_path / "checkpoints" / "step-00000010", tmp_path / "LATEST"
    assert pointer_problem(tmp_path, path) == "was missing"
    for text, expected in (
        ("", "was empty"),
        ("../../x\x1b", "named no checkpoint of this run"),
        ("checkpoints/step-00000010\n", None),
    ):
        pointer.write_text(text)
        assert pointer_problem(tmp_path, path) == expected
    (tmp_path / "secret").write_text("hunter2")
    pointer.unlink()
    pointer.symlink_to("secret")
    assert pointer_problem(tmp_path, path) == "could not be read (it is a symbolic link)"
