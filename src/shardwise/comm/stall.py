"""The stall watch: detects ranks that disagree about their collectives, and distinguishes them from slow ranks.

Ranks that issue different collectives wait for messages that never come (``comm.gloo`` gives every collective a
different tag). A thread in each process detects a long wait, and publishes this rank's collectives in the store that
the ranks share. One of the stalled ranks compares for all, so that requests to the store grow with the number of ranks,
not with its square. Two ranks certainly disagree if they issued different collectives at the same place of one Comm's
sequence. So do ranks in a ring of which each waits for a collective that the next one has not issued.

The rank that finds a disagreement writes it into the store as the verdict, and for each rank the open messages of its
peers. Each rank then answers these with dummies, which wakes the peers' main threads. All of them read the verdict and
raise RankDisagreement. While no wait is long, nothing is sent.

On a device (:class:`Ledger`) the host does not wait, or waits where nothing can wake it. There a collective is overdue
if the device has completed neither it nor any other collective for a while. The ranks compare as above, with one
exception: their hosts continue, so a ring of waits proves a disagreement only after the time limit. Any other wait that
lasts until then is a time-out. The next collective that this rank issues raises the verdict. A host that issues none,
because it waits for the device, cannot be woken: the process prints the verdict and its stack, and exits with the
error's exit code.

A rank that had fewer batches than the others exits, or waits in a collective of torch.distributed (a barrier after the
loop), while the others wait for it here. A process therefore records in the store that it exits without an error, and
its thread checks whether the main thread is inside torch.distributed.

``launch.hang`` detects ranks that agree but make no progress, also outside of collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from shardwise.comm.dtype import dtype_name
from shardwise.launch.exit_codes import LOG_DIR, note_exit, read_exit_notes
from shardwise.launch.world import keep_group_while
from shardwise.spec.errors import CommError, CommTimeout, RankDisagreement


class PendingWait(Protocol):
    """A collective for which the main thread waits, as the watch sees it."""

    stamp: Stamp
    messages: list[tuple[str, int, int, int]]  # direction, peer in the group, tag and bytes of each of its messages


# -- collectives that this process has issued: plain objects that any thread may read


@dataclass(slots=True)
class Stamp:
    """The stamp of one collective of one Comm."""

    channel: str  # name of the Comm
    sequence: int  # number of the collective on that Comm, from 0
    kind: str  # kind of collective; ``message`` for both ends of a message
    unit: str  # name of the unit that the collective serves
    numel: int  # elements of the buffer, the same on all ranks of the collective
    dtype: torch.dtype  # dtype of the buffer, the same on all ranks
    issued_at_s: float = field(default_factory=time.monotonic)  # time on ``time.monotonic``

    def __str__(self) -> str:
        return f"{self.channel} #{self.sequence} {self.kind}({self.unit}, {self.numel} elements)"


#: The newest collectives of this process, oldest first. The host may be hundreds of collectives ahead of the device.
history: deque[Stamp] = deque(maxlen=1024)

#: Sequence number of the newest collective, by channel. Unlike the history it includes every channel.
newest: dict[str, int] = {}


def num_issued() -> int:
    """The number of collectives that this process has issued."""
    return sum(newest.values()) + len(newest)


#: The collective for which a thread is waiting now.
waiting: Stamp | None = None


def last_collective() -> str:
    """Describe in one line the last collective, and whether this process is waiting for one."""
    if waiting is not None:
        return f"waiting in {waiting} for {time.monotonic() - waiting.issued_at_s:.1f} s"
    if history:
        return f"not in a collective; last issued {history[-1]}"
    return "no collective yet"


#: Number of collectives under way that a ledger keeps. If an older one is stuck, so are these.
_MAX_UNDER_WAY = 256


class Ledger:
    """The collectives of one Comm that are enqueued on a device and not completed.

    The host continues while the device waits for a peer. The watch reads ledgers to detect that the device is stuck.
    """

    def __init__(self, peers: Sequence[int], watch: StallWatch | None) -> None:
        self.peers = peers
        self._watch = watch
        self._pending: deque[tuple[Stamp, Callable[[], bool]]] = deque(maxlen=_MAX_UNDER_WAY)
        if watch is not None:
            watch.add_ledger(self)

    def check(self) -> None:
        """Raise the verdict of the watch, if there is one: an earlier collective will not end."""
        if self._watch is not None:
            self._watch.check()

    def add(self, stamp: Stamp, is_done: Callable[[], bool]) -> None:
        """Add a collective that was issued; ``is_done`` asks the device without waiting."""
        if self._watch is not None:
            self._pending.append((stamp, is_done))

    def oldest(self, before_s: float) -> Stamp | None:
        """Return the oldest collective that the device has not completed, of those issued before ``before_s``.

        The device is not asked about later ones, because asking disturbs a capture of CUDA graphs.
        """
        while self._pending:
            stamp, is_done = self._pending[0]
            if stamp.issued_at_s > before_s:
                return None
            if not _is_done(is_done):
                return stamp
            self._pending.popleft()
        return None


def _is_done(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except RuntimeError:  # the event belongs to a captured graph, or the device has failed, which is reported elsewhere
        return True


# -- the watch

#: A wait of this length counts as stalled.
STALL_S = 3.0
#: Interval at which the thread checks for stalled waits.
INTERVAL_S = 0.5
#: Interval at which a rank that is not waiting checks whether a peer asks for its status.
IDLE_INTERVAL_S = 4.0

#: Longest wait for the thread at the end of the process, because the thread may be blocked in a store that is gone.
_END_S = 5.0
#: Time that a rank whose peer is gone waits for the peer's note that it has exited.
EXIT_NOTE_S = 2.0

#: Time after a verdict on the device until a process whose host issues no collective is killed.
GRACE_S = 10.0

#: Number of the newest collectives that are published, and of collectives around the overdue one.
_MAX_PUBLISHED = 64

_KEY = "shardwise/stall"

_OTHER_PATHS = (
    "The ranks took different paths through the model. Often only some ranks make a call, such as an evaluation or"
    " sw.full_state_dict under `if rank == 0:`: every rank must make it. Let every rank run the same units, or wrap"
    " the module that chooses among them as one unit (auto_wrap_policy); in sw.eval_step paths may differ. If a loss is"
    " made of several such forwards, call backward() after each. Where one has fewer batches, see sw.join."
)
_FEWER_BATCHES = (
    "Where it has fewer batches, use drop_last=True, or `for batch, weight in sw.join(model, batches):` and the loss"
    " times weight."
)


class StallWatch:
    """Watches the waits of this process on one process group."""

    _by_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, StallWatch]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._store = dist.PrefixStore(_KEY, group.get_group_store())
        self._rank = group.rank()
        self._size = group.size()
        self._waiting: tuple[PendingWait, float] | None = None
        self._answered: set[tuple[int, str, int]] = set()
        self._kept_alive: list[Any] = []
        self._idle_since = 0.0
        self._torch_wait: tuple[int, str, float] | None = (
            None  # frame inside torch.distributed, name of the function, time of its first sight
        )
        self.verdict: CommError | None = None  # the disagreement or time-out, once one was found
        self.limit_s = math.inf  # time that a device may wait for its peers
        self._ledgers: list[weakref.ref[Ledger]] = []
        self._overdue: tuple[Stamp, Sequence[int], float] | None = None  # a collective, its peers, overdue since
        self._is_raised = False  # whether the main thread has raised the verdict
        self._verdict_since = math.inf
        self._claim = "", -math.inf  # the store's entry for the comparing rank, and the time of its last change
        self._last_request: bytes | None = None  # the request for which this rank last published
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-stall-watch", daemon=True)
        self._thread.start()
        # A thread that is inside the store while the interpreter exits aborts the process ("terminate called without
        # an active exception"). So the thread is ended first, even if the group was not destroyed.
        atexit.register(_end_at_exit, weakref.ref(self))

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> StallWatch:
        """Return the watch of ``group`` in this process, one for each group."""
        watch = cls._by_group.get(group)
        if watch is None:
            watch = cls._by_group[group] = cls(group)
        return watch

    # -- called by the main thread

    def end(self) -> None:
        """Stop watching, and record in the store that this process exits, if it does so without an error.

        Workers of our launcher write an exit note instead (``launch.exit_codes``).
        """
        if getattr(sys, "last_value", None) is None and not os.environ.get(LOG_DIR):
            with contextlib.suppress(Exception):
                self._store.set("ended", str(self._rank))
        self._stop.set()
        self._thread.join(timeout=_END_S)

    def add_ledger(self, ledger: Ledger) -> None:
        """Watch the collectives of ``ledger`` too."""
        self._ledgers = [ref for ref in self._ledgers if ref() is not None] + [weakref.ref(ledger)]

    def check(self) -> None:
        """Raise the verdict, if there is one; called before a collective is issued."""
        if self.verdict is not None:
            self._is_raised = True
            raise self.verdict

    @property
    def is_stuck(self) -> bool:
        """Whether the device waits for a peer that will not come, so that a wait for the device would not end."""
        return self.verdict is not None and self._overdue is not None

    def enter_wait(self, exchange: PendingWait) -> None:
        """Record that the main thread is about to wait for ``exchange``; raises the verdict, if there is one."""
        self.check()
        self._waiting = (exchange, time.monotonic())

    def leave_wait(self) -> None:
        """Record that the wait is over; raises the verdict, if there is one."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and _is_stalled(waiting):
            self._read_verdict()
        if waiting is not None and self.verdict is not None:
            # Its sends may be under way. If their memory were freed, Gloo would stop in the middle of a message, and
            # later messages on the connection would not be sent, such as the answer for which the peer waits.
            self._kept_alive.append(waiting)
        self.check()

    def failure(self, what: str, message: str) -> CommError:
        """Return the error for a wait that torch ended with ``message``; ``what`` describes the collective."""
        self._waiting = None
        with contextlib.suppress(Exception):
            self._read_verdict()
        if self.verdict is not None:
            self._is_raised = True
            return self.verdict
        if "imed out" in message or "timeout" in message.lower():
            with contextlib.suppress(Exception):
                self._publish()
            return CommTimeout(
                f"{what}: no answer within the process group's time limit. Where the ranks are:\n{self.describe()}\n"
                "  Look at the rank that is elsewhere: its log, and whether its process still runs."
            )
        with contextlib.suppress(Exception):
            ended = self._ended_rank()
            if ended is not None:
                return RankDisagreement(f"rank {ended} has ended, while this rank waits in {what}.\n  {_FEWER_BATCHES}")
        return CommError(
            f"{what} failed: {message}\n"
            "  A peer has left or its connection broke; look for the first error among the ranks' logs."
        )

    def overdue_text(self) -> str | None:
        """Describe the overdue collective of the device; ``None`` if there is none."""
        overdue = self._overdue
        return overdue and f"the device has been in {overdue[0]} for {time.monotonic() - overdue[2]:.1f} s"

    def describe(self) -> str:
        """Describe what each rank last published, in one line per rank."""
        lines = []
        for rank in range(self._size):
            status = self._status_of(rank)
            shown = status["last"] if status else "has said nothing: it is not waiting in a collective"
            lines.append(f"  rank {rank}: {shown}")
        return "\n".join(lines)

    def _ended_rank(self) -> int | None:
        """Return a rank that has recorded its exit, or ``None`` if there is none within ``EXIT_NOTE_S``."""
        deadline = time.monotonic() + EXIT_NOTE_S
        directory = os.environ.get(LOG_DIR)
        has_notes = directory and str(self._size) == os.environ.get("WORLD_SIZE")  # notes are by rank of the world
        while time.monotonic() < deadline:
            if self._store.check(["ended"]):
                return int(self._store.get("ended"))
            for rank, note in read_exit_notes(Path(directory or "")).items() if has_notes else ():
                if note.code == 0:
                    return rank
            time.sleep(0.05)
        return None

    # -- the thread

    def _run(self) -> None:
        while self._group() is not None and not self._stop.wait(INTERVAL_S):
            try:
                self._check_waits()
            except Exception:  # noqa: BLE001 - the store is gone at the end of the job, and nothing can be reported
                return

    def _check_waits(self) -> None:
        waiting = self._waiting
        now = time.monotonic()
        self._check_device(now)
        is_overdue = self._overdue is not None and now - self._overdue[2] >= STALL_S
        if not is_overdue and (waiting is None or not _is_stalled(waiting)):
            if now - self._idle_since > IDLE_INTERVAL_S:
                self._idle_since = now
                self._publish_if_requested()
                if self.verdict is not None:  # a peer may wait for this rank, which is not in a collective
                    self._answer()
            return
        self._publish()
        self._store.set("ask", f"{self._rank} {now}")
        self._read_verdict()
        if self._may_compare(now):
            self._compare()
        if self.verdict is not None:
            self._answer()
            self._verdict_since = min(self._verdict_since, now)
            if is_overdue and not self._is_raised and now - self._verdict_since >= GRACE_S:
                self._exit_process(self.verdict)

    def _publish_if_requested(self) -> None:
        """Publish for a stalled peer. The peer asks at each interval, so publishing stops when the peer continues."""
        request = self._store.get("ask") if self._store.check(["ask"]) else None
        if request != self._last_request:
            self._last_request = request
            self._publish()
            self._read_verdict()

    def _check_device(self, now: float) -> None:
        """Find the overdue collective, and the time since which the device has not completed it."""
        ledgers = [ledger for ref in list(self._ledgers) if (ledger := ref()) is not None]
        found = [(stamp, ledger.peers) for ledger in ledgers if (stamp := ledger.oldest(now - STALL_S)) is not None]
        if not found:
            self._overdue = None
            return
        stamp, peers = min(found, key=lambda each: each[0].issued_at_s)
        if self._overdue is None or self._overdue[0] is not stamp:
            self._overdue = stamp, peers, now

    def _exit_process(self, verdict: CommError) -> None:
        """Exit the process, because its main thread waits for a device that will never finish."""
        text = f"{type(verdict).__name__}: {verdict}"
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        note_exit(verdict.exit_code, text)
        with contextlib.suppress(Exception):
            sys.stderr.write(f"The main thread waits for the device (most recent call last):\n{stack}{text}\n")
        _flush()
        os._exit(verdict.exit_code)

    def _publish(self) -> None:
        waiting, overdue = self._waiting, self._overdue
        last, waits_for, peers = last_collective(), None, []
        if waiting is not None:
            waits_for, peers = _to_list(waiting[0].stamp), sorted({peer for _, peer, _, _ in waiting[0].messages})
        elif overdue is not None:
            waits_for, peers = _to_list(overdue[0]), list(overdue[1])
            last += f"; {self.overdue_text()}"
        status = {
            "elsewhere": self._torch_collective(),
            "line": None if waiting is None else _user_line(),
            "last": last,
            "waits_for": waits_for,
            "late": None if overdue is None or time.monotonic() - overdue[2] < self.limit_s else str(overdue[0]),
            "is_blocked": waiting is not None,  # otherwise the host may continue
            "issued": _published(list(history), None if overdue is None else overdue[0]),
            "newest": dict(newest),
            "peers": peers,
            # Only stalled waits are answered, because ``leave_wait`` reads the verdict only after a stall.
            "messages": [list(message) for message in waiting[0].messages] if waiting and _is_stalled(waiting) else [],
        }
        self._store.set(f"rank-{self._rank}", json.dumps(status))

    def _torch_collective(self) -> str | None:
        """Name of the torch.distributed collective in which the main thread has been for ``STALL_S``, or ``None``."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        found = None
        while frame is not None:
            if (
                frame.f_globals.get("__name__") == dist.distributed_c10d.__name__
                and "group" in frame.f_code.co_varnames
            ):
                found = frame
            frame = frame.f_back
        if found is None or found.f_locals.get("group") not in {None, dist.group.WORLD}:
            self._torch_wait = None
            return None
        now = time.monotonic()
        if self._torch_wait is None or self._torch_wait[0] != id(found):
            self._torch_wait = (id(found), found.f_code.co_name, now)
        return self._torch_wait[1] if now - self._torch_wait[2] >= STALL_S else None

    def _status_of(self, rank: int) -> dict[str, Any] | None:
        key = f"rank-{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _read_verdict(self) -> None:
        if self.verdict is None and self._store.check(["verdict"]):
            kind, text = json.loads(self._store.get("verdict"))
            self.verdict = (CommTimeout if kind == CommTimeout.__name__ else RankDisagreement)(text)

    def _may_compare(self, now: float) -> bool:
        """Whether this rank compares: the first rank that stalls does, or another one once the first continues."""
        claim, since = self._claim
        own = f"{self._rank} {now}"
        is_free = now - since >= 2 * INTERVAL_S
        current = (self._store.compare_set("compares", claim, own) if is_free else self._store.get("compares")).decode()
        if current == own:
            self._claim = own, -math.inf
        elif current != claim:
            self._claim = current, now
        return current == own

    def _compare(self) -> None:
        """Look for a verdict in the published statuses, and write for each rank which messages to answer."""
        statuses = {rank: status for rank in range(self._size) if (status := self._status_of(rank))}
        if self.verdict is None:
            self._find_verdict(statuses)
        if self.verdict is None:
            return
        requests: dict[int, list[Any]] = {}
        for rank, status in statuses.items():
            for direction, peer, tag, num_bytes in status["messages"]:
                requests.setdefault(peer, []).append([rank, status["waits_for"], direction, tag, num_bytes])
        for peer, messages in requests.items():
            self._store.set(f"asked-{peer}", json.dumps(messages))

    def _find_verdict(self, statuses: Mapping[int, dict[str, Any]]) -> None:
        """Set a verdict, if the statuses prove one."""
        late = next((status["late"] for status in statuses.values() if status["late"]), None)
        is_late = late is not None
        blocked = {rank: status for rank, status in statuses.items() if is_late or status["is_blocked"]}
        text, advice = _find_conflict(statuses) or _find_deadlock(blocked), _OTHER_PATHS
        if text is None:
            text, advice = _find_absence(blocked, statuses), _FEWER_BATCHES
        if text is not None:
            self._set_verdict(RankDisagreement(f"{text}\n  {advice}"))
        elif is_late:
            self._set_verdict(
                CommTimeout(
                    f"{late}: the device has waited for its peers for {self.limit_s:g} s. Where the ranks"
                    f" are:\n{self.describe()}\n"
                    "  Look at the rank that is elsewhere: its log, and whether its process still runs."
                )
            )

    def _set_verdict(self, verdict: CommError) -> None:
        self._store.set("verdict", json.dumps([type(verdict).__name__, str(verdict)]))
        self.verdict = verdict

    def publish_verdict(self, verdict: CommError) -> None:
        """Publish an error of this rank as the verdict. Other ranks read it when they wait, or are asked to publish."""
        with contextlib.suppress(Exception):
            self._is_raised = True
            self._set_verdict(verdict)
            self._store.set("ask", f"{self._rank} {verdict}")

    def _answer(self) -> None:
        """Complete open messages of the peers with dummy messages, so that their main threads wake up."""
        group = self._group()
        if group is None:
            return
        key = f"asked-{self._rank}"
        mine = [_to_list(stamp) for stamp in list(history)]
        for rank, waits_for, direction, tag, num_bytes in (
            json.loads(self._store.get(key)) if self._store.check([key]) else ()
        ):
            if waits_for in mine or (rank, direction, tag) in self._answered:
                continue
            self._answered.add((rank, direction, tag))
            dummy = torch.zeros(num_bytes, dtype=torch.uint8)
            call = group.send if direction == "receive" else group.recv
            self._kept_alive.append((dummy, call([dummy], rank, tag)))


def current_wait() -> tuple[str, bool]:
    """Describe the present or last collective of this process; and whether the host or the device waits in it."""
    text, is_waiting = last_collective(), waiting is not None
    for watch in list(StallWatch._by_group.values()):
        overdue = watch.overdue_text()
        if overdue is not None:
            text, is_waiting = overdue, True
    return text, is_waiting


def is_any_stuck() -> bool:
    """Whether a device of this process is stuck (:attr:`StallWatch.is_stuck`)."""
    return any(watch.is_stuck for watch in list(StallWatch._by_group.values()))


keep_group_while(is_any_stuck)  # destroying the group would wait for the device


def _end_at_exit(watch_ref: weakref.ref[StallWatch]) -> None:
    watch = watch_ref()
    if watch is not None:
        watch.end()
        if watch.is_stuck and watch.verdict is not None:  # a normal exit would wait for the device
            _flush()
            os._exit(watch.verdict.exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _published(history: Sequence[Stamp], overdue: Stamp | None) -> list[list[Any]]:
    """Return the newest collectives as rows, and those around the overdue one, because the host may be far ahead."""
    shown = list(history[-_MAX_PUBLISHED:])
    if overdue is not None:
        index = next((index for index, stamp in enumerate(history) if stamp is overdue), 0)
        around = history[max(0, index - _MAX_PUBLISHED // 2) : index + _MAX_PUBLISHED // 2]
        shown = list({id(stamp): stamp for stamp in [*around, *shown]}.values())
    return [_to_list(stamp) for stamp in shown]


def _is_stalled(waiting: tuple[PendingWait, float]) -> bool:
    return time.monotonic() - waiting[1] >= STALL_S


def _to_list(stamp: Stamp) -> list[Any]:
    """Return a collective as a JSON list."""
    return [stamp.channel, stamp.sequence, stamp.kind, stamp.unit, stamp.numel, dtype_name(stamp.dtype)]


def _describe(kind: str, unit: str, numel: int, dtype: str) -> str:
    return f"{kind} of unit {unit!r} ({numel} elements) in {dtype}"


def _at_line(status: Mapping[str, Any]) -> str:
    """Describe the line of the user's program where a rank waits; empty if there is none."""
    return f", at {status['line']}" if status["line"] else ""


