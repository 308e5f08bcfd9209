"""Checkpoints of a run: choosing one to continue from, comparing its configuration, writing and keeping them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.folder import RefusedError
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.storage import FOLDERS, Url, place_of, step_of, storage_of
from shardwise.checkpoint.store import LATEST, find_latest, publish_latest, step_directory
from shardwise.spec.errors import CheckpointError, ConfigError, ShardwiseError, StorageError
from shardwise.spec.run_files import BEST, CHECKPOINTS, CONFIG, RUN_ID
from shardwise.spec.text import aligned, printable, similar
from shardwise.train.checkpoints import random_state
from shardwise.train.checkpoints.uploads import Uploads
from shardwise.train.config.sections import CheckpointSection, Config
from shardwise.train.control import Control, differences
from shardwise.train.folder import NEWEST, is_stored, read_run_id, read_small, replace_text
from shardwise.weights.state.average import ExponentialMovingAverage

#: Keys whose changes are printed.
_REPORTED = (
    *(f"train.{name}" for name in ("steps", "epochs", "micro_batch_size", "gradient_accumulation_steps")),
    *("train.eval_every", "train.eval_batches", "parallel"),
    *("data.source", "data.eval_source", "data.mix.*.source"),  # the hash of the data is compared
)
#: Keys that may differ, and keys that may differ only if ``--set`` changes them, because a change in a file may be an
#: oversight.
_FREE = (
    *_REPORTED,
    *(f"train.{name}" for name in ("patience", "sample_prompts", "sample_tokens", "check_memory", "non_finite")),
    *(f"train.{name}" for name in ("check_replicas_every", "max_skipped_steps", "step_timeout_s", "grace_s")),
    *("optimizer.flat", "optimizer.in_backward", "train.chunked_cross_entropy"),  # the same numbers either way
    *("data.workers", "log", "checkpoint"),
    "spec",  # its code is compared
)
_SETTINGS = ("adamw_lr", "weight_decay", "betas", "eps", "momentum")
_ON_REQUEST = (
    *("optimizer.lr", *(f"optimizer.{name}" for name in _SETTINGS), "schedule", "train.clip_grad_norm"),
    *("model.hf", "data.tokenizer"),  # folders that may have moved
)


def is_empty(run_dir: Path, upload_to: str | None = None) -> bool:
    """Return whether a run has never saved anything, not even a checkpoint that is now damaged or removed."""
    found, has_saved = find_latest(run_dir), os.path.lexists(run_dir / LATEST)
    is_here = found.path is not None or found.rejected or has_saved
    return not is_here and not is_stored("latest", upload_to)


#: Pattern of the content of ``LATEST``.
_POINTER = rf"{CHECKPOINTS}/step-\d{{8,18}}"


def pointer_problem(run_dir: Path, path: Path) -> str | None:
    """Return why ``LATEST`` does not name the checkpoint ``path``, in a few words; ``None`` if it does."""
    if not os.path.lexists(run_dir / LATEST):
        return "was missing"
    try:
        latest = read_small(run_dir, LATEST)
    except (OSError, RefusedError) as error:
        return f"could not be read ({error})"
    if latest == f"{CHECKPOINTS}/{path.name}":
        return None
    if not latest:
        return "was empty"
    return f"named {latest}" if re.fullmatch(_POINTER, latest) else "named no checkpoint of this run"


#: Seconds of waiting for the previous save from which on the wait is reported.
_LONG_WAIT_S = 1.0

_NEW_LENGTH = " (from here on the learning rate is that of a schedule of the new length)"


def _made_after(step: int, folder: Path) -> list[Path]:
    """Return the checkpoints of later steps in ``folder``, in order."""
    return sorted(each for each in folder.glob("step-*") if (step_of(each.name) or -1) > step)


def mesh_changes(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return a line about the meshes of a checkpoint and of this run (sizes by axis) if they differ."""
    if not before or before == now:
        return []
    cuts = [" * ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) for sizes in (before, now)]
    return [f"resharded: {' -> '.join(cut or 'one rank' for cut in cuts)}"]


def find_checkpoint(
    run_dir: Path, wanted: str, upload_to: str | None = None, *, say: Callable[[str], object] = len
) -> Path:
    """Return the checkpoint that ``--resume WANTED`` means.

    Args:
        run_dir: The run's folder.
        wanted: ``latest`` or ``latest-good`` (both mean the store's newest if it is newer than the newest good one in
            the folder), the folder of a checkpoint or run, or a name such as ``step-00000100`` in the run.
        upload_to: The place that the run's checkpoints are copied to.
        say: Called with a line for each checkpoint that ``latest-good`` skips.
    """
    if wanted in NEWEST:
        return _newest(run_dir, upload_to, is_good=wanted == "latest-good", say=say)
    place_wanted = place_of(wanted)
    if isinstance(place_wanted, Url):
        return place_wanted if step_of(place_wanted.name) is not None else find_latest(place_wanted).require()
    for path in (place_wanted.expanduser(), run_dir / CHECKPOINTS / wanted):
        if path.is_dir():
            return find_latest(path).require() if (path / CHECKPOINTS).is_dir() else path
    if upload_to is not None and storage_of(place := place_of(upload_to) / CHECKPOINTS / wanted).list(place):
        return place
    there = [path.name for path in (run_dir / CHECKPOINTS).glob("step-*")] if run_dir.is_dir() else []
    parent = Path(wanted).expanduser().parent
    there += [path.name for path in parent.glob("step-*")] if parent.is_dir() else []
    close = similar(Path(wanted).name, sorted(set(there)))
    hint = f" Near: {', '.join(close)}." if close else ""
    raise CheckpointError(
        f"--resume {printable(wanted)}: there is no such checkpoint.{printable(hint)}\n"
        "  Use latest, latest-good, or the path of a step-* folder."
    )


def _newest(run_dir: Path, upload_to: str | None, *, is_good: bool, say: Callable[[str], object]) -> Path:
    """Return the newest checkpoint in the run's folder or on the store; if both have it, the folder's."""
    run_id = read_run_id(run_dir)
    found = find_latest(run_dir, verify=is_good, run_id=run_id)
    if upload_to is not None:
        stored = find_latest(upload_to, run_id=run_id)
        if is_good and (stored.step or 0) > (found.step or 0):
            stored = find_latest(stored.root, verify=True, run_id=run_id)
        best = stored if (stored.step or 0) > (found.step or 0) else found
        newer = (each for each in found.rejected + stored.rejected if (step_of(each[0].name) or 0) > (best.step or 0))
        found = replace(best, rejected=tuple(newer))
    if found.path is None and not found.rejected and os.path.lexists(run_dir / LATEST):
        raise CheckpointError(
            f"{printable(run_dir)} has saved checkpoints, as its {LATEST} says, but {CHECKPOINTS}/ holds none: they"
            " have been removed. The run does not start from the beginning by itself.\n"
            f"  Put {CHECKPOINTS}/ back and resume, or begin a new run in another folder, with --run-dir."
        )
    path = found.require(allow_older=is_good)
    for damaged, reason in found.rejected:
        say(f"{printable(damaged.name)} cannot be used and is passed over: {printable(reason)}")
    return path


def saved_config(path: Path) -> Mapping[str, Any]:
    """Return the configuration in a checkpoint."""
    data = open_checkpoint(path).data
    state = data.get("state", data)
    config = state.get("config") if isinstance(state, Mapping) else None
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{printable(path)} was not saved by `shardwise train`: it has no configuration.\n  Load it with sw.load()."
        )
    return config


