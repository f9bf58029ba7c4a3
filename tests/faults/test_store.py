"""The store of draft trees is killed, stopped, emptied, slowed or filled with lies."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from redis import Redis

from retrieval.codec import StoredTree, encode
from retrieval.embedding import embed
from retrieval.namespace import namespace, tree_id
from retrieval.redis_store import RedisStore
from tests.faults.conftest import Oracles
from tests.faults.site import LONG, Site, wait_for
from tests.support.processes import Process
from valuspec.tree import DraftTree

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def outcome(answer: dict[str, Any]) -> str:
    name: str = answer["metrics"]["valuspec"]["retrieval_outcome"]
    return name


def store_process(site: Site) -> Process:
    with Redis(port=site.store_port) as client:
        return Process(int(client.info("server")["process_id"]))


def eventually_hits(site: Site, prompt: str) -> float:
    """Seconds until this prompt's own tree is found again; writes it as often as needed."""
    return wait_for("a hit", lambda: outcome(site.ask(prompt)) == "hit")


@contextmanager
def restarted_after(site: Site) -> Iterator[None]:
    """The store is up and in use again at the end, empty if it was killed."""
    try:
        yield
    finally:
        site.store.stop()
        site.store = site.valkey("store", site.store_port)
        site.store.start()
        eventually_hits(site, "in use")


@pytest.mark.fault(1, 3, 21)
def test_the_store_killed_in_mid_stream(site: Site, oracles: Oracles) -> None:
    """And back, empty: the cluster's own Redis is another one and notices nothing."""
    site.plain("stored", max_tokens=LONG)
    eventually_hits(site, "in use")
    with oracles.beside(), restarted_after(site):
        site.check_long_stream("stored", lambda: store_process(site).signal(signal.SIGKILL))
        failures = ("error", "open", "timeout")
        # A known answer is complete before its lookup has failed; and counters are of one replica.
        new = (f"never asked {n}" for n in itertools.count())
        wait_for("a failed lookup", lambda: outcome(site.ask(next(new))) in failures)
        names = {f"valuspec_retrieval_requests_{failure}" for failure in failures}
        wait_for("its counter", lambda: not names.isdisjoint(site.totals()))
    oracles.note("counted")


@pytest.mark.fault(2)
def test_the_store_stopped(site: Site, oracles: Oracles) -> None:
    eventually_hits(site, "in use")
    process = store_process(site)
    with oracles.beside():
        process.signal(signal.SIGSTOP)
        try:
            wait_for("the breaker", lambda: outcome(site.ask("in use", max_tokens=2)) == "open")
            assert site.ask("in use")["choices"][0] == site.plain("in use")
        finally:
            process.signal(signal.SIGCONT)
        seconds = eventually_hits(site, "in use")
    oracles.figure(f"hits again {seconds:.1f} s after it went on")


@pytest.mark.fault(11)
def test_another_tenant_learns_nothing(site: Site, oracles: Oracles) -> None:
    """What B's request does is what it does for a tenant who is the first to ask anything."""

    def trace(answer: dict[str, Any]) -> tuple[int, ...]:
        """Not what the valuation kept of it: that depends on what else the replica computes."""
        ours = answer["metrics"]["valuspec"]
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return ours["num_offered_nodes"], ours["num_retrieved_trees"], cached

    prompt = "what nobody else may know " * 12  # long enough for blocks of the prefix cache
    eventually_hits(site, prompt)
    known = trace(site.ask(prompt))
    cold = {tenant: site.ask(prompt, tenant=tenant) for tenant in ("b", "c", "d")}
    assert len({trace(answer) for answer in cold.values()}) == 1
    assert {outcome(answer) for answer in cold.values()} == {"miss"}
    offered, trees, cached = trace(cold["b"])
    assert (trees, cached) == (0, 0)
    assert known[0] > offered
    assert known[2] > 0
    assert len({str(answer["choices"]) for answer in cold.values()}) == 1


@pytest.mark.fault(12)
def test_a_flood_of_wrong_trees(site: Site, oracles: Oracles) -> None:
    """Each begins as the right answer does and goes wrong soon, under the prompt's own name."""
    stats = site.client.get("/v1/valuspec/stats").json()
    space = namespace("operator", stats["model_fingerprint"], stats["tokenizer_fingerprint"])
    rng = np.random.default_rng(0)
    prompts = [f"flooded {n}" for n in range(40)]
    plain = {prompt: site.plain(prompt, max_tokens=400) for prompt in prompts}

    async def flood() -> None:
        store = RedisStore(f"redis://127.0.0.1:{site.store_port}", read_timeout_s=10)
        for prompt in prompts:
            ids = site.client.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
            right = plain[prompt]["token_ids"]
            paths = [
                [*right[: int(rng.integers(0, 20))], *rng.integers(0, 256, 40).tolist()]
                for _ in range(20)
            ]
            tree = DraftTree.from_paths(paths)
            blob = encode(StoredTree(tree, embed(ids)), namespace=space, tree_id=tree_id(ids))
            await store.put(space, tree_id(ids), blob)
        await store.aclose()

    asyncio.run(flood())
    offered = kept = hits = 0
    with oracles.beside():
        for prompt in prompts:
            answer = site.ask(prompt, max_tokens=400)
            assert answer["choices"][0] == plain[prompt]
            hits += outcome(answer) == "hit"
            offered += answer["metrics"]["valuspec"]["num_retrieved_nodes"]
            kept += answer["metrics"]["valuspec"]["num_kept_nodes"]
    assert hits > len(prompts) / 2
    assert kept < offered / 10
    oracles.figure(f"{offered} wrong nodes offered, {kept} verified")
