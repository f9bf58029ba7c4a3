"""Processes of the app that are killed, stopped or replaced while answers are under way."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
from ray import serve

from tests.faults.conftest import Oracles
from tests.faults.site import LONG, Site, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray]

GREEDY: dict[str, Any] = {}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}


def tell(site: Site, what: signal.Signals) -> int:
    """Signal the replica that is at work; returns its process id."""
    replica = site.busy_replica()
    replica.signal(what)
    return replica.pid


def gone(site: Site, pid: int) -> bool:
    return pid not in {process.pid for process in site.replicas()}


@pytest.mark.fault(18)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_replica_killed_in_mid_stream(site: Site, oracles: Oracles, sampling: Any) -> None:
    def kill() -> None:
        site.busy_replica().signal(signal.SIGKILL)
        oracles.figure("resumed in mid-stream")

    site.plain("once", max_tokens=LONG, **sampling)
    with oracles.beside(killed=1):
        site.check_long_stream("once", kill, **sampling)


@pytest.mark.fault(18)
def test_a_whole_answer_survives_its_replica(site: Site, oracles: Oracles) -> None:
    """Not streamed: the client sees one answer, two replicas made it."""
    whole = site.plain("twice", max_tokens=LONG)
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(site.ask("twice", max_tokens=LONG)["choices"][0])
    )
    asking.start()
    site.busy_replica().signal(signal.SIGKILL)
    asking.join(120)
    assert answers == [whole]
    wait_for("both replicas", site.ready)
    oracles.note("alive")


@pytest.mark.fault(23)
def test_a_stopped_replica_is_replaced_and_its_answer_goes_on(site: Site, oracles: Oracles) -> None:
    """Stopped, a process keeps its sockets: only the health check can tell."""
    site.plain("thrice", max_tokens=LONG)
    signalled: list[int] = []
    started = time.monotonic()
    with oracles.beside(killed=1):
        site.check_long_stream("thrice", lambda: signalled.append(tell(site, signal.SIGSTOP)))
        oracles.figure(f"its answer was whole {time.monotonic() - started:.0f} s after the stop")
        wait_for("its replacement", lambda: gone(site, signalled[0]), 200)


@pytest.mark.fault(19)
def test_a_replica_asked_to_end_does_not_cut_its_answer(site: Site, oracles: Oracles) -> None:
    site.plain("four", max_tokens=LONG)
    signalled: list[int] = []
    with oracles.beside(killed=1):
        site.check_long_stream("four", lambda: signalled.append(tell(site, signal.SIGTERM)))
        wait_for("its end", lambda: gone(site, signalled[0]))


@pytest.mark.fault(20)
def test_the_controller_is_not_needed_to_answer(site: Site, oracles: Oracles) -> None:
    def kill() -> None:
        (controller,) = site.processes("ray::ServeController")
        controller.signal(signal.SIGKILL)

    site.plain("five", max_tokens=LONG)
    with oracles.beside():
        site.check_long_stream("five", kill)


@pytest.mark.fault(20)
def test_a_killed_proxy_is_replaced(site: Site, oracles: Oracles) -> None:
    """Its connections are gone, and say so; a new one listens on the same port."""
    (proxy,) = site.processes("ray::ProxyActor")
    unknown_app = ("Path '/v1/completions' not found", "Route table is not populated")
    with oracles.beside(errors_allowed=True, not_ours=unknown_app):
        proxy.signal(signal.SIGKILL)
        seconds = wait_for("a new proxy", site.ready)
        assert site.ask("six")["choices"][0] == site.plain("six")
    oracles.figure(f"proxy back after {seconds:.1f} s")


@pytest.mark.fault(25)
def test_a_build_that_cannot_start_does_not_replace_the_one_that_runs(
    site: Site, oracles: Oracles
) -> None:
    with oracles.beside(killed=2):
        with pytest.raises(RuntimeError):
            site.deploy(model=str(site.folder / "no such model"))
        assert site.ask("seven")["choices"][0] == site.plain("seven")
        assert serve.status().applications["valuspec"].status == "DEPLOY_FAILED"
        site.deploy()


@pytest.mark.fault(19)
def test_a_rollout_lets_answers_end(site: Site, oracles: Oracles) -> None:
    """New replicas replace the old ones, which finish what they have begun."""
    site.plain("eight", max_tokens=LONG)
    rollout = threading.Thread(target=lambda: site.deploy(max_waiting=9))
    with oracles.beside(killed=2, patience_s=400):
        site.check_long_stream("eight", rollout.start)
        rollout.join()
    site.deploy()
