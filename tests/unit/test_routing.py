"""Which replica a request prefers: stable, balanced, and never a crowded one."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deployments.messages import GenerateCall
from deployments.routing import BALANCE, PREFIX_CHARS, PREFIX_IDS, preferred, routing_key
from valuspec.engine.types import SamplingParams

REPLICAS = ["r1", "r2", "r3", "r4", "r5"]
QUEUES = st.dictionaries(st.text(min_size=1), st.integers(0, 300), min_size=1, max_size=12)


def call(**fields) -> GenerateCall:
    fields = {"tenant": "t", "prompts": ("",)} | fields
    return GenerateCall(request_id="r", params=SamplingParams(), max_tokens=1, **fields)


def chat(*contents: str, **fields) -> GenerateCall:
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = tuple(
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    )
    return call(messages=messages, prompts=(), **fields)


def keys(*calls: GenerateCall) -> int:
    """How many different keys."""
    return len({routing_key(one) for one in calls})


def test_requests_that_begin_alike_share_a_key() -> None:
    head = "x" * PREFIX_CHARS
    assert keys(call(prompts=(head + "a",)), call(prompts=(head + "b",))) == 1
    assert keys(call(prompts=("a",)), call(prompts=("b",))) == 2
    ids = tuple(range(PREFIX_IDS))
    assert keys(call(prompts=((*ids, 1),)), call(prompts=((*ids, 2),))) == 1
    assert keys(call(prompts=((1, 23),)), call(prompts=((12, 3),))) == 2


def test_a_chat_keeps_its_key_while_it_goes_on() -> None:
    first = chat("be kind", "hello")
    assert keys(first, chat("be kind", "hello", "hi", "how are you?", "fine")) == 1
    assert keys(first, chat("be kind", "goodbye")) == 2
    assert keys(first, chat("be rude", "hello")) == 2


def test_a_session_counts_more_than_the_text() -> None:
    assert keys(call(prompts=("a",), session="s"), call(prompts=("b",), session="s")) == 1
    assert keys(call(prompts=("a",), session="s"), call(prompts=("a",), session="z")) == 2


def test_tenants_never_share_a_key() -> None:
    for one in (call(), call(session="s"), chat("a", "b"), call(prompts=((1, 2),))):
        other = GenerateCall(
            request_id="r",
            tenant="other",
            params=one.params,
            max_tokens=1,
            prompts=one.prompts,
            messages=one.messages,
            session=one.session,
        )
        assert keys(one, other) == 2


def test_odd_text_has_a_key() -> None:
    assert keys(call(prompts=("\ud800",)), call(prompts=("\x00",)), call(prompts=())) == 3


@given(st.binary(min_size=1), QUEUES, st.integers(1, 64))
def test_every_replica_is_tried_once_and_a_crowded_one_never_first(key, queues, places) -> None:
    order = preferred(key, queues, places=places)
    assert sorted(order) == sorted(queues)
    mean = (sum(queues.values()) + 1) / len(queues)
    assert queues[order[0]] < max(places, BALANCE * mean + 1)
    assert order == preferred(key, dict(reversed(queues.items())), places=places)


def test_keys_spread_and_move_only_with_their_own_replica() -> None:
    idle = dict.fromkeys(REPLICAS, 0)
    chosen = {n: preferred(b"%d" % n, idle, places=8)[0] for n in range(2000)}
    shares = Counter(chosen.values())
    assert min(shares.values()) > 300, "of 400 each"
    del idle["r3"]
    for n, before in chosen.items():
        after = preferred(b"%d" % n, idle, places=8)[0]
        assert after == before or before == "r3"


def test_a_busy_replica_keeps_its_requests_until_places_run_out() -> None:
    idle = dict.fromkeys(REPLICAS, 0)
    favourite, second, *_ = preferred(b"key", idle, places=8)
    assert preferred(b"key", idle | {favourite: 7}, places=8)[0] == favourite
    assert preferred(b"key", idle | {favourite: 8}, places=8)[0] == second
    silent = preferred(b"key", idle, places=8, avoided={favourite, second})
    assert sorted(silent[-2:]) == sorted([favourite, second])
    assert sorted(silent) == sorted(idle)
    everywhere = dict.fromkeys(REPLICAS, 40)
    assert preferred(b"key", everywhere | {favourite: 42}, places=8)[0] == favourite
    assert preferred(b"key", everywhere | {favourite: 60}, places=8)[-1] == favourite
    assert preferred(b"key", {}, places=8) == []
