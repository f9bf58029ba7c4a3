"""Submitting jobs by windows of time, with a cluster and a clock of our own."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.submit import Job, duration, main, submit_for_ever

HOURLY = Job("recalibrate", ("--log", "/mnt/my log"), 3600)


class Cluster:
    """Ray's job API: refuses a submission id it has seen; may be down."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.down = False

    def submit_job(self, **job: Any) -> str:
        self._answer()
        id_ = job["submission_id"] or f"raysubmit_{len(self.jobs)}"
        if id_ in self.jobs:
            raise RuntimeError(f"Request failed with status code 400: {id_} already exists")
        self.jobs[id_] = job
        return id_

    def get_job_status(self, job_id: str) -> Any:
        self._answer()
        if job_id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: {job_id} does not exist.")
        return "RUNNING"

    def _answer(self) -> None:
        if self.down:
            raise RuntimeError("Request failed with status code 503: unavailable")


class EndOfTimesError(Exception):
    """Ends the endless loop."""


def run(cluster: Cluster, times: list[float], events: dict[int, Any] | None = None) -> list[float]:
    """Let the loop see the given times, one a turn; returns what it slept."""
    turn = -1
    slept: list[float] = []

    def clock() -> float:
        return times[turn]

    def sleep(seconds: float) -> None:
        nonlocal turn
        if turn >= 0:
            slept.append(seconds)
        turn += 1
        if turn == len(times):
            raise EndOfTimesError
        if events and turn in events:
            cluster.down = events[turn]

    sleep(0)
    with pytest.raises(EndOfTimesError):
        submit_for_ever(HOURLY, lambda: cluster, clock=clock, sleep=sleep)
    return slept


def test_one_job_a_window() -> None:
    cluster = Cluster()
    run(cluster, [7200.0, 7230.0, 10799.0, 10800.0, 10830.0])
    assert list(cluster.jobs) == [HOURLY.submission_id(2), HOURLY.submission_id(3)]
    job = cluster.jobs[HOURLY.submission_id(2)]
    assert job["entrypoint"] == "python -m jobs.recalibrate --log '/mnt/my log'"
    assert job["metadata"] == {"job": "jobs.recalibrate", "window": "1970-01-01T02:00:00Z"}
    assert job["entrypoint_num_cpus"] == 1


def test_two_schedulers_submit_a_window_once() -> None:
    cluster = Cluster()
    assert HOURLY.submit(cluster, 5) == HOURLY.submission_id(5)
    assert HOURLY.submit(cluster, 5) is None
    assert len(cluster.jobs) == 1


def test_losing_the_race_is_no_error() -> None:
    cluster = Cluster()

    class Late(Cluster):
        """Sees the other's job only after its own was refused."""

        asked = 0

        def get_job_status(self, job_id: str) -> Any:
            self.asked += 1
            if self.asked == 1:
                raise RuntimeError("404")
            return cluster.get_job_status(job_id)

    HOURLY.submit(cluster, 5)
    late = Late()
    late.jobs = cluster.jobs
    assert HOURLY.submit(late, 5) is None


def test_jobs_that_differ_have_ids_that_differ() -> None:
    others = [
        Job("recalibrate", (), 3600),
        Job("recalibrate", ("--log", "/mnt/my", "log"), 3600),
        Job("recalibrate", HOURLY.arguments, 1800),
    ]
    assert len({job.submission_id(5) for job in [HOURLY, *others]}) == 4


def test_a_clock_set_back_submits_nothing_twice() -> None:
    cluster = Cluster()
    slept = run(cluster, [7200.0, 3700.0, 7300.0, 10800.0])
    assert sorted(cluster.jobs) == [HOURLY.submission_id(n) for n in (1, 2, 3)]
    assert all(0 < seconds <= 30 for seconds in slept)


def test_a_cluster_that_is_down_is_asked_again(capsys) -> None:
    cluster = Cluster()
    cluster.down = True
    run(cluster, [7200.0, 7230.0, 7260.0], {2: False})
    assert list(cluster.jobs) == [HOURLY.submission_id(2)]
    assert capsys.readouterr().err.count("trying again") == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h", 3600), ("2d", 172800)]
)
def test_durations(text: str, seconds: int) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "0h", "-1h", "1.5h", "1 h", "1w", "3600"])
def test_what_is_no_duration_is_refused(text: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["recalibrate", f"--every={text}"])
    assert end.value.code == 2


def test_what_follows_the_dashes_goes_to_the_job(monkeypatch, capsys) -> None:
    cluster = Cluster()
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: cluster)
    assert main(["recalibrate", "--cpus", "2", "--", "--dry-run", "--every", "x"]) == 0
    (job,) = cluster.jobs.values()
    assert job["entrypoint"] == "python -m jobs.recalibrate --dry-run --every x"
    assert job["submission_id"] is None
    assert job["entrypoint_num_cpus"] == 2
    assert "submitted raysubmit_0" in capsys.readouterr().out
    assert main(["recalibrate", "--every", "1h", "--once"]) == 0
    assert main(["recalibrate", "--every", "1h", "--once"]) == 0
    assert len(cluster.jobs) == 2
    assert "was submitted before" in capsys.readouterr().out
    cluster.down = True
    assert main(["recalibrate", "--every", "1h", "--once"]) == 1
