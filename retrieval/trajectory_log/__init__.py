"""The log of greedy trajectories: what recalibration learns from. See docs/log.md."""

from retrieval.trajectory_log.deletion import Deletion, delete_namespace
from retrieval.trajectory_log.files import log_files
from retrieval.trajectory_log.reader import LogRead, read_log
from retrieval.trajectory_log.schema import LoggedTrajectory
from retrieval.trajectory_log.writer import LogLimits, TrajectoryLog

__all__ = [
    "Deletion",
    "LogLimits",
    "LogRead",
    "LoggedTrajectory",
    "TrajectoryLog",
    "delete_namespace",
    "log_files",
    "read_log",
]