def check_config(saved: Mapping[str, Any], config: Config, overridden: Collection[str] = ()) -> list[str]:
    """Compare a run's configuration with the one under which it is to continue; return a line for each notable change.

    Checkpoints load under any strategy and any split of the global batch. The learning rate, its schedule, the
    optimizer's other numbers and clipping may differ only if ``--set`` (``overridden``) changes them.
    """
    changed = differences(saved, config.model_dump(mode="json"))
    changed = [entry for entry in changed if entry[0] != "name"]
    requested = [key for key in _ON_REQUEST if any(_is_in(name, (key,)) for name in overridden)]
    wrong = [entry for entry in changed if not _is_in(entry[0], (*_FREE, *requested))]
    if wrong:
        rows = [("key", "the run has", "now"), *((key, _format(old), _format(new)) for key, old, new in wrong)]
        table = "\n".join(f"  {line}" for line in aligned(rows, words=range(3)))
        batch = next((old for key, old, _ in wrong if key == "train.global_batch_size"), None)
        accumulated = f" (--set train.global_batch_size={batch} --set train.gradient_accumulation_steps=null)"
        raise ConfigError(
            f"the configuration is not that of the run:\n{table}\n"
            f"  Only {', '.join(_FREE)} may differ, and {', '.join(_ON_REQUEST)} where --set asks for it (--set"
            f" optimizer.lr=1e-4). Restore the others{accumulated if batch else ''}, or start a new run."
        )
    lines = [
        f"{key}: {_format(old)} -> {_format(new)}" for key, old, new in changed if _is_in(key, (*_REPORTED, *requested))
    ]
    bends = config.schedule.name != "constant"
    return [f"{line}{_NEW_LENGTH if bends and line.startswith('train.steps') else ''}" for line in lines]


