"""docs/recipes.md: its configurations load for their numbers of GPUs, and its figures are the planner's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench import recipes
from shardwise.cli import main
from shardwise.cli.plan_file import write_model_folder
from shardwise.planner import estimate
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape
from shardwise.spec.shape.names import KNOWN

PAGE = recipes.PAGE.read_text("utf-8")
MADE = PAGE.partition(recipes.START)[2].partition(recipes.END)[0].strip()
CONFIGURATIONS = dict(re.findall(r"^[\d,]+ GPUs, `([^`]+)`:\n\n```yaml\n(.*?)^```", MADE, re.MULTILINE | re.DOTALL))
RECIPES = [
    (model, num_gpus)
    for model in recipes.MODELS
    for num_gpus in model.batches
    if model.file(num_gpus) in CONFIGURATIONS
]
#: The plan is applied to the whole model on meta, by one rank of each stage, where it divides layers: a minute of one
#: core, and several on a busy machine.
LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
LOADED = [
    pytest.param(*recipe, marks=LONG if "\n  pp: " in CONFIGURATIONS[recipe[0].file(recipe[1])] else [])
    for recipe in RECIPES
]
STALE = "run: python -m bench.recipes"


def row(model: recipes.Model, num_gpus: int) -> list[str]:
    """The cells of a recipe's row, without the number of GPUs."""
    part = MADE.partition(f"## {model.title}\n")[2]
    found = re.search(rf"^\| {num_gpus:,} \| (.*) \|$", part, re.MULTILINE)
    assert found is not None
    return found[1].split(" | ")


@pytest.mark.parametrize(("model", "num_gpus"), RECIPES, ids=lambda value: getattr(value, "name", value))
def test_figures_are_the_planners_for_the_configuration_of_the_page(model: recipes.Model, num_gpus: int) -> None:
    content = yaml.safe_load(CONFIGURATIONS[model.file(num_gpus)])
    plan = ParallelPlan(**content["parallel"])
    workload = replace(
        model.workload(num_gpus),
        micro_batch=content["train"]["micro_batch_size"],
        chunked_loss=content["train"].get("chunked_cross_entropy", False),
    )
    made = estimate(ModelShape.from_config(model.name), plan, model.cluster(num_gpus), workload)
    assert list(recipes.figures(made)) == row(model, num_gpus), STALE


@pytest.mark.parametrize(("model", "num_gpus"), LOADED, ids=lambda value: getattr(value, "name", value))
def test_a_configuration_loads_and_its_job_has_so_many_gpus(
    model: recipes.Model,
    num_gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(model.file(num_gpus))
    file.write_text(CONFIGURATIONS[file.name])
    if model.name in KNOWN:
        write_model_folder(Path(model.name), KNOWN[model.name])
    command = f"launch --slurm {file} --gpus {num_gpus} --out {file.stem}.sbatch"
    assert f"$ shardwise {command}\n" in MADE
    assert main(command.split()) == 0, capsys.readouterr().err
    script = Path(f"{file.stem}.sbatch").read_text()
    assert f"#SBATCH --nodes={num_gpus // 8}\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in script


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_is_what_the_planner_recommends() -> None:
    assert "\n".join(map(recipes.section, recipes.MODELS)).strip() == MADE, STALE
