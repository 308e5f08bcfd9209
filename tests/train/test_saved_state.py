"""What a checkpoint says of its run is checked before anything is touched, and nothing odd is taken silently."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from shardwise.checkpoint.writer import write
from shardwise.spec.errors import CheckpointError
from shardwise.train.checkpoints.saved_state import check_state
from tests.checkpoint.threads import alone, cut, even

PROGRESS = dict.fromkeys(("first_loss", "final_loss", "eval_loss_first", "eval_loss_final"), 2.5)
DATA = {
    "state": {
        "step": 3,
        "run_id": "r",
        "progress": {"step": 3, "tokens": 96, **PROGRESS},
        "sampler": {"position": 24, "seed": 0, "num_samples": 100},
        "scaler": {
            "scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": 3,
        },
        "config": {"name": "r", "optimizer": {"lr": 0.4}, "schedule": {"name": "linear", "warmup_steps": 12}},
        "data": "0" * 64,
        "strategy": "zero3",
        "mesh": {"dp_shard": 2},
    },
    "optimizer": {
        "class": "AdamW",
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": False, "foreach": None}],
        "scalars": {"w": {"step": 3.0}},
    },
}
GROUPS = [{"params": [], "lr": 0.2, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": False, "foreach": True}]


@pytest.fixture
def refused(tmp_path):
    """The refusal of a checkpoint with this data; ``None`` where it is taken."""
    numbers = iter(range(10**6))

    def check(data):
        path = tmp_path / f"{next(numbers)}" / "step-00000003"
        tensors = {"w": torch.ones(4)}
        write(path, alone(), cut(tensors, even(tensors, 1), 0), data, step=3, run_id="r")
        try:
            check_state(path, 8, GROUPS)
        except CheckpointError as error:
            return str(error)
        return None

    return check


def changed(*keys, value):
    data = copy.deepcopy(DATA)
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (changed("state", "sampler", "position", value=32), "sampler.position: 32, expected 24 = step 3 x batch 8"),
        (changed("state", "sampler", "position", value=-1), "sampler.position: Input should be greater"),
        (changed("state", "sampler", "position", value=None), "sampler: it gives num_samples, seed, expected"),
        (changed("state", "sampler", "place", value=1), "sampler: it gives num_samples, place, position, seed,"),
        (changed("state", "scaler", "scale", value=float("nan")), "scaler.scale: Input should be"),
        (changed("state", "scaler", "backoff_factor", value=2.0), "scaler.backoff_factor: Input should be less than 1"),
        (changed("state", "scaler", "more", value=1), "scaler.more: Extra inputs are not permitted"),
        (changed("state", "config", "optimizer", "lr", value="x"), "config.optimizer.lr: Input should be"),
        (changed("state", "sampler", value=None), "sampler: Input should be a valid dictionary"),
        (changed("state", "step", value=4), "step: state 4, progress 3, manifest 3; expected three times the same"),
        (changed("state", "run_id", value="s"), "run_id: state s, manifest r; expected twice the same"),
        (changed("state", "progress", "tokens", value="96"), "progress.tokens: Input should be a valid integer"),
        (changed("state", "progress", "more", value=1), "progress.more: Extra inputs are not permitted"),
        (changed("state", "data", value=7), "data: Input should be a valid string"),
        (changed("state", "progress", value=[]), "was not saved by `shardwise train`"),
        (changed("optimizer", "groups", 0, "params", value=[]), "groups.0.params: the optimizer has no such setting"),
        (changed("optimizer", "groups", 0, "maximize", value=True), "groups.0.maximize  False             True"),
        (changed("optimizer", "groups", 0, "maximize", value="x"), "groups.0.maximize is 'x', and False in"),
        (changed("optimizer", "groups", 0, "betas", value=(0.9,)), "groups.0.betas is (0.9,), and (0.9, 0.95) in"),
        (changed("optimizer", "groups", 0, "lr", value=float("nan")), "groups.0.lr is nan, and 0.2 in"),
        (changed("optimizer", "groups", 0, "lr", value=0.3), "optimizer.lr: 0.3, expected 0.1, as its configuration"),
        (changed("optimizer", "groups", 0, "\x1b[2J", value=1), r"groups.0.\x1b[2J: the optimizer has no"),
        (changed("optimizer", "scalars", "w", "step", value=-1.0), "w.step is -1.0"),
        (changed("optimizer", value=None), "optimizer"),
    ],
)  # fmt: skip
def test_what_is_odd_is_named(refused, data, expected):
    assert expected in str(refused(data))


@pytest.mark.parametrize("part", ["config", "progress", "optimizer"])
def test_keys_that_are_not_known_may_be_those_of_another_version(refused, part):
    place = ("optimizer", "groups", 0) if part == "optimizer" else ("state", part)
    assert "\n  Another version of shardwise wrote it, or it was changed" in refused(changed(*place, "new", value=1))


def test_another_setting_of_the_optimizer_is_taken_where_set_asks_for_it(refused, tmp_path):
    path = tmp_path / "step-00000003"
    data = changed("optimizer", "groups", 0, "weight_decay", value=0.2)
    write(path, alone(), cut({"w": torch.ones(4)}, even({"w": torch.ones(4)}, 1), 0), data, step=3, run_id="r")
    assert "groups.0.weight_decay  0.1               0.2" in str(refused(data))
    check_state(path, 8, GROUPS, {"optimizer.weight_decay"})


def test_what_was_saved_is_taken(refused):
    assert refused(DATA) is None
    where = {"epoch": 0, "place": 1, "row": 4, "taken": 2, "num_files": 3}
    stream = DATA["state"]["sampler"] | where
    assert refused(changed("state", "sampler", value=stream)) is None
    assert refused(changed("state", "scaler", value={})) is None


def test_any_other_value_anywhere_is_refused_or_harmless(refused):
    generator = random.Random(0)
    odd = (None, True, -1, 2**70, 1e308, "x", "\x1b[2J", [], {}, b"x", (1,), [[[]]], {"a": {"a": None}})
    for _ in range(150):
        data = copy.deepcopy(DATA)
        place, depth = data, generator.randint(1, 5)
        for _ in range(depth):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            inner = [key for key in keys if isinstance(place[key], dict | list) and place[key]]
            if not inner:
                break
            place = place[generator.choice(inner)]
        key = generator.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        place[key] = generator.choice(odd)
        assert "\x1b" not in (refused(data) or "")
