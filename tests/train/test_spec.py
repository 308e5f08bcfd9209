"""A user's own model, data, loss, optimizer, schedule, metric and callback in the trainer, beside a plain loop."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
from collections import UserDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.cli import main
from shardwise.spec.errors import ConfigError
from shardwise.testing import run_on_ranks
from shardwise.train.checkpoints import random_state
from shardwise.train.config.resolve import data_of, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.sampler import Sampler
from shardwise.train.data.source import is_indexed
from shardwise.train.data.token_files import DataError
from shardwise.train.data.user_data import on_device, open_user_data
from shardwise.train.model.build import objective_of
from shardwise.train.parity import compare_with_one_process
from shardwise.train.spec import load_spec
from tests.common.tokenizers import save_model
from tests.train import towers
from tests.train.train_here import losses, metrics, sets, summary

SPEC = str(Path(towers.__file__))
CONFIG = """
train: {steps: 12, micro_batch_size: 4, global_batch_size: 16, eval_every: 6, eval_batches: 2, seed: 3}
optimizer: {lr: 1e-2, weight_decay: 0.01}
checkpoint: {every: 6, keep: 10}
log: {tensorboard: false}
"""
CUT = '{"*.blocks.*.up": colwise, "*.blocks.*.down": rowwise}'


def plain_losses(steps: int = 12) -> list[float]:
    """The same training by torch alone, with the samples in the order that is documented."""
    random_state.seed_all(3)
    model = towers.Towers()
    decays = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decays, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = towers.optimizer(groups, 1e-2)
    peaks = [group["lr"] for group in optimizer.param_groups]
    data, order, found = towers.Pairs(256, 0), Sampler(256, 3, 4, 4, 0, 1), []
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1.0 if step < 6 else 0.5)
        total, count = torch.zeros(()), torch.zeros(())
        for indices in order.next_step():
            batch = torch.utils.data.default_collate([data[index] for index in indices])
            mean = towers.loss(model(**batch), batch)
            total, count = total + mean.total, count + mean.count
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / count).item())
    return found


def train(folder: str, runs: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    os.chdir(folder)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    results = []
    for arguments in runs:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = main(["train", "run.yaml", "--spec", *arguments])
        results.append((code, text.getvalue()))
    return results


def train_on(world: int, folder: Path, *runs: Sequence[str], config: str = CONFIG) -> list[tuple[int, str]]:
    (folder / "run.yaml").write_text(config)
    return run_on_ranks(train, world, str(folder), runs, timeout_s=200)[0]


def test_every_plan_trains_as_a_plain_loop_and_resumes_on_another_world(tmp_path: Path) -> None:
    expected = plain_losses()
    runs = [
        (SPEC, "--run-dir", "ddp", "--set", "parallel.strategy=ddp"),
        (SPEC, "--run-dir", "zero3"),
        (SPEC, "--run-dir", "tp", "--set", "parallel.tp=2", "--set", f"parallel.tp_plan={CUT}"),
        (f"{HERE}:blocks", "--run-dir", "blocks"),
        (f"{HERE}:blocks", "--run-dir", "pp", "--set", "parallel.pp=2"),
    ]
    results = train_on(2, tmp_path, *runs)
    assert [code for code, _ in results] == [0] * 5, results
    assert losses(tmp_path / "pp") == pytest.approx(losses(tmp_path / "blocks"), rel=2e-6)
    for name in ("ddp", "zero3", "tp"):
        assert losses(tmp_path / name) == pytest.approx(expected, rel=2e-6), name
    told = [line for line in results[1][1].splitlines() if line.startswith("told: ")]
    at = ["told: ['eval_accuracy', 'eval_loss'] at"]
    assert told == [
        *("told: start at 0", f"{at[0]} 0", f"{at[0]} 6", "told: saved 6"),
        *(f"{at[0]} 12", f"told: step 12 has loss {losses(tmp_path / 'zero3')[-1]:.5f}", "told: saved 12", "told: end"),
    ]
    lines = metrics(tmp_path / "zero3")
    assert [line["step"] for line in lines if "eval_accuracy" in line] == [6, 12]
    assert lines[11]["lr"] == 0.005
    # The checkpoint of step 6 of two ranks goes on on one, with the same numbers.
    for checkpoint in (tmp_path / "zero3" / "checkpoints").glob("step-00000012"):
        checkpoint.rename(tmp_path / "later")
    arguments = (SPEC, "--run-dir", "zero3", "--resume", "step-00000006")
    ((code, text),) = train_on(1, tmp_path, arguments)
    assert code == 0, text
    assert "resumed at step 6" in text
    assert losses(tmp_path / "zero3") == pytest.approx(expected, rel=2e-6)
    held = summary(tmp_path / "zero3")
    assert held["peak_memory_bytes"] == pytest.approx(held["predicted_peak_memory_bytes"], rel=0.02)


def test_held_out_loss_and_metric_are_those_of_all_samples_at_once(tmp_path: Path) -> None:
    ((code, text),) = train_on(
        2, tmp_path, (SPEC, "--run-dir", "run", "--set", "train.steps=1", "--set", "train.eval_every=1")
    )
    assert code == 0, text
    random_state.seed_all(3)
    model, data = towers.Towers(), towers.Pairs(64, 1)
    total, count, right = 0.0, 0.0, 0.0
    with torch.no_grad():
        for first in range(0, 32, 4):  # every second of 64 samples, four at a time
            batch = torch.utils.data.default_collate([data[2 * index] for index in range(first, first + 4)])
            output = model(**batch)
            mean = towers.loss(output, batch)
            total, count = total + mean.total.item(), count + float(mean.count)
            right += float(towers.accuracy(output, batch).total)
    assert f"step 0  held-out loss {total / count:.4f}, accuracy {right / 32:.4f} (32 samples)" in text


class Blocks(torch.nn.Module):
    """The loss, an ``sw.Mean``, is on the last of two stages alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(towers.LEFT, towers.WIDTH)
        self.blocks = torch.nn.ModuleList(towers.Block() for _ in range(4))
        self.head = torch.nn.Linear(towers.WIDTH, towers.RIGHT)

    def forward(self, left: torch.Tensor, right: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = self.embed(left)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def distance(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Mean:
    each = (output - batch["right"]).square().mean(1)
    return sw.Mean((each * batch["weight"]).sum(), batch["weight"].sum())


def plain_sgd(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr)


blocks = sw.TrainSpec(model=Blocks, data=towers.Pairs(256, 0), loss=distance, optimizer=plain_sgd)


def next_token(output: Any, batch: Any) -> sw.Mean:
    logits = getattr(output, "logits", output)
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    return sw.Mean(found, batch.targets.numel())


def right(output: Any, batch: Any) -> sw.Mean:
    return sw.Mean((output.argmax(-1) == batch.targets).sum(), batch.targets.numel())


class Bigram(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


own_loss = sw.TrainSpec(loss=next_token)
own_metric = sw.TrainSpec(metrics={"right": right})
own_model = sw.TrainSpec(model=Bigram)
text_config = """
model: {preset: gpt-nano, vocab_size: 256}
data: {source: stdlib, max_bytes: 100000, seq_len: 16}
train: {steps: 3, micro_batch_size: 2, global_batch_size: 8, eval_every: 3, eval_batches: 1}
log: {tensorboard: false}
"""


def test_one_part_is_replaced_and_the_others_are_the_trainer_s(tmp_path: Path) -> None:
    names = ("own_loss", "own_metric", "none")
    runs = [(f"{HERE}:{name}", "--run-dir", name) for name in names]
    results = train_on(2, tmp_path, *runs, config=text_config)
    assert [code for code, _ in results] == [0] * 3, results
    usual = losses(tmp_path / "none")
    assert losses(tmp_path / "own_loss") == pytest.approx(usual, rel=1e-6)
    assert losses(tmp_path / "own_metric") == pytest.approx(usual, rel=1e-6)
    (found,) = [line["eval_right"] for line in metrics(tmp_path / "own_metric") if "eval_right" in line]
    assert found * 8 * 16 == pytest.approx(round(found * 8 * 16))  # of all tokens of eight samples, on two ranks
    of_model = text_config.replace("model: {preset: gpt-nano, vocab_size: 256}\n", "")
    ((code, text),) = train_on(2, tmp_path, (f"{HERE}:own_model", "--run-dir", "model"), config=of_model)
    assert code == 0, text
    assert 5 < losses(tmp_path / "model")[0] < 7


none = sw.TrainSpec()


class Numbers:
    """An iterable that ends after 40 items."""

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        for _ in range(40):
            x = torch.randn(3, generator=generator)
            yield x, x.sum()


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).squeeze(-1) - y).square().mean()


class EndsAtFive(sw.Callback):
    def on_step(self, run: Any, record: Any) -> None:
        if record.step == 5:
            run.must_end = "good enough"


class Full(Line):
    """Finds no memory for its third step, as a GPU's allocator says it."""

    num_steps = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.num_steps += self.training and not x.is_meta
        if self.num_steps == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB.\nSee documentation")
        return super().forward(x, y)


iterable = sw.TrainSpec(model=Line, data=Numbers())
full = sw.TrainSpec(model=Full, data=Numbers())
short = sw.TrainSpec(model=Line, data=Numbers(), callbacks=[EndsAtFive()])


def late_squares(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> sw.Mean:
    weight = 3.0 * (batch[1] >= 8)
    return sw.Mean((weight * output[:, 0].square()).sum(), weight.sum())


class Late:
    """Numbered items, the first eight of which do not count in the loss."""

    def __iter__(self) -> Any:
        return ((x, torch.tensor(index)) for index, (x, _) in enumerate(Numbers()))


late = sw.TrainSpec(
    model=lambda: torch.nn.Linear(3, 1),
    data=Late(),
    forward=lambda model, batch: model(batch[0]),
    loss=late_squares,
    optimizer=plain_sgd,
)
IMPORTS = "import shardwise as sw\nfrom tests.train.test_spec import Line, Numbers\n"
HERE = str(Path(__file__))


def test_parity_on_fewer_samples_than_its_steps_take_says_how_many() -> None:
    spec = sw.TrainSpec(model=Line, data=[(torch.ones(3), torch.ones(()))] * 16)
    resolved = resolve(read_config(None, ["train.micro_batch_size=8"], base={}), 1, spec=spec)
    cpu = torch.device("cpu")
    with pytest.raises(DataError, match="parity: 3 steps of 8 samples need 24, and the data has 16"):
        compare_with_one_process(resolved, data_of(resolved), cpu, strategies=["zero3"], num_steps=3)


def test_parity_calls_the_model_as_the_spec_does() -> None:
    spec = sw.TrainSpec(
        model=lambda: torch.nn.Linear(3, 1),
        data=[(torch.full((3,), float(i)), torch.ones(1)) for i in range(24)],
        forward=lambda model, batch: model(batch[0]),  # Linear takes no second argument
        loss=lambda output, batch: (output - batch[1]).square().mean(),
    )
    resolved = resolve(read_config(None, ["train.micro_batch_size=8"], base={}), 1, spec=spec)
    cpu = torch.device("cpu")
    found = compare_with_one_process(resolved, data_of(resolved), cpu, strategies=["zero3"], num_steps=3, locate=True)
    assert found.rows[0].is_bitwise
    assert found.rows[0].location is not None


def test_an_iterable_is_read_in_its_order_and_resumed_at_the_item(tmp_path: Path) -> None:
    config = "train: {steps: 8, micro_batch_size: 4}\noptimizer: {lr: 0.1}\nschedule: {name: constant}\n"
    name = f"{HERE}:iterable"
    first = (name, "--run-dir", "cut", *sets("train.steps=5"))
    results = train_on(2, tmp_path, (name, "--run-dir", "whole"), first, config=config)
    again = (name, "--run-dir", "cut", "--resume", *sets("train.gradient_accumulation_steps=2"))
    ((code, text),) = train_on(1, tmp_path, again, config=config)
    assert [each for each, _ in results] == [0, 0], results
    assert code == 0, text
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)  # 64 items, more than 40
    random_state.seed_all(0)
    model, items = Line(), list(Numbers())[:8]
    batch = torch.utils.data.default_collate(items)
    assert losses(tmp_path / "whole")[0] == pytest.approx(model(*batch).item(), rel=1e-6)


def test_a_first_step_in_which_nothing_counts_leaves_later_means_right(tmp_path: Path) -> None:
    config = "train: {steps: 2, micro_batch_size: 4}\noptimizer: {weight_decay: 0.0}\nlog: {tensorboard: false}\n"
    for code, text in train_on(2, tmp_path, (f"{HERE}:late", "--run-dir", "run"), config=config):
        assert code == 0, text
    random_state.seed_all(0)
    layer = torch.nn.Linear(3, 1)
    mean = layer(torch.stack([x for x, _ in Numbers()][8:16])).square().mean().item()
    assert losses(tmp_path / "run") == [0.0, pytest.approx(mean, rel=1e-6)]


def squares(output: torch.Tensor, _batch: Any) -> torch.Tensor:
    return output.square().mean()


late_parts = {"model": late.model, "forward": late.forward, "data": Late(), "loss": squares}
evaluated = {"eval_data": [(torch.ones(3), torch.tensor(1))] * 8, **late_parts}
of_tensor = sw.TrainSpec(metrics={"size": squares}, **evaluated)
of_values = sw.TrainSpec(metrics={"size": lambda output, batch: sw.Mean(output, len(output))}, **evaluated)
of_rows = sw.TrainSpec(**{**late_parts, "loss": lambda output, batch: output.square().mean(1)})
of_pairs = sw.TrainSpec(**{**late_parts, "loss": lambda output, batch: (squares(output, batch), output)})
of_nothing = sw.TrainSpec(optimizer=lambda groups, lr: None, **late_parts)  # type: ignore[arg-type,return-value]
of_closures = sw.TrainSpec(**{**late_parts, "optimizer": lambda groups, lr: torch.optim.LBFGS(groups[0]["params"])})
MISTAKES = {
    "of_tensor": "TrainSpec(metrics=...): 'size' gave Tensor, expected sw.Mean.",
    "of_values": "sw.Mean: expected a sum and a count, got a tensor of shape [4, 1].",
    "of_rows": "the loss function gave a tensor of shape [4] where a scalar loss was expected.",
    "of_pairs": "the loss function gave tuple where a scalar loss was expected.",
    "of_closures": "TrainSpec(optimizer=...) returned LBFGS, whose step() needs a closure.",
    "of_nothing": "TrainSpec(optimizer=...) returned NoneType, expected a torch.optim.Optimizer.",
}


def test_functions_of_a_spec_that_return_something_else_are_named(tmp_path: Path) -> None:
    config = "train: {steps: 2, micro_batch_size: 4}\nlog: {tensorboard: false}\n"
    results = train_on(1, tmp_path, *((f"{HERE}:{name}", "--run-dir", name) for name in MISTAKES), config=config)
    for (code, text), message in zip(results, MISTAKES.values(), strict=True):
        assert (code, message in text) == (78, True), text


def test_a_run_without_memory_left_says_at_which_step_and_what_needs_less(tmp_path: Path) -> None:
    results = train_on(2, tmp_path, (f"{HERE}:full", "--run-dir", "run"), config="log: {tensorboard: false}\n")
    for code, text in results:
        assert code == 78
        assert "ran out of memory in step 3: CUDA out of memory. Tried to allocate 128.00 MiB." in text
        assert "Lower train.micro_batch_size" in text
    assert summary(tmp_path / "run")["exit_code"] == 78


def test_a_callback_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    ((code, text),) = train_on(1, tmp_path, (f"{HERE}:short", "--run-dir", "run"), config="log: {tensorboard: false}\n")
    assert code == 0, text
    assert summary(tmp_path / "run")["reason"] == "good enough"
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").is_dir()


@sw.declare_elementwise
class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as schedule-free optimizers and Prodigy do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["weight_decay"] = 0.1 * group["count"]
        return super().step(closure)


class Ramp(sw.Callback):
    def on_step(self, run: Any, record: Any) -> None:
        for group in run.optimizer.param_groups:
            group["momentum"] = 0.05 * record.step


class Rate(sw.Callback):
    def on_step(self, run: Any, record: Any) -> None:
        run.optimizer.param_groups[-1]["lr"] *= 0.5 if record.step == 2 else 1.0


class Thaw(sw.Callback):
    def on_step(self, run: Any, record: Any) -> None:
        run.model.layer.bias.requires_grad_(record.step >= 2)


def half_frozen() -> torch.nn.Module:
    line = Line()
    line.layer.bias.requires_grad_(False)
    return line


counted = sw.TrainSpec(**{**late_parts, "optimizer": Counting})
ramped = sw.TrainSpec(callbacks=[Ramp()], **late_parts)
rated = sw.TrainSpec(callbacks=[Rate()], **late_parts)
thawed = sw.TrainSpec(model=half_frozen, callbacks=[Thaw()], data=Numbers())


def test_settings_that_an_optimizer_or_a_callback_changes_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    config = "train: {steps: 8, micro_batch_size: 2}\noptimizer: {name: sgd, lr: 0.1}\nschedule: {name: constant}\n"
    for name in ("counted", "ramped"):
        spec = f"{HERE}:{name}"
        given = config.replace("name: sgd, ", "") if name == "counted" else config
        runs = [(spec, "--run-dir", f"{name}-whole"), (spec, "--run-dir", name, *sets("train.steps=5"))]
        again = (spec, "--run-dir", name, "--resume", *sets("train.steps=8"))
        for code, text in train_on(1, tmp_path, *runs, again, config=given):
            assert code == 0, text
        assert losses(tmp_path / name) == losses(tmp_path / f"{name}-whole")


def test_changes_of_a_callback_that_the_run_would_undo_are_refused(tmp_path: Path) -> None:
    config = "train: {steps: 4, micro_batch_size: 2}\nschedule: {name: constant}\n"
    runs = [(f"{HERE}:{name}", "--run-dir", name) for name in ("rated", "thawed")]
    (rate, told), (thaw, also_told) = train_on(2, tmp_path, *runs, config=config)
    assert (rate, thaw) == (78, 78), told + also_told
    assert "a callback has changed a learning rate from 0.0003 to 0.00015, and each step sets it by the sched" in told
    assert "sw.Run(..., scheduler=...)" in told
    assert "a callback has set requires_grad of 'layer.bias', which was frozen when the optimizer was made" in also_told


def test_other_code_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    code = f"{IMPORTS}spec = sw.TrainSpec(model=Line, data=Numbers())\n"
    mine.write_text(code)
    short = ("--run-dir", "run", "--set", "log.tensorboard=false")
    assert train_on(1, tmp_path, ("mine.py", *short, "--set", "train.steps=2"))[0][0] == 0
    mine.write_text(code + "# changed\n")
    again = ("mine.py", *short, "--resume", "--set", "train.steps=3")
    (refused, text), (allowed, _) = train_on(1, tmp_path, again, (*again, "--set", "checkpoint.allow_other_code=true"))
    assert (refused, allowed) == (65, 0)
    assert "was saved by a run whose spec was other code (its hash has changed)" in text
    assert "--set checkpoint.allow_other_code=true" in text


def test_what_a_spec_brings_may_not_be_configured_as_well(tmp_path: Path) -> None:
    config = "model: {preset: gpt-nano}\ndata: {source: random}\noptimizer: {name: sgd}\n"
    with pytest.raises(ConfigError) as caught:
        resolve(read_config(None, base=dict(_yaml(config))), 1, spec=towers.spec)
    text = str(caught.value)
    for part, key in (("model", "preset"), ("data", "source"), ("optimizer", "name")):
        assert f"{part}.{key}: the spec brings the {part}" in text


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(text)


class Others(sw.Callback):
    """Methods as another trainer calls them."""

    def on_step_end(self, args: Any, state: Any, control: Any) -> None: ...

    def on_save(self) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": 3}, "loss=3: expected something to call"),
        ({"model": torch.nn.Linear(2, 2)}, "model=Linear: it is built already; give its class, or what makes it"),
        ({"data": 3}, "data=3: expected a data set or an iterable"),
        ({"metrics": {"a": None}}, r"metrics\['a'\]=None: expected something to call"),
        ({"callbacks": [print]}, "is not an sw.Callback"),
        (
            {"callbacks": [Others()]},
            r"Others.on_step_end would never be called; .* calls on_start, on_step, on_evaluation",
        ),
        ({"callbacks": [Others()]}, r"Others.on_save is called with \(run\), but takes \(\)"),
        ({"eval_data": [1]}, "eval_data without data"),
        ({"metrics": {"loss": print}}, "eval_loss is the held-out loss"),
        ({"data": torch.utils.data.DataLoader([1])}, "data=DataLoader: it gives batches; give its data set"),
        ({"data": iter([1])}, "it can be read once"),
        ({"loss": lambda output: output}, r"loss=.*: it is called loss\(output, batch\), but takes \(output\)"),
        ({"metrics": {"a": lambda x: x}}, r"metrics\['a'\]=.*: it is called metric\(output, batch\), but takes \(x\)"),
        ({"data": lambda: [0]}, r"data=.*: it is called data\(reader, readers\), but takes \(\)"),
    ],
)
def test_a_field_of_another_kind_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sw.TrainSpec(**fields)


