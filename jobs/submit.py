"""Submit a job to a Ray cluster, once or again and again.

    python -m jobs.submit recalibrate --every 1h -- --log /mnt/log --out /mnt/reports

What follows `--` goes to the job. With --every, time is cut into windows of that length, and each
window has a submission id of its own: however many machines run this command, the cluster takes
each window's job once. The id comes from the wall clock; a clock that is set back submits nothing
twice. A cluster that does not answer is asked again.

The cluster needs this package in its image, or --working-dir with a checkout to send along.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

JOBS = ("recalibrate",)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LOOK_AGAIN_S = 30.0
"""Longest sleep: a clock that was set, or a cluster that is back, is noticed after so long."""


class Client(Protocol):
    """What is needed of Ray's JobSubmissionClient; all methods raise RuntimeError."""

    def submit_job(
        self,
        *,
        entrypoint: str,
        submission_id: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        metadata: dict[str, str] | None = None,
        entrypoint_num_cpus: float | None = None,
    ) -> str: ...

    def get_job_status(self, job_id: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One job and how often it is due."""

    name: str
    arguments: tuple[str, ...]
    every_s: int | None = None
    num_cpus: float = 1
    """For the driver; a job without any would be put onto the head node."""
    working_dir: str | None = None

    def submission_id(self, window: int) -> str:
        """Equal for equal jobs, here and on any other machine."""
        content = shlex.join([self.name, *self.arguments, str(self.every_s)])
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        return f"valuspec-{self.name}-{digest}-{window}"

    def submit(self, client: Client, window: int | None = None) -> str | None:
        """The submission id; None if the window's job was submitted before. Raises RuntimeError."""
        id_ = None if window is None else self.submission_id(window)
        if id_ is not None and _known(client, id_):
            return None
        metadata = {"job": f"jobs.{self.name}"}
        if window is not None and self.every_s is not None:
            metadata["window"] = time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(window * self.every_s)
            )
        try:
            return client.submit_job(
                entrypoint=shlex.join(["python", "-m", f"jobs.{self.name}", *self.arguments]),
                submission_id=id_,
                runtime_env={"working_dir": self.working_dir} if self.working_dir else None,
                metadata=metadata,
                entrypoint_num_cpus=self.num_cpus,
            )
        except RuntimeError:
            if id_ is not None and _known(client, id_):  # somebody else was faster
                return None
            raise


def _known(client: Client, submission_id: str) -> bool:
    try:
        client.get_job_status(submission_id)
    except RuntimeError as error:
        if "404" in str(error) or "does not exist" in str(error):
            return False
        raise
    return True


def submit_for_ever(
    job: Job,
    connect: Callable[[], Client],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Submit each window's job when the window begins; the current one at once."""
    assert job.every_s is not None
    done = None
    while True:
        window = int(clock() // job.every_s)
        if window != done:
            try:
                _report(job.submit(connect(), window), job.submission_id(window))
                done = window
            except (RuntimeError, ConnectionError) as error:
                print(f"jobs.submit: not submitted, trying again: {error}", file=sys.stderr)
        sleep(min(LOOK_AGAIN_S, max(1.0, (window + 1) * job.every_s - clock())))


def duration(text: str) -> int:
    """Seconds of "90s", "30m", "1h" or "1d". Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)([smhd])", text)
    if not match:
        raise ValueError(f"{text!r} is no duration; like 90s, 30m, 1h or 1d")
    return int(match[1]) * UNITS[match[2]]


def _report(submitted: str | None, id_: str) -> None:
    print(f"submitted {submitted}" if submitted else f"{id_} was submitted before", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Submit and return the exit code; with --every, only a signal ends it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own_end = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:own_end])
    for_job = arguments[own_end + 1 :]
    job = Job(options.job, tuple(for_job), options.every, options.cpus, options.working_dir)

    def connect() -> Client:
        from ray.job_submission import JobSubmissionClient

        client: Client = JobSubmissionClient(options.address)
        return client

    try:
        if options.every and not options.once:
            submit_for_ever(job, connect)
        window = int(time.time() // options.every) if options.every else None
        id_ = job.submit(connect(), window)
        _report(id_, "" if window is None else job.submission_id(window))
        return 0
    except KeyboardInterrupt:
        return 0
    except (RuntimeError, ConnectionError) as error:
        print(f"jobs.submit: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jobs.submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--every", type=duration, help="go on, with a job per window: 30m, 1h, 1d")
    parser.add_argument(
        "--once", action="store_true", help="with --every: only the current window's job (for cron)"
    )
    parser.add_argument(
        "--address", help="the cluster's dashboard (RAY_API_SERVER_ADDRESS, http://127.0.0.1:8265)"
    )
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of the driver (%(default)s)")
    parser.add_argument("--working-dir", help="checkout to run on the cluster (its own package)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
