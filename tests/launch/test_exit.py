from __future__ import annotations

import errno
import io
import os
import signal
from pathlib import Path
from unittest import mock

import pytest

from shardwise.launch import exit_codes
from shardwise.launch.exit_codes import (
    ExitNote,
    clear_exit_notes,
    note_exit,
    read_exit_notes,
    reserve_exit_note,
    run_worker,
)
from shardwise.launch.root_cause import describe, find_root_cause
from shardwise.launch.worker import _lossy, _Tee

SAVED = "stop requested, saved step 14, continue with --resume"
CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"


def note(rank, code, reason="", time_s=1.0, **fields):
    return ExitNote(code, rank, reason=reason, time_s=time_s, **fields)


def test_a_note_is_written_once_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SHARDWISE_ATTEMPT", "run-0")
    note_exit(65, "of the attempt before", step=6)
    monkeypatch.setenv("SHARDWISE_ATTEMPT", "run-1")
    assert read_exit_notes(tmp_path, "run-1") == {}
    note_exit(80, "the loss is not a number", step=7)
    note_exit(1, "something later")
    (tmp_path / "exit-4.json").write_text("{")
    notes = read_exit_notes(tmp_path, "run-1")
    assert read_exit_notes(tmp_path, "run-0") == {}
    assert list(notes) == [3]
    assert (notes[3].code, notes[3].reason, notes[3].step) == (80, "the loss is not a number", 7)
    clear_exit_notes(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_takes_a_note_for_which_room_was_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    reserve_exit_note(tmp_path, 1)
    refuse = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(exit_codes, "replace", refuse)
    note_exit(74, "\N{SNOWMAN}" * 5000, step=7)
    found = read_exit_notes(tmp_path)[1]
    assert (found.code, found.step, found.reason) == (74, 7, "\N{SNOWMAN}" * 600)
    assert [path.name for path in tmp_path.iterdir()] == ["exit-1.json"]
    assert (tmp_path / "exit-1.json").stat().st_size == 4096  # no more than was there


def test_a_log_on_a_full_disk_is_left_out():
    log = _lossy("/dev/full")
    with pytest.raises(OSError, match="No space"), Path("/dev/full").open("a") as file:
        file.write("step 1\n")
    print("step 1", file=log)
    log.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_a_disk_refuses_has_one_message_and_a_code_wherever_it_was(number):
    printed = []

    def write():
        raise OSError(number, os.strerror(number), "/run/file")

    assert run_worker(write, mock.Mock(rank=0), printed.append) == 74
    assert [str(error) for error in printed] == [
        f"/run/file: {os.strerror(number)}.\n  See to the disk and the permissions."
    ]


def test_other_errors_of_the_system_are_no_refusals_of_a_disk():
    with pytest.raises(FileNotFoundError):
        run_worker(lambda: Path("/nowhere").stat().st_size, mock.Mock(rank=0), print)


def test_without_a_launcher_no_note_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("SHARDWISE_LOG_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    note_exit(80, "nobody reads this")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("notes", "failures", "cause"),
    [
        (  # the first exception; lost peers are its victims
            [note(0, 1, CLOSED, 1.0), note(1, 1, "ValueError: x", 2.0), note(2, 81, "peer gone", 0.5)],
            {0: (1, 2.0), 1: (1, 2.0), 2: (81, 2.0)},
            {"code": 1, "rank": 1, "victims": (0, 2)},
        ),
        (  # a kill, even where peers noticed first
            [note(0, 1, "OSError: odd", 1.0)],
            {0: (1, 2.0), 1: (-signal.SIGKILL, 2.0)},
            {"code": 137, "rank": 1, "signal_number": 9},
        ),
        ([note(1, 83, "ranks disagree", 1.5)], {0: (-signal.SIGTERM, 1.0), 1: (83, 2.0)}, {"rank": 1}),
        ([note(1, 1, "ValueError: x", 2.5)], {0: (-signal.SIGABRT, 3.0), 1: (1, 3.0)}, {"rank": 1}),
        ([note(0, 0, "finished")], {0: (-signal.SIGSEGV, 1.0)}, {"code": 128 + signal.SIGSEGV}),
        # what rank 0 has said is not said again for another rank
        ([note(0, 78, time_s=2.0, is_shown=True), note(1, 78, time_s=1.0)], {1: (78, 2.0)}, {"is_shown": True}),
    ],
)
def test_the_cause_is_the_rank_that_failed_first_by_itself(notes, failures, cause):
    found = find_root_cause({n.rank: n for n in notes}, failures, None)
    assert {name: getattr(found, name) for name in cause} == cause


@pytest.mark.parametrize(
    ("notes", "code"),
    [
        ([], 143),
        ([note(0, 0), note(1, 0)], 0),
        ([note(0, 75), note(1, 75)], 75),
        ([note(0, 75), note(1, 74, "no space left")], 74),
        ([note(0, 143), note(1, 81, CLOSED)], 143),
        ([note(0, 130, "interrupted"), note(1, 130, "interrupted")], 143),  # programs that catch nothing
        ([note(0, 130, SAVED, is_shown=True), note(1, 130, SAVED, is_shown=True)], 130),
        ([note(0, 130, SAVED, is_shown=True), note(1, 74, "no space left")], 74),
    ],
)
def test_a_requested_stop_gives_what_the_workers_made_of_it(notes, code, tmp_path):
    cause = find_root_cause({n.rank: n for n in notes}, {}, signal.SIGTERM)
    assert cause.code == code
    assert ("did not save" in describe(cause, tmp_path)) == (code == 143)
    assert cause.is_shown == (code == 130)  # nothing is said behind "saved step 14"


def test_what_a_rank_raises_cannot_move_the_cursor(tmp_path):
    cause = find_root_cause({0: note(0, 1, "ValueError: \x1b[2Jgone\r\u202e", 1.0)}, {0: (1, 2.0)}, None)
    assert r"ValueError: \x1b[2Jgone\r\u202e" in describe(cause, tmp_path)


@pytest.mark.parametrize(
    ("code", "can_restart"), [(1, True), (81, True), (82, True), (75, False), (78, False), (0, False)]
)
def test_only_what_a_new_start_can_help_is_restarted(code, can_restart):
    assert find_root_cause({0: note(0, code)}, {}, None).can_restart is can_restart


def test_the_log_of_rank_0_has_no_colours_and_no_overwritten_lines():
    terminal, log = io.StringIO(), io.StringIO()
    tee = _Tee(terminal, log)
    for text in ("\x1b[1mstep 1\x1b[0m\n", "\r 10%", "\r 20%", "\r\x1b[2K", "done\nhalf", " a line"):
        tee.write(text)
    tee.finish()
    assert log.getvalue() == "step 1\ndone\nhalf a line\n"
    assert terminal.getvalue().startswith("\x1b[1mstep 1")
    assert not tee.isatty()


def test_a_rank_that_died_at_its_start_leaves_the_checkpoint_of_an_earlier_attempt_safe(tmp_path):
    cause, logs = find_root_cause({0: note(0, 1, "ImportError: x", 1.0)}, {0: (1, 2.0)}, None), tmp_path / "logs"
    assert "safe: nothing has been saved" in describe(cause, logs, advice="go on")
    for name in ("step-00000010", "step-00000020", "step-00000030.tmp-1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    (tmp_path / "checkpoints" / "step-00000040").mkdir()
    assert "safe: the checkpoint of step 20, " in describe(cause, logs, advice="go on")
