"""What retrieval costs as it grows: latency, recall, memory, ingest rate, restart.

    python -m bench.retrieval_growth --sizes 1e4,1e5
    python -m bench.retrieval_growth --sizes 1e4 --data requests.jsonl --tokenizer smollm2

Requests are made up (a few thousand topics, some far more frequent than others; requests of a
topic share a template), or, with --data, recombined from real ones: the first half of one and the
second half of another of the same file, so that there are as many as are asked for. Everything is
real but the requests: a Valkey process, the service, its index. Lookups are timed one at a time
over requests that were not stored; recall is that of the index against all of its vectors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis import Redis
from tqdm import tqdm

from bench.common import environment, print_json, print_table
from retrieval.answers import store_answers
from retrieval.embedded import EmbeddedValkey
from retrieval.embedding import EMBEDDING_DIM, embed
from retrieval.faiss_index import FaissIndex
from retrieval.redis_store import RedisStore
from retrieval.service import RetrievalService
from retrieval.store import DEFAULT_TTL_S

NAMESPACE = "growth"
VOCAB = 49_152
K = 16
PATIENCE_S = 60.0
NUM_QUERIES = 200
NUM_TOPICS = 3000
_BATCH = 512

Requests = Iterator[NDArray[np.int64]]


def made_up(seed: int) -> Requests:
    """Endless prompts of 60 to 140 tokens: a topic's template with a few words of their own."""
    rng = np.random.default_rng(seed)
    shared = np.random.default_rng(0)  # topics are the same for every seed
    lengths = shared.integers(40, 100, NUM_TOPICS)
    templates = [_words(shared, length) for length in lengths]
    while True:
        topic = min(int(rng.zipf(1.3)) - 1, NUM_TOPICS - 1)
        yield np.concatenate([templates[topic], _words(rng, int(rng.integers(20, 40)))])