def test_a_model_that_takes_a_part_of_a_batch_is_told_how_to_get_it() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    class Broken(Doubled):
        def forward(self, x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
            return len(x)()  # type: ignore[operator]

    x = torch.ones(2)
    spec = sw.TrainSpec(model=Doubled, data=[x] * 8)
    forward = objective_of(resolve(read_config(None, base={}), 1, checks_data=False, spec=spec)).forward
    assert forward(Doubled(), x).tolist() == [2.0, 2.0]
    with pytest.raises(ConfigError, match=r"batch\[1\]\), but takes \(x: (.|\n)*: model\(batch\[0\]"):
        forward(Doubled(), (x, x))
    with pytest.raises(ConfigError, match=r"as model\(x=..., y=...\), but takes \(x: (.|\n)*model\(batch\['x'\]\)\)"):
        forward(Doubled(), {"x": x, "y": x})
    with pytest.raises(TypeError, match="not callable"):  # an error inside of forward
        forward(Broken(), (x, x))
    for criterion in (torch.nn.MSELoss(), torch.nn.functional.cross_entropy):
        spec = sw.TrainSpec(model=Doubled, data=[x] * 8, loss=criterion)
        loss = objective_of(resolve(read_config(None, base={}), 1, checks_data=False, spec=spec)).loss_fn
        assert loss(x, x + 0.5).item() > 0
        with pytest.raises(
            ConfigError, match=r"torch's .* all of a batch, a tuple: (.|\n)*criterion\(output, batch\[1\]"
        ):
            loss(x, (x, x))


def test_samples_of_known_kinds_are_read_as_what_they_are() -> None:
    class Sized(torch.utils.data.IterableDataset):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter(range(4))

    assert not is_indexed(Sized())
    assert is_indexed([1])
    table = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]]})
    batch = open_user_data(table, None, None, 1).train.batch([0, 1], torch.device("cpu"))  # type: ignore[attr-defined]
    assert batch["x"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    encoded = UserDict(x=torch.zeros(2))  # as a BatchEncoding is one
    assert on_device(encoded, torch.device("meta"))["x"].is_meta
    assert not sw.TrainSpec(data=np.zeros((4, 2))).is_empty
    with pytest.raises(DataError, match=r"eval_data=...\) has 3 samples, 4 are needed at once"):
        open_user_data([1] * 9, Numbers3(), None, 8, least=4)


class Numbers3:
    def __iter__(self) -> Any:
        return iter(range(3))


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(20_000, 16)
        self.register_buffer("scales", torch.ones(20_000, 16), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.rows(ids) * self.scales[ids]).square().mean()


def test_the_peak_of_a_model_without_layers_is_predicted(tmp_path: Path) -> None:
    """It is in the update, which on a CPU has two temporary tensors of the flat parameter; buffers count too."""
    (tmp_path / "mine.py").write_text(
        "import shardwise as sw, torch\nfrom tests.train.test_spec import Table\n"
        "spec = sw.TrainSpec(model=Table, data=[torch.arange(4)] * 64)\n"
    )
    config = "train: {steps: 3, micro_batch_size: 4}\nparallel: {strategy: ddp}\nlog: {tensorboard: false}\n"
    ((code, text),) = train_on(2, tmp_path, ("mine.py", "--run-dir", "run"), config=config)
    assert code == 0, text
    shown = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert shown["peak_memory_bytes"] == pytest.approx(shown["predicted_peak_memory_bytes"], rel=0.01)


def test_a_spec_that_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import shardwise as sw\nspecs = sw.TrainSpec()\nother = 3\n")
    with pytest.raises(ConfigError, match=r"there is no 'spec' in it\. Did you mean 'specs'"):
        load_spec(str(tmp_path / "mine.py"))
    with pytest.raises(ConfigError, match="other is a int, expected an sw"):
        load_spec(str(tmp_path / "mine.py:other"))
    with pytest.raises(ConfigError, match="there is no such file"):
        load_spec(str(tmp_path / "none.py"))
    with pytest.raises(ConfigError, match="there is no module 'no_such'"):
        load_spec("no_such.module:spec")
    with pytest.raises(ConfigError, match=r"--spec ./mine: expected a file \(mine.py\)"):
        load_spec("./mine")


def test_samples_that_cannot_be_read_are_named() -> None:
    class Broken(list):
        def __getitem__(self, index: Any) -> Any:
            raise KeyError("image")

    resolved = resolve(read_config(None, base={}), 1, spec=dataclasses.replace(towers.spec, data=Broken([0] * 99)))
    from shardwise.train.config.resolve import data_of

    with pytest.raises(DataError, match=r"samples 1, 2 of Broken could not be read: KeyError: 'image'"):
        data_of(resolved).train.batch([1, 2], torch.device("cpu"))  # type: ignore[attr-defined]


def test_a_spec_is_planned_run_dry_and_compared_with_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert main(["plan", "--spec", SPEC, "--gpus", "2", "--gpu", "H100-80GB-SXM", "--out", "plan.yaml"]) == 0
    assert "Towers, 34,753 parameters" in capsys.readouterr().out
    planned = resolve(read_config(tmp_path / "plan.yaml"), 2)
    assert (planned.batch.total, planned.plan.precision.param_dtype) == (16, "bf16")
    assert main(["dry-run", "run.yaml", "--spec", SPEC, "--world-size", "2", "--json", "dry.json"]) == 0
    (dry,) = json.loads((tmp_path / "dry.json").read_text())
    assert dry["num_parameters"] == 34753
    assert dry["bytes_by_category"]["activations"] > 0
    report = run_on_ranks(compared, 2, str(tmp_path))[0]
    assert report == [True, True]


def test_a_spec_that_reads_weights_is_planned_and_run_dry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    save_model(tmp_path / "model", vocab_size=50)
    (tmp_path / "mine.py").write_text(
        "import shardwise as sw\n"
        "from transformers import AutoModelForCausalLM\n"
        "samples = [{'input_ids': [1, 2, 3], 'labels': [1, 2, 3]}] * 64\n"
        "def collate(rows):\n"
        "    import torch\n"
        "    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}\n"
        "def model(): return AutoModelForCausalLM.from_pretrained('model')\n"
        "spec = sw.TrainSpec(model=model, data=samples, collate=collate)\n"
    )
    assert main(["plan", "--spec", "mine.py", "--gpus", "2", "--gpu", "H100-80GB-SXM"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-m shardwise train plan.yaml")
    assert main(["plan", "--spec", "mine.py", "--gpus", "2", "--gpu", "H100-80GB-SXM", "--tp", "2"]) > 0
    assert "tp=2: the engine does not divide traced models by tp" in capsys.readouterr().err
    assert (
        main(["plan", "--spec", "mine.py", "--gpu", "H100-80GB-SXM", "--chunked-loss"]) == 78
    )  # was a ZeroDivisionError
    assert "chunked_loss=True cannot be added to a trace" in capsys.readouterr().err
    assert main(["plan", "--spec", "mine.py", "--gpu", "H100-80GB-SXM", "--largest"]) == 78
    assert "a traced model has no sizes to scale" in capsys.readouterr().err
    assert main(["dry-run", "run.yaml", "--spec", "mine.py", "--world-size", "2", "--json", "dry.json"]) == 0
    (dry,) = json.loads((tmp_path / "dry.json").read_text())
    assert dry["num_parameters"] > 0


def compared(folder: str) -> list[bool]:
    from shardwise.launch.world import read_world
    from shardwise.train.parity import compare_here

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    raw = read_config(Path(folder) / "run.yaml", [f"spec={SPEC}"])
    report = compare_here(raw, read_world(), strategies=["ddp", "zero3"], num_steps=2, locate=False)
    return [row.is_bitwise for row in report.rows]
