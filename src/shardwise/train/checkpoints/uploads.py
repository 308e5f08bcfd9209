"""Copies of a run's checkpoints on a store (``checkpoint.upload_to``), made by a process during training."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.background import Background
from shardwise.checkpoint.storage import MANIFEST_NAME, Url, place_of, step_of, storage_of
from shardwise.checkpoint.store import find_latest
from shardwise.spec.errors import ConfigError
from shardwise.spec.run_files import BEST, CHECKPOINTS, RUN_ID
from shardwise.spec.text import printable
from shardwise.train.folder import replace_text

#: Seconds between checks for the end of uploads, and between collectives of ranks that wait for uploads.
_POLL_S, _ROUND_S = 0.1, 10.0


class Uploads:
    """The uploads of a run, one at a time; of the waiting ones only the newest is made. Used only on rank 0."""

    def __init__(self, run_dir: Path, to: str | None) -> None:
        self.place: Path | None = None if to is None else place_of(to)  # ``None``: no uploads
        self.failures: list[str] = []  # one line for each failed upload
        self.problem: str | None = None  # why the newest checkpoint is neither uploaded nor being uploaded
        self._run_dir, self._process = run_dir.absolute(), Background()
        self._waiting: dict[str, dict[str, Any]] = {}
        self._running: dict[str, Any] | None = None
        self._known: set[Path] = set()

    def open(self, run_id: str, *, is_new: bool) -> None:
        """Raise a StorageError if the store is not writable, a ConfigError if it has another run."""
        if self.place is None:
            return
        uploaded = find_latest(self.place)
        theirs = uploaded.run_id
        if (theirs is not None or uploaded.rejected) if is_new else theirs not in {None, run_id}:
            raise ConfigError(
                f"checkpoint.upload_to={self.place} holds checkpoints of the run {printable(theirs or '?')}; this is"
                f" {printable(run_id)}.\n  Continue that run with --resume, or name another place for this one."
            )
        if isinstance(self.place, Url):
            with os.fdopen(os.memfd_create(RUN_ID), "wb") as file:
                file.write(f"{run_id}\n".encode())
                file.flush()
                storage_of(self.place).write(self.place, "", RUN_ID, file.fileno())
        else:
            (self.place / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            replace_text(self.place / RUN_ID, f"{run_id}\n")

    def set_aside_later(self, step: int) -> list[str]:
        """Hide later checkpoints on the store, because their steps are made again; return a line for each."""
        if self.place is None:
            return []
        storage, folders = storage_of(self.place), (self.place / CHECKPOINTS, self.place / BEST / CHECKPOINTS)
        later = [folder / name for folder in folders for name in storage.list(folder) if (step_of(name) or 0) > step]
        later = [path for path in later if MANIFEST_NAME in storage.list(path)]
        for path in later:
            storage.remove(path, is_kept=True)
        return [f"{path} is set aside" for path in later]

    def add(self, path: Path, *, keep: int, run_id: str) -> list[str]:
        """Upload a published checkpoint soon; return lines to print."""
        path = path.absolute()
        if self.place is None or path in self._known:
            return []
        self._known.add(path)
        to = str(self.place / path.parent.relative_to(self._run_dir))
        before = self._waiting.get(to)
        passed = [] if before is None else [f"{Path(before['upload']).name} is not uploaded: {path.name} is"]
        self._waiting[to] = {"upload": str(path), "to": to, "keep": keep, "run_id": run_id}
        return passed + self.poll()

    def poll(self) -> list[str]:
        """Start the next upload if none is running; return lines to print. Does not wait."""
        lines: list[str] = []
        if self._running is not None and (outcome := self._process.poll()) is not None:
            job, self._running = self._running, None
            lines = self._lines_of(job, outcome)
        if self._running is None and self._waiting:
            job = self._running = self._waiting.pop(min(self._waiting))
            self._process.begin(job, None, {})
        return lines

    def wait(self, limit_s: float) -> tuple[str, bool, str | None]:
        """Wait some seconds; return text to print, whether the wait is over, and why an upload is missing."""
        end, lines = time.monotonic() + min(limit_s, _ROUND_S), self.poll()
        while self._running is not None and time.monotonic() < end:
            time.sleep(_POLL_S)
            lines += self.poll()
        late = None if self._running is None else "it was not uploaded in time (train.grace_s)"
        return "\n".join(lines), late is None or limit_s <= _ROUND_S, late or self.problem

    def close(self) -> None:
        """Abort a running upload."""
        self._process.close()

    def _lines_of(self, job: Mapping[str, Any], outcome: Mapping[str, Any]) -> list[str]:
        path, to = Path(job["upload"]), job["to"]
        problem = f"step {step_of(path.name)} was not uploaded to {to}: {outcome.get('problem')}"
        if outcome.get("is_gone"):
            return [f"{path.name} is not uploaded: it was removed before"]
        if path.parent.parent == self._run_dir:  # not a checkpoint of a best evaluation
            self.problem = problem if "problem" in outcome else None
        if "problem" in outcome:
            self.failures.append(problem.splitlines()[0])
            return [f"WARNING: {problem}" + (f"\n  It is saved in {path}." if path.exists() else "")]
        removed = [f"{printable(name)}, an unfinished upload, was removed from {to}" for name in outcome["removed"]]
        return removed + [f"{printable(name)} is left in {to}: {printable(why)}" for name, why in outcome["refused"]]