def _words(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Token ids as frequent as words are: rank r about 1/r of the time."""
    return np.minimum(rng.zipf(1.1, count) + 200, VOCAB - 1)


def recombined(files: list[Path], tokenizer: str, seed: int) -> Requests:
    """Endless prompts from the first turns of JSON-lines files of requests."""
    from valuspec.engine.weights import load_tokenizer

    encode = load_tokenizer(tokenizer).encode
    sources = [
        [np.asarray(encode(json.loads(line)["turns"][0]), np.int64) for line in path.open()]
        for path in files
    ]
    sizes = np.array([len(source) for source in sources])
    rng = np.random.default_rng(seed)
    while True:
        source = sources[int(rng.choice(len(sources), p=sizes / sizes.sum()))]
        first, second = (source[int(rng.integers(len(source)))] for _ in range(2))
        made = np.concatenate([first[: -(-len(first) // 2)], second[len(second) // 2 :]])
        if len(made):
            yield made


def answers(requests: Requests, count: int, nodes: int) -> Iterator[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield next(requests).tolist(), rng.integers(0, VOCAB, nodes).tolist()


async def grow(
    url: str, stored: Requests, asked: Requests, size: int, nodes: int
) -> dict[str, Any]:
    """Store, restart, ask."""
    store = RedisStore(url, connect_timeout_s=PATIENCE_S, read_timeout_s=PATIENCE_S)
    source = answers(stored, size, nodes)
    started = time.perf_counter()
    with tqdm(total=size, unit="tree", file=sys.stderr, mininterval=2) as bar:
        while batch := [answer for _, answer in zip(range(_BATCH), source, strict=False)]:
            bar.update(await store_answers(store, NAMESPACE, batch, vocab_size=VOCAB))
    ingest_s = time.perf_counter() - started
    num_trees = await store.count(NAMESPACE)

    made: list[FaissIndex] = []

    def factory(dim: int) -> FaissIndex:
        made.append(FaissIndex(dim))
        return made[0]

    before = _rss_mib()
    service = RetrievalService(store, factory, vocab_size=VOCAB, max_trees=2 * size)
    started = time.perf_counter()
    if not await service.warm(NAMESPACE):
        raise RuntimeError("the index could not be filled from the store")
    restart_s = time.perf_counter() - started
    (index,) = made
    started = time.perf_counter()
    while index.compact():  # what the service's own thread has not done yet
        pass
    compaction_s = time.perf_counter() - started
    memory = _rss_mib() - before

    prompts = [next(asked).tolist() for _ in range(NUM_QUERIES)]
    search_ms, lookup_ms, write_ms, hits, recall = [], [], [], 0, 0.0
    exact = _exact(index, np.stack([embed(p) - index.mean() for p in prompts]))
    for prompt, best in zip(prompts, exact, strict=True):
        query = embed(prompt) - index.mean()
        started = time.perf_counter()
        found = index.search(query, K)
        search_ms.append(1e3 * (time.perf_counter() - started))
        recall += len(set(found.ids.tolist()) & set(best)) / len(best) / NUM_QUERIES
        started = time.perf_counter()
        retrieved = await service.lookup(NAMESPACE, prompt, K, PATIENCE_S)
        lookup_ms.append(1e3 * (time.perf_counter() - started))
        hits += retrieved.outcome == "hit"
    for prompt in prompts:
        started = time.perf_counter()
        await service.write_back(NAMESPACE, prompt, prompt[:nodes])
        write_ms.append(1e3 * (time.perf_counter() - started))
    await service.aclose()
    with Redis.from_url(url) as client:
        store_mib = int(client.info("memory")["used_memory"]) >> 20
    return {
        "trees": num_trees,
        "segments": len(index._snapshot.segments),
        "search_p50_ms": float(np.median(search_ms)),
        "search_p99_ms": float(np.quantile(search_ms, 0.99)),
        "lookup_p50_ms": float(np.median(lookup_ms)),
        "lookup_p99_ms": float(np.quantile(lookup_ms, 0.99)),
        "write_p50_ms": float(np.median(write_ms)),
        "recall": recall,
        "hit_share": hits / NUM_QUERIES,
        "index_mib": memory,
        "store_mib": store_mib,
        "ingest_per_s": size / ingest_s,
        "restart_s": restart_s,
        "compaction_s": compaction_s,
    }


def _exact(index: FaissIndex, queries: NDArray[np.float32]) -> list[list[int]]:
    """Ids of the K best of all rows, for each query float32 [n, dim]."""
    scores = np.full((len(queries), K), -np.inf, np.float32)
    ids = np.full((len(queries), K), -1, np.int64)
    snapshot = index._snapshot
    parts = [(s.ids, s.vectors()) for s in snapshot.segments]
    for part_ids, blocks in [*parts, (snapshot.tail_ids, [snapshot.tail_vectors])]:
        start = 0
        for block in blocks:
            block_ids = np.broadcast_to(
                part_ids[start : start + len(block)], (len(queries), len(block))
            )
            start += len(block)
            all_scores = np.concatenate([scores, queries @ block.T], axis=1)
            all_ids = np.concatenate([ids, block_ids], axis=1)
            order = np.argsort(-all_scores, axis=1)[:, :K]
            scores = np.take_along_axis(all_scores, order, axis=1)
            ids = np.take_along_axis(all_ids, order, axis=1)
    return ids.tolist()


def _rss_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1e4,1e5,1e6", help="trees, comma separated")
    parser.add_argument("--nodes", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--tokenizer", default="smollm2", help="of the files' text")
    options = parser.parse_args(argv)
    results = []
    for size in [int(float(text)) for text in options.sizes.split(",")]:
        if options.data:
            stored, asked = (recombined(options.data, options.tokenizer, seed) for seed in (2, 3))
        else:
            stored, asked = made_up(2), made_up(3)
        with EmbeddedValkey(maxmemory="0") as valkey:
            result = asyncio.run(grow(valkey.url, stored, asked, size, options.nodes))
        results.append({"requests": "recombined" if options.data else "made up"} | result)
    print_table(list(results[0]), [list(result.values()) for result in results])
    print_json(
        {
            "sizes": results,
            "k": K,
            "dim": EMBEDDING_DIM,
            "nodes": options.nodes,
            "ttl_s": DEFAULT_TTL_S,
            "environment": environment(),
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
