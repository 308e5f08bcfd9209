"""What has been trained and can be asked: a run, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.train.check import Resolved
from shardwise.train.config import Draft, read_draft
from shardwise.train.data import BYTE_VOCAB, find_source
from shardwise.train.resume import find_checkpoint, saved_config
from shardwise.train.text import printable
from shardwise.train.tokens import DataError

if TYPE_CHECKING:
    import torch
    from torch import nn


class Tokenizer(Protocol):
    """Between text and token ids.

    Attributes:
        ends: Ids that end a text.
    """

    ends: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""
        ...


@dataclass(frozen=True, slots=True)
class Trained:
    """A model on disk.

    Attributes:
        checkpoint: Where its weights are; ``None``: in the Hugging Face folder.
        folder: The Hugging Face folder that was named; ``None``: a run or checkpoint was.
        model: The configuration's section ``model``.
        source: Where the run's data came from.
        tp_plan: Of the run.
        raises_masters: The run held fp32 masters of weights that its folder stores in 16 bit: its checkpoints do.
    """

    checkpoint: Path | None
    folder: Path | None
    model: dict[str, Any]
    source: str | None = None
    tp_plan: dict[str, str] | None = None
    raises_masters: bool = False

    def draft(self, overrides: Sequence[str]) -> Draft:
        """A configuration for generating: zero3 over all ranks, unless ``parallel.field=value`` says otherwise.

        Raises:
            ConfigError: An override is of another section.
        """
        for override in overrides:
            if not override.strip().startswith("parallel."):
                raise ConfigError(
                    f"--set {override}: the model and its tokens are those of the run.\n  Set fields of parallel only."
                )
        base = {
            "name": "generate",
            "model": self.model,
            "data": {"source": "random"},  # no data is read
            "parallel": {"strategy": "zero3", "tp_plan": self.tp_plan},
        }
        return read_draft(None, overrides, base=base, title="the run")

    def tokenizer(self) -> Tokenizer:
        """Of the folder; a run's tokens are bytes.

        Raises:
            ConfigError: The folder has none, or the run was trained on tokens whose text is not known.
        """
        if self.folder is not None:
            return OfFolder(self.folder)
        try:
            source = find_source(self.source or "stdlib")
        except DataError:  # the data has gone; text was bytes
            return Bytes()
        if source.kind == "tokens" and source.vocab_size != BYTE_VOCAB:
            raise ConfigError(
                f"the run was trained on token files with a vocabulary of {source.vocab_size:,}, whose text is not"
                " known.\n  Give ids: --tokens '12 7 9'."
            )
        return Bytes()

    def check_average(self) -> None:
        """Refuse to generate with averaged weights where there are none.

        Raises:
            ConfigError: The checkpoint holds none, or it is a Hugging Face folder.
        """
        from shardwise.checkpoint import open_checkpoint

        if self.checkpoint is not None and "average" in open_checkpoint(self.checkpoint).data:
            return
        what = "a Hugging Face folder" if self.checkpoint is None else f"checkpoint {printable(self.checkpoint.name)}"
        raise ConfigError(
            f"--average: {what} holds no averaged weights.\n"
            "  Leave it out, or train with train.ema_decay set: its checkpoints hold them."
        )

    @contextlib.contextmanager
    def built(self, resolved: Resolved, device: torch.device, *, is_averaged: bool = False) -> Iterator[nn.Module]:
        """The model under ``resolved``'s plan, with its weights, for a rank of the world.

        Args:
            resolved: The configuration.
            device: Of this rank.
            is_averaged: Its weights are the run's averaged ones.

        Collective:
            Those of ``sw.parallelize`` and ``sw.load``. All ranks must call.
        """
        import torch

        import shardwise as sw
        from shardwise.train.build import build_model

        torch.manual_seed(0)
        if resolved.model is not None:  # under zero3 never whole: made unit by unit, and each rank reads what it holds
            model = sw.deferred_init(lambda: build_model(resolved, device))
        else:
            model = build_model(resolved, device)
        model = sw.parallelize(model, resolved.plan)
        average = sw.ExponentialMovingAverage(model) if is_averaged else None
        if self.checkpoint is not None:
            sw.load(self.checkpoint, model, average=average)
        with contextlib.nullcontext() if average is None else average.swapped_in():
            yield model.eval()


def find_trained(path: Path) -> Trained:
    """Look at what ``path`` is.

    Raises:
        CheckpointError: No run, checkpoint or Hugging Face folder; or a damaged one.
    """
    from shardwise.checkpoint import CHECKPOINTS
    from shardwise.checkpoint.manifest import MANIFEST_NAME

    if (path / CHECKPOINTS).is_dir() or (path / MANIFEST_NAME).exists():
        checkpoint = find_checkpoint(path, "latest") if (path / CHECKPOINTS).is_dir() else path
        config = saved_config(checkpoint)
        parallel = config.get("parallel", {})
        policy = parallel.get("mp_policy") or {}
        return Trained(
            checkpoint,
            None,
            config["model"],
            config["data"]["source"],
            parallel.get("tp_plan"),
            raises_masters=policy.get("master_dtype") == "fp32",
        )
    if (path / "config.json").is_file():
        return Trained(None, path, {"hf": str(path)})
    what = "there is no such folder" if not path.is_dir() else "it holds no checkpoints, no manifest and no config.json"
    raise CheckpointError(
        f"{printable(path)} is no run, checkpoint or Hugging Face folder: {what}.\n"
        "  Name a run's folder (runs/demo), a step-* folder in its checkpoints, or a folder with config.json."
    )


class Bytes:
    """One token per byte."""

    ends = ()

    def encode(self, text: str) -> list[int]:
        """UTF-8."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """What is no byte, or no UTF-8, becomes U+FFFD."""
        return bytes(token if token < BYTE_VOCAB else 0xFF for token in ids).decode("utf-8", "replace")


class OfFolder:
    """That of a Hugging Face folder.

    Raises:
        ConfigError: There is none that can be loaded.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer  # pyrefly: ignore[missing-import]
        except ImportError:
            raise ConfigError(
                "a Hugging Face folder needs the transformers package.\n  Install shardwise[hf]."
            ) from None
        try:
            held: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = printable(str(error).splitlines()[0] if str(error) else type(error).__name__)
            raise ConfigError(
                f"{printable(folder)} has no tokenizer that can be loaded: {reason}\n  Give ids: --tokens '12 7 9'."
            ) from None
        self._held, end = held, held.eos_token_id
        self.ends: tuple[int, ...] = () if end is None else (end,)

    def encode(self, text: str) -> list[int]:
        """With what the tokenizer puts before a text."""
        return list(self._held.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._held.decode(list(ids), skip_special_tokens=True))
