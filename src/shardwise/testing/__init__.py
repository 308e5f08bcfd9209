"""Tools for tests of distributed code. Nothing else in shardwise imports this package."""

from shardwise.testing.probe import Probe, Shard, UnitView, checks, optimizer_state, probe
from shardwise.testing.ranks import RankFailure, run_on_ranks

__all__ = ["Probe", "RankFailure", "Shard", "UnitView", "checks", "optimizer_state", "probe", "run_on_ranks"]
