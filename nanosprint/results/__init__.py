"""Runs on the disk: their directory, metrics, records and pictures. Needs neither torch nor numpy to be imported."""

from nanosprint.results.metrics import (
    TornLine,
    effective_lines,
    encode_line,
    metrics_sha256,
    read_metrics,
    repair_tail,
    series,
)
from nanosprint.results.plots import plot_runs
from nanosprint.results.record import DataRecord, Mfu, RunRecord, ShardFile, check_metrics
from nanosprint.results.runs import RunDir, Series, claim_run_dir, new_run_dir

__all__ = [
    "DataRecord",
    "Mfu",
    "RunDir",
    "RunRecord",
    "Series",
    "ShardFile",
    "TornLine",
    "check_metrics",
    "claim_run_dir",
    "effective_lines",
    "encode_line",
    "metrics_sha256",
    "new_run_dir",
    "plot_runs",
    "read_metrics",
    "repair_tail",
    "series",
]
