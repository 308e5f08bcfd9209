"""Tools for tests of distributed code, and checks of a user's model: ``sw.parity``, ``--check-streams``."""

from shardwise.measure.storage import StorageCount
from shardwise.testing.locate import Location, NoDifference
from shardwise.testing.oracle import (
    Comparison,
    Mean,
    Waiting,
    compare_each_with_one_process,
    compare_with_one_process,
    gradient_sync,
    same_bits,
    train_step,
)
from shardwise.testing.parity import ParityReport, ParityRow
from shardwise.testing.probe import Probe, Shard, UnitView, checks, optimizer_state, part_of, probe
from shardwise.testing.ranks import RankFailure, run_on_ranks
from shardwise.testing.settings import forget_declaration, forget_notices, report_stalls_after

__all__ = [
    "Comparison",
    "Location",
    "Mean",
    "NoDifference",
    "ParityReport",
    "ParityRow",
    "Probe",
    "RankFailure",
    "Shard",
    "StorageCount",
    "UnitView",
    "Waiting",
    "checks",
    "compare_each_with_one_process",
    "compare_with_one_process",
    "forget_declaration",
    "forget_notices",
    "gradient_sync",
    "optimizer_state",
    "part_of",
    "probe",
    "report_stalls_after",
    "run_on_ranks",
    "same_bits",
    "train_step",
]
