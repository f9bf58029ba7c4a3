"""The recalibration job on a real Ray: submitted by its command, run by the cluster, once."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from bench.ports import free_port
from jobs import submit
from retrieval.embedded import EmbeddedValkey
from retrieval.threshold_store import Pointer, ThresholdStore
from tests.support.answer_logs import write_log
from tests.support.publishing import publish
from tests.support.trajectories import markov_answers
from valuspec.thresholds import ThresholdSet

pytestmark = pytest.mark.ray

MODEL = "model"  # as in the rows of the log
REPOSITORY = Path(__file__).parents[2]
#: A hung job is stuck; a busy machine is slow.
TIMEOUT_S = 240.0


@pytest.fixture
def cluster(monkeypatch) -> Iterator[str]:
    """Address of the dashboard of a Ray on this machine, whose jobs use this interpreter."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    port = free_port()
    ray.init(
        "local", num_cpus=2, include_dashboard=True, dashboard_port=port, log_to_driver=False
    )  # fmt: skip
    yield f"http://127.0.0.1:{port}"
    ray.shutdown()


def ended(client: JobSubmissionClient, submission_id: str) -> JobStatus:
    """Polls: the cluster tells nobody."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (status := client.get_job_status(submission_id)).is_terminal():
        assert time.monotonic() < deadline, client.get_job_logs(submission_id)
        time.sleep(0.2)
    return status


async def published(url: str, thresholds: ThresholdSet | None = None) -> Pointer | None:
    """Which set is in use, after publishing `thresholds`, if any."""
    store = ThresholdStore.at(url)
    try:
        if thresholds is not None:
            await publish(store, thresholds)
        return await store.pointer(MODEL)
    finally:
        await store.aclose()


def test_a_submitted_job_publishes_once_a_window(cluster: str, tmp_path: Path, capsys) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    write_log(log, markov_answers(80, 3, 30))
    shipped = ThresholdSet.starting(MODEL)
    plain = replace(shipped, buckets=tuple(replace(b, tau=1.0) for b in shipped.buckets))
    with EmbeddedValkey() as valkey:
        asyncio.run(published(valkey.url, plain))
        # A window that does not end while this runs.
        command = ["recalibrate", "--every", "1000d", "--once", "--address", cluster, "--"]
        command += ["--log", str(log), "--out", str(out), "--redis-url", valkey.url]
        assert submit.main(command) == 0
        submitted, _, id_ = capsys.readouterr().out.strip().partition(" ")
        assert submitted == "submitted"
        client = JobSubmissionClient(cluster)
        assert ended(client, id_) == JobStatus.SUCCEEDED, client.get_job_logs(id_)
        pointer = asyncio.run(published(valkey.url))
        assert pointer is not None
        assert (pointer.revision, pointer.previous) == (2, plain.version)
        report = json.loads((out / "report.json").read_text())
        assert report["outcome"] == "published"
        assert report["facts"]["new thresholds"] == pointer.version
        assert "published" in client.get_job_logs(id_)

        assert submit.main(command) == 0
        assert capsys.readouterr().out.strip() == f"{id_} was submitted before"
        assert [job.submission_id for job in client.list_jobs() if job.submission_id] == [id_]