def _is_in(key: str, keys: Iterable[str]) -> bool:
    """Return whether ``key`` is one of ``keys``, where ``*`` is any index, or a field of one."""
    key = re.sub(r"\.\d+\.", ".*.", key)
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _format(value: Any) -> str:
    text = printable("(not set)" if value is None else value)
    return text if len(text) <= 60 else text[:57] + "..."


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        model: nn.Module,
        run_dir: Path,
        *,
        run_id: str,
        section: CheckpointSection,
        control: Control,
        device: torch.device,
    ) -> None:
        self.saved_step = 0  # the newest saved step
        self.failures: list[str] = []  # one line for each failed save
        self._model, self._run_dir, self._run_id = model, run_dir, run_id
        self._keep, self._allows_non_finite = section.keep, section.allow_non_finite
        self._control, self._device = control, device
        self.uploads = Uploads(run_dir, section.upload_to)
        self._saving_step = 0
        self._is_reported = False

    def save(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        average: ExponentialMovingAverage | None = None,
        *,
        step: int,
        state: dict[str, Any],
        frozen: bool = True,
        waits: bool = True,
        is_best: bool = False,
    ) -> str | None:
        """Save a step, publish it, and remove checkpoints older than the kept ones; return text to print.

        ``frozen`` is as in ``sw.save``. A full disk does not end the run: the earlier checkpoints stay, and the failure
        is counted. Without ``waits`` the checkpoint is written during training; the next call, or :meth:`finish`,
        reports the result. The best step goes to ``best/`` in the run's folder, where the newest two are kept, so that
        there is one even if the process is lost.

        Collective:
            Those of ``sw.save``, and small JSON. All ranks must call in the same order.
        """
        message = self._finish_before(step)
        if self.saved_step == step and not is_best:
            return message
        self._control.on_first(self._check_folder)
        content = {**state, "step": step, "run_id": self._run_id}
        rank_state = {"random": random_state.capture(self._device)}
        save, below, keep = sw.save if waits else sw.save_async, BEST if is_best else "", 2 if is_best else self._keep
        try:
            save(
                step_directory(self._run_dir / below, step),
                self._model,
                optimizers,
                state=content,
                average=average,
                rank_state=rank_state,
                keep=keep,
                frozen=frozen,
                allow_non_finite=self._allows_non_finite,
            )
        except StorageError as error:
            return "\n".join(filter(None, (message, self._record_failure(step, error))))
        if not waits:
            self._saving_step, self._is_reported = step, False
            return message
        self.saved_step = self.saved_step if is_best else step
        return "\n".join(filter(None, (message, *self._upload(step, below, keep)))) or None

    def _upload(self, step: int, below: str = "", keep: int | None = None) -> list[str]:
        """Start the upload of a published step, on rank 0; return text to print."""
        if not self._control.is_first or self.uploads.place is None:
            return []
        path = step_directory(self._run_dir / below, step)
        return self.uploads.add(path, keep=keep or self._keep, run_id=self._run_id) if path.exists() else []

    def poll(self) -> str | None:
        """Return news of the running save and upload, as far as this rank knows. Does not wait."""
        step = self._saving_step
        lines = self._upload(step) if step else []
        if self._control.is_first:
            lines += self.uploads.poll()
        problem = sw.save_failure(self._model) if step and not self._is_reported else None
        if problem is not None:
            self._is_reported = True
            lines.append(self._warning(step, problem))
        return "\n".join(lines) or None

    def finish(self) -> str | None:
        """Wait for the running save, if there is one; return text to print.

        Collective:
            Those of ``sw.finish_save``. All ranks must call.
        """
        step, self._saving_step = self._saving_step, 0
        if not step:
            return None
        try:
            sw.finish_save(self._model)
        except (StorageError, CheckpointError) as error:
            message = self._record_failure(step, error)
            return None if self._is_reported else message
        self.saved_step = step
        return "\n".join(self._upload(step)) or None

    def _finish_before(self, step: int) -> str | None:
        """Call :meth:`finish` before ``step`` is saved; report a long wait."""
        before, begin = self._saving_step, time.monotonic()
        message = self.finish()
        waited_s = time.monotonic() - begin
        if not before or waited_s < _LONG_WAIT_S:
            return message
        waited = (
            f"step {step} waited {waited_s:.1f} s for the checkpoint of step {before}, which was still being written:"
            " save less often (checkpoint.every), or on a faster disk"
        )
        return "\n".join(filter(None, (message, waited)))

    def _check_folder(self) -> None:
        """Raise if the run's folder was removed: a checkpoint would be useless without the other files."""
        for name in (CHECKPOINTS, CONFIG):
            if not (self._run_dir / name).exists():
                raise StorageError(
                    f"{printable(self._run_dir / name)} has been removed while the run was going on.\n"
                    "  Nothing is saved any more. Start the run anew, or put its folder back and resume."
                )

    def _record_failure(self, step: int, error: ShardwiseError) -> str:
        self.failures.append(f"step {step}: {str(error).splitlines()[0]}")
        return self._warning(step, str(error))

    def _warning(self, step: int, problem: str) -> str:
        return f"WARNING: step {step} was not saved; {self._last_checkpoint}. {problem}"

    def write_run_id(self, path: Path | None) -> None:
        """Write the run's id in its folder and on the store.

        Called only on rank 0, after the checkpoint to continue from, ``path``, is loaded.
        """
        self.uploads.open(self._run_id, is_new=path is None)
        replace_text(self._run_dir / RUN_ID, f"{self._run_id}\n")  # after the store, which may refuse

    @property
    def _last_checkpoint(self) -> str:
        return f"step {self.saved_step} is kept" if self.saved_step else "there is no earlier checkpoint"

    def load(
        self,
        path: Path,
        optimizers: Sequence[torch.optim.Optimizer],
        average: ExponentialMovingAverage | None = None,
        *,
        keep_settings: bool = True,
    ) -> dict[str, Any]:
        """Fill model, optimizers and average from a checkpoint and return its state.

        With ``keep_settings`` the optimizers' groups keep their settings, such as the rate.
        """
        state = sw.load(path, self._model, optimizers, average=average, keep_settings=keep_settings)
        place, places = path.parent.parent.absolute(), (self._run_dir.absolute(), self.uploads.place)
        if place in places:
            self._run_id = state["run_id"]  # the run keeps its id even if its folder was renamed
        self.saved_step = state["step"] if place in places else 0
        return state

    def has_best(self, step: int) -> bool:
        """Return whether ``best/`` has the checkpoint of ``step``; True if the step is 0 or there is no such folder."""
        root = self._run_dir / BEST
        return not step or not root.is_dir() or step_directory(root, step).is_dir()

    def set_aside_later(self, path: Path, step: int) -> list[str]:
        """Rename later checkpoints of this run, here and on the store, because their steps are made again.

        Called only on rank 0. Nothing is deleted. If ``path`` is in the run's folder, ``LATEST`` then points to it.
        """
        folder = (self._run_dir / CHECKPOINTS).absolute()
        best = self._run_dir.absolute() / BEST
        later = [*_made_after(step - 1, folder), *_made_after(step, best / CHECKPOINTS)]
        later = [each for each in later if each != path.absolute()]
        try:
            for each in later:
                FOLDERS.remove(each, is_kept=True)
        except OSError as error:
            raise StorageError(f"{error.filename} cannot be renamed: {error.strerror}.\n  Move it away.") from None
        lines = [f"{each.relative_to(best.parent)} is set aside as superseded-{each.name}-*" for each in later]
        lines += self.uploads.set_aside_later(step)
        if path.absolute().parent == folder:
            wrong = pointer_problem(self._run_dir, path)
            lines += self._upload(step)
            if wrong is not None:
                publish_latest(self._run_dir, path)
                lines += [] if later else [f"{LATEST} {wrong}: it names {path.name} now"]
        return lines
