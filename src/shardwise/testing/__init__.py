"""Tools for tests of distributed code. Nothing else in shardwise imports this package."""

from shardwise.testing.ranks import RankFailure, run_on_ranks

__all__ = ["RankFailure", "run_on_ranks"]
