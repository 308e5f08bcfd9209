"""Reports of runs and plans, each one HTML file that needs no network."""

from shardwise.report.plan_page import plan_report
from shardwise.report.run import Run, read_run
from shardwise.report.run_page import compare_page, run_page

__all__ = ["Run", "compare_page", "plan_report", "read_run", "run_page"]
