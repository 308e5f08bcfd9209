"""Section A: processes that are killed, stopped, slow, or asked to end."""

from __future__ import annotations

from tests.reliability.board import scenario
from tests.reliability.box import Box, Ended, Seen


def check_restarted(box: Box, ended: Ended, rank: int) -> Seen:
    """A rank was killed in step 12, and the run went on once from step 10 and ended well."""
    box.says(ended, rf"rank {rank} \(pid \d+\) killed by SIGKILL at step 12", "restart 1/3 from step 10$")
    box.check("one restart is used", ended.output.count("shardwise: restart") == 1)
    box.check("at most one interval is lost", "resumed at step 10\n" in ended.output)
    box.equals(box.oracle())
    return Seen(f"{ended.line('killed by')}; {ended.line('restart 1')}", ended.code)


@scenario(
    "A1",
    fault="SIGKILL of a non-zero rank in a step, restarts left",
    required="names rank, pid, signal, step and the restart; at most one interval lost, one restart for one fault",
    code=0,
)
def killed(box: Box) -> Seen:
    return check_restarted(box, box.train("--max-restarts", "3", fault="before_backward@rank=1@step=12:kill"), 1)


@scenario(
    "A2",
    fault="SIGKILL of rank 0",
    required="as A1",
    code=0,
)
def killed_first(box: Box) -> Seen:
    return check_restarted(box, box.train("--max-restarts", "3", fault="before_backward@rank=0@step=12:kill"), 0)
