"""The log of greedy trajectories: what recalibration learns from. See docs/log.md."""

from retrieval.trajectory_log.reader import LogRead, log_files, read_log
from retrieval.trajectory_log.schema import LoggedTrajectory

__all__ = ["LogRead", "LoggedTrajectory", "log_files", "read_log"]
