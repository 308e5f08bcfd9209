"""Section B: saves that are interrupted, refused by the disk, or of what must not be saved."""

from __future__ import annotations

from shardwise.launch import fault
from tests.reliability.board import scenario
from tests.reliability.box import Box, Seen

#: Every point of a save, with the ranks that come by.
POINTS = fault.POINTS[fault.POINTS.index("save_begin") : fault.POINTS.index("after_latest") + 1]
OF_ALL_RANKS = ("save_begin", "before_shard_open", "mid_shard_write", "after_shard_fsync")
KILLS = [(point, rank) for point in POINTS for rank in ((0, 1) if point in OF_ALL_RANKS else (0,))]
#: After these the checkpoint is there.
PUBLISHED = ("after_rename", "before_latest", "after_latest")


@scenario(
    "B1",
    fault="SIGKILL at each point of a save, on each rank that comes by",
    required="goes on from the checkpoint before or from this one, never from a mix; what is unfinished is removed",
    code=0,
    limit_s=900,
)
def killed_while_saving(box: Box) -> Seen:
    # One attempt a point: each but the last is killed while it saves, and what restarts finds what that left.
    steps, step, wanted = [], 10, []
    for point, _ in KILLS:
        steps.append(step)
        wanted.append(step if point in PUBLISHED else step - 5)
        step += 5 if point in PUBLISHED else 0
    armed = [
        f"{point}@rank={rank}@step={at}@attempt={attempt}:kill"
        for attempt, ((point, rank), at) in enumerate(zip(KILLS, steps, strict=True))
    ]
    ended = box.train("--max-restarts", str(len(KILLS)), "--set", "train.steps=30", fault=";".join(armed), limit_s=900)
    box.check("one restart a kill", ended.output.count("shardwise: restart") == len(KILLS))
    for (point, rank), saved in zip(KILLS, wanted, strict=True):
        box.says(ended, rf"restart \d+/{len(KILLS)} from step {saved}$")
        del point, rank
    box.equals(box.oracle("train.steps=30"), step=30)
    return Seen(f"{len(KILLS)} kills, {len(KILLS)} restarts, each from step N or N-1; equal bit for bit", ended.code)
