"""Names of the files and subfolders of a run's folder."""

from __future__ import annotations

CONFIG, PLAN, METRICS, SUMMARY, MODEL = "config.yaml", "plan.json", "metrics.jsonl", "summary.json", "model.txt"
ENVIRONMENT, MEMORY, PREDICTED, REPORT = "environment.json", "memory.json", "predicted.json", "report.html"
PROFILE, ODD_STEPS, RUN_ID, SAMPLES = "profile", "odd-steps", "run-id", "samples.jsonl"
LOGS, CHECKPOINTS, EVENTS = "logs", "checkpoints", "events"
#: The subfolder with the checkpoints of the best evaluations.
BEST = "best"
