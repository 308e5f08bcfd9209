"""``eval``: score a trained model on tasks of lm-eval."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import show
from shardwise.cli.trained_model import check_packages, run_with_model
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable

if TYPE_CHECKING:
    from shardwise.launch.world import World
    from shardwise.train.load import TrainedModel


def evaluate(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A run's folder or URL, a checkpoint's, or a Hugging Face folder.")],
    tasks: Annotated[list[str], typer.Option(help="Name of a task, or a YAML file with one, repeatable.")],
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question, if not the task's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Evaluate at most this many documents of each task.", min=1)] = None,
    batch_tokens: Annotated[int, typer.Option(help="Largest number of tokens in a forward.", min=1)] = 4096,
    nproc: Annotated[int | None, typer.Option(help="Processes; by default as many as tp and pp need.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="parallel.field=value, repeatable.")] = None,
    average: Annotated[bool, typer.Option("--average", help="Use the averaged weights (train.ema_decay).")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put questions into the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Evaluate the model of a run, of a checkpoint, or of a Hugging Face folder on tasks of lm-eval.

    A task is a name that EleutherAI's lm-eval knows (`lm-eval ls tasks`; its data comes from the hub), or a YAML file
    of yours in lm-eval's form, which may name Python functions: it is code. --nproc shards the parameters over
    processes (zero3), --set parallel.tp=2 or parallel.pp=2 divides the computation. The numbers are those of one
    process, up to rounding. A model whose tokens are bytes has no BOS: texts are scored after a newline.

    Examples:

      shardwise eval runs/demo --tasks my_task.yaml

      shardwise eval models/llama --tasks hellaswag --tasks arc_easy --num-fewshot 5 --nproc 8

      shardwise eval runs/chats --tasks gsm8k --chat --limit 100 --set parallel.tp=2 --json
    """
    check_packages("eval", "lm_eval", "transformers")
    for name in tasks:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise ConfigError(f"--tasks {name}: there is no such file.\n  Name a YAML file, or a task of lm-eval.")
    settings = overrides or []

    def check(trained: TrainedModel, count: int) -> None:
        trained.check_continues(trained.resolve(settings, count))
        _tokenizer(trained, is_chat=chat)

    def work(trained: TrainedModel, world: World) -> int:
        if world.rank:  # only rank 0 shows its progress
            os.environ["TQDM_DISABLE"] = "1"
        import lm_eval  # pyrefly: ignore[missing-import]
        from lm_eval.utils import make_table  # pyrefly: ignore[missing-import]

        from shardwise.integrations.lm_eval import ShardwiseLM

        resolved = trained.resolve(settings, world.size, world.ranks_per_machine)
        tokenizer, prefix = _tokenizer(trained, is_chat=chat)
        names, manager = _found(tasks)
        with trained.loaded(resolved, world, is_averaged=average) as model:
            found = lm_eval.simple_evaluate(
                ShardwiseLM(model, tokenizer, batch_tokens=batch_tokens, prefix_token_id=prefix),
                tasks=names,
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                apply_chat_template=chat,
                log_samples=False,
            )
        if world.rank == 0:
            show(json.dumps(found["results"]) if as_json else make_table(found))
        return 0

    run_with_model(context, path, settings, nproc, is_averaged=average, check=check, work=work)


def _tokenizer(trained: TrainedModel, *, is_chat: bool) -> tuple[Any, int | None]:
    """Return the model's tokenizer as one of transformers, and the token before each text if it has no BOS."""
    from shardwise.train.data.tokenizer import ByteTokenizer

    hf_tokenizer, prefix = trained.hf_tokenizer(), ord("\n") if isinstance(trained.tokenizer(), ByteTokenizer) else None
    if is_chat and not hf_tokenizer.chat_template:
        raise ConfigError(
            "--chat: the model's tokenizer has no chat template, by which messages become text.\n  Leave --chat out."
        )
    return hf_tokenizer, prefix


def _found(tasks: Sequence[str]) -> tuple[list[str], Any]:
    """Return the names of the tasks, and lm-eval's index of them."""
    from lm_eval.tasks import TaskManager  # pyrefly: ignore[missing-import]

    files = {name: Path(name).resolve() for name in tasks if Path(name).is_file()}
    folders = sorted({str(path.parent) for path in files.values()})
    manager = TaskManager(include_path=folders, include_defaults=len(files) < len(tasks))  # defaults: 14,000 files
    names: list[str] = []
    for name in tasks:
        path = files.get(name)
        if path is None:
            matches = manager.match_tasks([name])
        else:
            index = manager.task_index.items()
            matches = [each for each, entry in index if entry.yaml_path and Path(entry.yaml_path).resolve() == path]
        if not matches:
            what = "lm-eval knows no such task" if path is None else "the file has no line `task: NAME`"
            raise ConfigError(
                f"--tasks {printable(name)}: {what}.\n"
                "  Name a task that `lm-eval ls tasks` lists, or a YAML file in the form of lm-eval's tasks."
            )
        names += [each for each in matches if each not in names]
    return names, manager