#: Folders whose code is not the user's: those of this package and of torch.
_NOT_THE_USERS = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep, "<frozen")


def _user_line() -> str | None:
    """Return the innermost line of the main thread outside this package and torch: ``train.py:31``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_USERS):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _find_conflict(statuses: Mapping[int, dict[str, Any]]) -> str | None:
    """Describe different collectives that ranks issued at the same place of one Comm's sequence; ``None``: no such."""
    stamp: dict[tuple[str, int], dict[int, tuple[str, str, int, str]]] = {}
    for rank, status in statuses.items():
        for channel, sequence, *what in status["issued"]:
            stamp.setdefault((channel, sequence), {})[rank] = tuple(what)
    for (channel, sequence), by_rank in sorted(stamp.items(), key=lambda item: item[0][1]):
        if len(set(by_rank.values())) > 1:
            shown = "\n".join(
                f"  rank {rank}: {_describe(*what)}{_at_line(statuses[rank])}" for rank, what in sorted(by_rank.items())
            )
            return f"ranks issued different collectives at #{sequence} of {channel}:\n{shown}"
    return None


def _find_deadlock(statuses: Mapping[int, dict[str, Any]]) -> str | None:
    """Describe a ring of ranks, each waiting in a collective that the next has not issued; ``None``: no such.

    The statuses may be of different times and prove it nevertheless: no rank of the ring can have continued since.
    """
    needs = {
        rank: [peer for peer in status["peers"] if peer in statuses and _lacks(statuses[peer], status["waits_for"])]
        for rank, status in statuses.items()
    }
    ring = _ring(needs)
    if ring is None:
        return None
    shown = "\n".join(
        f"  rank {rank}: {_describe(*what)}, #{sequence} of {channel}{_at_line(statuses[rank])}"
        for rank, (channel, sequence, *what) in ((rank, statuses[rank]["waits_for"]) for rank in ring)
    )
    return f"ranks wait for each other in different collectives:\n{shown}"


