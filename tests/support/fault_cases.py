"""The fault cases: what is done to the system, and what may come of it.

Numbers 28 to 40 are faults of thresholds, jobs and logs; the tests of recalibration, publishing
and the trajectory log cover them.
"""

from __future__ import annotations

from typing import NamedTuple

#: Asked of every case that runs against a server, by name.
ORACLES = {
    "alive": "no process ended but those that were killed",
    "others": "requests running beside it get the same bytes as ever",
    "freed": "slots and cache blocks are free soon after, and open files near where they were",
    "counted": "the counter of this event moved, by exactly the number of events",
    "silent": "no answer shows a traceback, a path or an address",
    "shaped": "what is not an answer is an OpenAI error object",
}


class Case(NamedTuple):
    """`note` says what is different here from what the words promise, or what is not covered."""

    injected: str
    expected: str
    note: str = ""


CASES: dict[int, Case] = {
    1: Case("store killed while answers stream", "same bytes, without drafts from the store"),
    2: Case(
        "store stopped, its socket still open",
        "a deadline each at first, then the breaker keeps requests away from it",
    ),
    3: Case("store back, but empty", "misses, no errors; the breaker closes and trees return"),
    4: Case(
        "store answers OOM, READONLY, MOVED, LOADING, NOAUTH",
        "a miss or a dropped write, counted by kind; a refused password is said once",
    ),
    5: Case("store 500 ms away", "the lookup is given up at its deadline"),
    6: Case("store lost half of what was written", "what is gone is a miss and leaves the index"),
    7: Case(
        "blobs with flipped bits or cut short", "refused, counted, deleted; never drafted from"
    ),
    8: Case("whole blobs of impossible trees", "refused by structure, nothing deep or large built"),
    9: Case("a giant value under a tree's key", "its length is found out, it is not fetched"),
    10: Case("a tree of another model or tokenizer", "not found; put there by force, refused"),
    11: Case(
        "tenant B asks what tenant A asked",
        "nothing found; B's steps and drafts are those of a tenant nobody has met",
        "Offered drafts are compared exactly; latencies are not tested here.",
    ),
    12: Case(
        "store flooded with plausible, wrong trees",
        "same bytes; valuation keeps few of their nodes",
        "Speed under it is measured by the benches, not here.",
    ),
    13: Case(
        "index of another dimension",
        "refused by size",
        "No index file exists that could be damaged: it is rebuilt from the store.",
    ),
    14: Case("index returns unknown, double or stale ids, NaN", "treated as misses"),
    15: Case("index changed during searches", "a search sees before or after, never between"),
    16: Case("two processes write one key", "one whole value stays"),
    17: Case("replica killed before its first token", "another replica answers; status 200"),
    18: Case("replica killed in mid-stream", "another goes on; greedy and seeded bytes unchanged"),
    19: Case("replica told to end during a long answer", "the answer ends as it would have"),
    20: Case(
        "controller, proxy, head killed",
        "answers go on without controller and head; a new proxy listens again",
        "Of the head, its control service is killed and restarted on an external Redis.",
    ),
    21: Case("only the cluster's Redis lost; only the store lost", "neither affects the other"),
    22: Case(
        "a step fails; steps keep failing",
        "its requests end with an error, the next are served; in a row, the replica is replaced",
        "By exceptions in the step; no GPU was made to fail.",
    ),
    23: Case("replica stopped", "found unhealthy, replaced; its answer goes on elsewhere"),
    24: Case(
        "node killed again and again under load",
        "every answer identical or a whole error",
        "A few kills a run; `make faults SOAK=60` is an hour of them.",
    ),
    25: Case("rollout of a build that cannot start", "refused; the replicas before it serve on"),
    26: Case("two formats of trees in one store", "they do not meet"),
    27: Case("model missing at the start", "ends after a bounded time with a message"),
    41: Case("a prompt far longer than the context", "400 with both numbers, not tokenised whole"),
    42: Case("n, max_tokens, prompts, stop beyond reason", "400 naming the parameter"),
    43: Case("temperature and its like beyond reason", "400 naming the parameter"),
    44: Case("broken and strange text", "400, or served"),
    45: Case("characters split over tokens while streaming", "the stream is the whole text"),
    46: Case("hostile bodies: deep, endless, double keys, packed", "4xx, memory bounded"),
    47: Case("Host, path and Authorization tricks", "401 or 404"),
    48: Case("clients that go away at any moment", "slot and blocks freed; nobody's reply crosses"),
    49: Case(
        "1,000 idle connections, a client that does not read",
        "others are served",
        "What is buffered for a slow reader is bounded by the answer's length.",
    ),
    50: Case("stop string, end of text, max_tokens in an accepted run", "as in plain decoding"),
    51: Case(
        "ten times the load that fits", "429 with Retry-After at once; right answers; recovery"
    ),
    52: Case(
        "mixed faults from a seed, for long",
        "as in 24, and memory and open files stay flat",
        "Two minutes a run; `make faults SOAK=60` is an hour.",
    ),
}
