"""Tools for tests of distributed code. Nothing else in shardwise imports this package."""

from shardwise.testing.oracle import Comparison, Mean, Waiting, compare_with_one_process, same_bits, train_step
from shardwise.testing.probe import Probe, Shard, UnitView, checks, optimizer_state, probe
from shardwise.testing.ranks import RankFailure, run_on_ranks

__all__ = [
    "Comparison",
    "Mean",
    "Probe",
    "RankFailure",
    "Shard",
    "UnitView",
    "Waiting",
    "checks",
    "compare_with_one_process",
    "optimizer_state",
    "probe",
    "run_on_ranks",
    "same_bits",
    "train_step",
]
