"""Nodes and the cluster's own parts are lost; and all of it at random, for as long as asked."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Oracles
from tests.faults.site import LONG, Bystander, Site, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray]

#: Minutes of random faults.
SOAK = float(os.environ.get("SOAK", "2"))


@pytest.mark.fault(18, 24)
def test_a_node_lost_in_mid_stream(site: Site, oracles: Oracles) -> None:
    prompt = site.prompt_of_worker()
    site.plain(prompt, max_tokens=LONG)
    with oracles.beside(killed=1, patience_s=300):
        site.check_long_stream(prompt, site.kill_worker)
        site.start_worker()
        seconds = wait_for("both replicas", site.ready, 300)
    oracles.figure(f"both replicas {seconds:.0f} s after the node was back")


@pytest.mark.fault(20, 21)
def test_the_clusters_control_service_restarts_in_mid_stream(site: Site, oracles: Oracles) -> None:
    """Its state lies in a Redis of its own, so it comes back knowing every node and actor."""
    head = site.cluster.head_node

    def restart() -> None:
        head.kill_gcs_server()
        assert site.ask("without it")["choices"][0] == site.plain("without it")
        head.start_gcs_server()

    site.plain("without it")
    site.plain("all along", max_tokens=LONG)
    with oracles.beside():
        site.check_long_stream("all along", restart)
        wait_for("both replicas", site.ready)


@pytest.mark.fault(27)
def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """`valuspec serve` says so and ends, instead of trying for ever."""
    command = [sys.executable, "-m", "deployments.cli", "serve"]
    missing = tmp_path / "no model here"
    environment = {k: v for k, v in os.environ.items() if k != "RAY_REDIS_ADDRESS"}
    done = subprocess.run(
        [*command, "--model", str(missing), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | {"VALUSPEC_CACHE": str(tmp_path)},
    )
    assert done.returncode not in (0, -signal.SIGKILL)
    assert "no model here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.fault(24, 52)
def test_random_faults_from_a_seed(site: Site, oracles: Oracles) -> None:
    """Load from four clients; every half a minute something is killed, or stopped for a while."""
    seed = int(os.environ.get("SEED", "0"))
    rng = random.Random(seed)

    def kill_replica() -> None:
        rng.choice(site.replicas()).signal(signal.SIGKILL)

    def kill_node() -> None:
        site.kill_worker()
        site.start_worker()

    def kill_light() -> None:
        deployment = rng.choice(["Retrieval", "Valuation"])
        for process in site.replicas(deployment):
            process.signal(signal.SIGKILL)

    def stop_replica() -> None:
        process = rng.choice(site.replicas())
        process.signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.5, 3))
        process.signal(signal.SIGCONT)

    def kill_store() -> None:
        site.store.stop()
        site.store = site.valkey("store", site.store_port)
        site.store.start()

    kinds = [kill_replica, kill_node, kill_light, stop_replica, kill_store]
    clients = [Bystander(site) for _ in range(4)]
    memory: list[int] = []
    num_faults = 0
    for client in clients:
        client.start()
    ends = time.monotonic() + SOAK * 60
    while time.monotonic() < ends:
        pause = rng.uniform(5, 40)
        rng.choice(kinds)()
        num_faults += 1
        time.sleep(min(pause, max(0.0, ends - time.monotonic())))
        wait_for("both replicas", site.ready)
        memory.append(sum(p.rss_mib for p in site.replicas("Gateway")))
    for client in clients:
        client.stop()
    num_right = sum(client.num_right for client in clients)
    errors = [text for client in clients for text in client.errors]
    assert not [text for client in clients for text in client.wrong]
    for text in errors:
        oracles.error_text(text)
    oracles.note("others")
    oracles.figure(
        f"seed {seed}, {SOAK:g} min: {num_faults} faults, {num_right} right answers, "
        f"{len(errors)} errors, gateway {memory[0]} to {memory[-1]} MiB"
    )
    assert memory[-1] < memory[0] + 100
    oracles.freed({})