def _find_absence(blocked: Mapping[int, dict[str, Any]], statuses: Mapping[int, dict[str, Any]]) -> str | None:
    """Describe a rank that waits for a peer inside a torch.distributed collective of all ranks; ``None``: no such."""
    for rank, status in blocked.items():
        for peer in status["peers"]:
            other = statuses.get(peer)
            if other is None or other["elsewhere"] is None or _has_issued(other, status["waits_for"]):
                continue
            return (
                f"rank {peer} waits in torch.distributed's {other['elsewhere']}, while rank {rank} waits for it in"
                f" {_describe(*status['waits_for'][2:])}{_at_line(status)}."
            )
    return None


def _has_issued(status: Mapping[str, Any], wanted: Sequence[Any]) -> bool:
    """Whether a rank has issued ``wanted``."""
    return status["newest"].get(wanted[0], -1) >= wanted[1]


def _ring(needs: Mapping[int, Sequence[int]]) -> list[int] | None:
    """Return the ranks of a cycle in ``needs``, in ascending order; ``None`` if there is none."""
    for start in needs:
        paths, seen = [[start]], {start}
        for path in paths:  # breadth first: the list grows during the loop
            for peer in needs.get(path[-1], ()):
                if peer == start:
                    return sorted(path)
                if peer not in seen:
                    seen.add(peer)
                    paths.append([*path, peer])
    return None


def _lacks(status: Mapping[str, Any], wanted: Sequence[Any] | None) -> bool:
    """Whether a rank has certainly not issued ``wanted``."""
    if wanted is None or status["waits_for"] is None:
        return False
    return not _has_issued(status, wanted)
