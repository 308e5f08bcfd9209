"""Trained models for generation and export: a run, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.storage import MANIFEST_NAME, Url, deepspeed_advice, place_of
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.spec.hf_cache import folder_name, how_to_fetch, is_hub_name, local_folder
from shardwise.spec.text import printable
from shardwise.train.checkpoints.checkpoints import find_checkpoint, saved_config
from shardwise.train.checkpoints.saved_state import check_sections
from shardwise.train.config.hf import check_weights
from shardwise.train.config.resolve import RunConfig, resolve
from shardwise.train.config.sections import RawConfig, read_config
from shardwise.train.data.source import BYTE_VOCAB, find_source
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import (
    BYTES,
    FolderTokenizer,
    Tokenizer,
    byte_tokenizer,
    find_tokenizer,
    folder_ends,
)
from shardwise.train.task import NEXT

if TYPE_CHECKING:
    from torch import nn

    from shardwise.launch.world import World

#: Sections of a run's configuration that generation and export need.
_SECTIONS = ("model", "data", "parallel", "lora")


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model on disk."""

    checkpoint: Path | None  # the checkpoint with its weights; ``None`` for a Hugging Face folder
    folder: Path | None  # the Hugging Face folder; ``None`` for a run or checkpoint
    model: dict[str, Any]  # the configuration's section ``model``
    source: str | None = None  # the run's ``data.source``, or the first of its mixture
    tp_plan: dict[str, str] | None = None  # the run's ``parallel.tp_plan``
    #: Whether the run's checkpoints have fp32 masters of weights that its folder stores in 16 bit
    raises_masters: bool = False
    lora: dict[str, Any] | None = None  # the run's section ``lora``
    #: The run's ``data.tokenizer``: ``bytes``, a folder, or ``None`` if unknown
    tokens_by: str | None = BYTES
    chat_template: str | None = None

    def draft(self, overrides: Sequence[str]) -> RawConfig:
        """Return a configuration for generation: zero3 over all ranks, unless ``parallel.field=value`` overrides it."""
        for override in overrides:
            if not override.strip().startswith("parallel."):
                raise ConfigError(
                    f"--set {override}: the model and its tokens are those of the run.\n  Set fields of parallel only."
                )
        base = {
            "name": "generate",
            "model": self.model,
            "lora": self.lora or {},
            "data": {"source": "random"},  # no data is read
            "parallel": {"strategy": "zero3", "tp_plan": self.tp_plan},
        }
        return read_config(None, overrides, base=base, title="the run")

    def resolve(self, overrides: Sequence[str], world_size: int, local_size: int | None = None) -> RunConfig:
        """Return the configuration of :meth:`draft`, checked for a world of ``world_size`` ranks."""
        return resolve(
            self.draft(overrides),
            world_size,
            local_size,
            checks_data=False,
            raises_masters=self.raises_masters,
            trains=False,
        )

    def read_template(self, file: Path | None = None) -> str | None:
        """Return the chat template in ``file``, or that of the run's training; ``None``: the tokenizer's own."""
        where = file or (Path(self.chat_template).expanduser() if self.chat_template else None)
        if where is None:
            return None
        try:
            return where.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat template {printable(where)}: {error}.\n  Name a file that can be read (serve: --chat-template)."
            ) from None

    @property
    def unknown_tokens(self) -> str:
        """A description of the run's tokens if their text is not known, else an empty text."""
        if self.tokens_by is None:
            return "tokens whose text is not known"
        if self.folder is None and self.tokens_by == BYTES:
            with contextlib.suppress(DataError):  # without the data, its text was bytes
                source = find_source(self.source or "stdlib")
                if source.kind == "tokens" and source.vocab_size != BYTE_VOCAB:
                    return "token files, whose text is not known"
        return ""

    def tokenizer(self) -> Tokenizer:
        """Return the folder's tokenizer, or the one of the run's training."""
        if self.folder is not None:
            return FolderTokenizer(self.folder)
        if unknown := self.unknown_tokens:
            raise ConfigError(
                f"the run was trained on {unknown}.\n  Continue ids: shardwise generate --tokens '12 7 9'. A run whose"
                " data.tokenizer names a folder decodes with it."
            )
        return find_tokenizer(self.tokens_by or BYTES)

    def ends(self, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """Return the ids that end an answer: the tokenizer's if there is one, and those of the model's folder."""
        own = () if tokenizer is None else tokenizer.ends
        folder = self.folder or self.model.get("hf")
        if folder is None or (self.folder is None and self.tokens_by == BYTES):  # the folder's ids are not bytes
            return own
        return (*own, *(token for token in folder_ends(Path(folder).expanduser()) if token not in own))

    def hf_tokenizer(self) -> Any:
        """Return :meth:`tokenizer` as a tokenizer of transformers, with the chat template of the run's training."""
        tokenizer = self.tokenizer()
        found = tokenizer.hf_tokenizer if isinstance(tokenizer, FolderTokenizer) else byte_tokenizer()
        found.chat_template = self.read_template() or found.chat_template
        return found

    def check_average(self, *, is_asked: bool) -> str:
        """Refuse a request for averaged weights if there are none; return a hint if there are some but no request."""
        from shardwise.checkpoint.reader import open_checkpoint

        if self.checkpoint is not None and "average" in open_checkpoint(self.checkpoint).data:
            return "" if is_asked else "these are the weights as trained; --average takes the run's averages of them"
        if not is_asked:
            return ""
        what = "a Hugging Face folder" if self.checkpoint is None else f"checkpoint {printable(self.checkpoint.name)}"
        raise ConfigError(
            f"--average: {what} holds no averaged weights.\n"
            "  Leave it out, or train with train.ema_decay set: its checkpoints hold them."
        )

    def check_continues(self, resolved: RunConfig) -> None:
        """Refuse models that do not continue texts."""
        if resolved.task.name != NEXT:
            advice = "Use the folder" if self.checkpoint is None else "Export the run, and use the folder"
            raise ConfigError(
                f"the model is trained for {resolved.task.name}, and cannot continue texts.\n"
                f"  {advice} with transformers."
            )

    def generate(
        self, resolved: RunConfig, world: World, rows: Sequence[Sequence[int]], *, is_averaged: bool, **settings: Any
    ) -> Iterator[Sequence[int | None]]:
        """Join the world, load the model and continue ``rows`` as ``sw.generate_stream``, on all ranks to the end."""
        import shardwise as sw

        with self.loaded(resolved, world, is_averaged=is_averaged) as model:
            yield from sw.generate_stream(model, rows, **settings)

    @contextlib.contextmanager
    def loaded(self, resolved: RunConfig, world: World, *, is_averaged: bool) -> Iterator[nn.Module]:
        """Join the world and load the model under a plan for generation; leave the world at the end of the block.

        Collective:
            Those of ``sw.parallelize`` and ``sw.load``. All ranks must enter.
        """
        import torch

        import shardwise as sw
        from shardwise.launch.world import joined_world
        from shardwise.train.model.build import defer_model

        self.check_continues(resolved)
        with joined_world(world) as device:
            torch.manual_seed(0)
            model, weights = defer_model(resolved, device)  # each rank reads only what it owns
            config: Any = getattr(model, "config", None)
            if getattr(config, "output_router_logits", False):
                config.output_router_logits = False  # only for a training loss, and not supported with pp
            model = sw.parallelize(model, resolved.plan, init=weights)
            average = sw.ExponentialMovingAverage(model) if is_averaged else None
            if self.checkpoint is not None:
                sw.load(self.checkpoint, model, average=average)
            with contextlib.nullcontext() if average is None else average.swapped_in():
                yield model.eval()


def find_model(path: Path) -> TrainedModel:
    """Find out whether ``path`` is a run, a checkpoint or a Hugging Face folder."""
    from shardwise.spec.run_files import CHECKPOINTS

    place = place_of(path)
    is_url, is_run = isinstance(place, Url), (path / CHECKPOINTS).is_dir()
    if is_url or is_run or (path / MANIFEST_NAME).exists():
        checkpoint = find_checkpoint(path, str(place) if is_url else "latest") if is_url or is_run else path
        config = {key: value for key, value in saved_config(checkpoint).items() if key in _SECTIONS}
        saved = check_sections(checkpoint, config)
        if not (saved.model.preset or saved.model.hf):
            raise CheckpointError(
                f"{printable(path)} is of a model of the user's own (a spec, or a loop with sw.Run), which this verb"
                " does not know.\n  Build it in Python, and load its weights:"
                f" sw.load({str(checkpoint)!r}, sw.parallelize(model))."
            )
        hf = saved.model.hf
        if hf is not None and not (Path(hf).expanduser() / "config.json").is_file():
            raise CheckpointError(
                f"{printable(path)} was trained from {printable(hf)}, which holds no config.json now.\n"
                f"  Restore the folder, or link a copy of it there: ln -s /path/of/the/copy {shlex.quote(hf)}"
            )
        if saved.lora.is_used:
            from shardwise.checkpoint.reader import open_checkpoint
            from shardwise.train.model.lora import check_base

            check_base(Path(saved.model.hf or "").expanduser(), open_checkpoint(checkpoint).data["state"].get("base"))
        parallel = config.get("parallel", {})
        policy = parallel.get("mp_policy")  # null, a dtype's name, or fields
        return TrainedModel(
            checkpoint,
            None,
            config.get("model", {}),
            saved.data.sources[0].source,
            parallel.get("tp_plan"),
            lora=config.get("lora"),
            raises_masters=isinstance(policy, dict) and policy.get("master_dtype") == "fp32",
            tokens_by=saved.data.tokenizer,
            chat_template=next((each.chat_template for each in saved.data.sources if each.chat_template), None),
        )
    if not path.exists():
        path = local_folder(path)
    if (path / "config.json").is_file():
        check_weights(path)
        if not any(path.glob("*.safetensors")):  # weights would be initialized
            raise CheckpointError(
                f"{printable(path)} has a config.json and no weights.\n  Name a folder with *.safetensors beside it."
            )
        return TrainedModel(None, path, {"hf": str(path)})
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{printable(path)} is an adapter, without the model below it.\n"
            "  Name the run that trained it, or a folder with all weights: shardwise export RUN FOLDER --merge."
        )
    what = "it holds no checkpoints, no manifest and no config.json"
    if not path.is_dir():
        what = "there is no such folder" + (f" ({how_to_fetch(str(path))})" if is_hub_name(str(path)) else "")
    name = "Name a run's folder (runs/demo), a step-* folder in its checkpoints, or a folder with config.json."
    raise CheckpointError(
        f"{printable(path)} is not a run, checkpoint or Hugging Face folder: {what}.\n"
        f"  {deepspeed_advice(each.name for each in path.glob('*')) or name}"
    )


def model_name(path: Path) -> str:
    """Return the name of a run, also for one of its checkpoints, or of a folder."""
    from shardwise.spec.run_files import CHECKPOINTS

    resolved = path.resolve()
    return resolved.parents[1].name if resolved.parent.name == CHECKPOINTS else folder_name(local_folder(path))
