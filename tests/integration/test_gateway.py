"""Every route over a real replica class with a fake engine, without Ray."""

import asyncio
import json

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from deployments.auth import ApiKeys
from deployments.gateway import create_app
from deployments.settings import AppArgs
from tests.support.fake_port import InProcessPort

ARGS = AppArgs(model="fake", max_batch_size=2, max_waiting=2, max_choices=3, max_body_bytes=4096)
PROTECTED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/valuspec/stats"),
    ("GET", "/v1/valuspec/thresholds"),
    ("POST", "/v1/valuspec/filter"),
]


@pytest.fixture
def port():
    port = InProcessPort(ARGS)
    yield port
    port.engine.gate.set()
    port.replica._loop.stop()
    assert port.replica._num_unfinished == 0, "a request was never accounted for"


@pytest.fixture
def client(port):
    with TestClient(create_app(port, ARGS, ApiKeys([]))) as client:
        yield client


def check_error(response, status, *, code=None, param=None) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert response.headers["x-request-id"]
    assert "Traceback" not in response.text
    return error


def complete(client, prompt="abc", **fields):
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, **fields})


# -- generation


def test_completion(client) -> None:
    body = complete(client, model="fake").json()
    assert body["choices"][0]["text"] == "abcab"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 2
    assert body["metrics"]["valuspec"]["retrieval_outcome"] == "off"


def test_chat_renders_the_messages(client) -> None:
    message = {"role": "user", "content": "hi"}
    body = client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 7}).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "user:hi"}


def test_chat_without_max_tokens_fills_the_context(client) -> None:
    message = {"role": "user", "content": "hi"}
    usage = client.post("/v1/chat/completions", json={"messages": [message]}).json()["usage"]
    assert usage["total_tokens"] == 128


def test_stream_equals_whole_answer(client) -> None:
    response = complete(client, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(e.removeprefix("data: ")) for e in events]
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "abcab"
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["metrics"]["valuspec"]["num_kept_nodes"] == 9


def test_several_prompts_and_repeats_keep_their_order(client) -> None:
    body = complete(client, ["ab", "xy", "q"], max_tokens=3).json()
    assert [c["text"] for c in body["choices"]] == ["aba", "xyx", "qqq"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    body = complete(client, [[120], [121, 122]], max_tokens=3).json()
    assert [c["text"] for c in body["choices"]] == ["xxx", "yzy"]
    body = complete(client, "ab", n=3, max_tokens=2).json()
    assert [c["text"] for c in body["choices"]] == ["ab", "ab", "ab"]
    assert body["usage"]["prompt_tokens"] == 2


def test_token_ids_on_request(client) -> None:
    choice = complete(client, return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == list(b"abcab")


def test_request_id_is_echoed_or_made(client) -> None:
    response = client.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    made = client.get("/v1/models", headers={"x-request-id": "has space"}).headers["x-request-id"]
    assert len(made) == 32
    body = client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine-2"}
    ).json()
    assert body["id"] == "cmpl-mine-2"


# -- errors


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_are_http_errors(client, stream) -> None:
    check_error(
        complete(client, "x" * 100, max_tokens=100, stream=stream),
        400,
        code="context_length_exceeded",
        param="max_tokens",
    )
    check_error(complete(client, temperature=9, stream=stream), 400, param="temperature")
    check_error(complete(client, best_of=2), 400, param="best_of", code="unsupported")
    check_error(complete(client, ["a"] * 4), 400, param="prompt")
    check_error(complete(client, n=4), 400, param="n")
    check_error(complete(client, model="gpt-5"), 404, code="model_not_found", param="model")


@pytest.mark.fault(44, 46)
def test_error_shape_of_the_framework_itself(client) -> None:
    check_error(client.get("/v1/nothing"), 404, code="not_found")
    check_error(client.get("/v1/completions"), 405, code="method_not_allowed")
    lone_surrogate = rb'{"messages": [{"role": "user", "content": "\ud800"}], "prompt": "\ud800"}'
    for content in (b"{", b"", b"[" * 3000, b'"text"', b"\xff\xfe", lone_surrogate):
        response = client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, content
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.fault(41)
def test_a_text_far_too_long_is_not_tokenised_whole(client, port) -> None:
    lengths = []
    encode = port.engine.target.encode
    port.engine.target.encode = lambda text: lengths.append(len(text)) or encode(text)
    error = check_error(
        complete(client, "x" * 4000), 400, code="context_length_exceeded", param="prompt"
    )
    assert "128" in error["message"]
    messages = [{"role": "user", "content": "x" * 1900}] * 2
    response = client.post("/v1/chat/completions", json={"messages": messages})
    check_error(response, 400, code="context_length_exceeded", param="messages")
    assert max(lengths) < 1900


@pytest.mark.fault(46)
def test_large_bodies_are_refused(client) -> None:
    check_error(complete(client, "x" * 5000), 413)


@pytest.mark.fault(46)
def test_a_body_without_a_length_is_cut_off_at_the_limit(port) -> None:
    async def scenario() -> None:
        app = create_app(port, ARGS, ApiKeys([]))
        chunk = {"type": "http.request", "body": b"x" * 1024, "more_body": True}
        connection = Connection(app, {}, first=[chunk] * 1000)
        assert await connection.status() == 413

    asyncio.run(scenario())


def test_an_unexpected_failure_shows_nothing_of_it(port) -> None:
    async def broken():
        raise ValueError("secret /path")

    port.card = broken
    with TestClient(create_app(port, ARGS, ApiKeys([])), raise_server_exceptions=False) as client:
        error = check_error(client.get("/v1/models", headers={"x-request-id": "q1"}), 500)
    assert "secret" not in error["message"]
    assert "q1" in error["message"]


@pytest.mark.fault(22)
def test_an_unexpected_failure_in_mid_stream_is_an_error_event(client, port) -> None:
    generate = port.replica.generate

    async def breaks(call):
        replies = generate(call)
        yield await anext(replies)
        await replies.aclose()
        raise ValueError("secret /path")

    port.replica.generate = breaks
    events = complete(client, stream=True).text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "secret" not in "".join(events)
    check_error(complete(client), 500)


@pytest.mark.fault(22)
def test_a_request_that_fails_in_the_middle_does_not_touch_others(client, port) -> None:
    port.engine.fail_requests = {"bad"}
    response = complete(client, ["bad", "ok"], stream=True)
    assert response.status_code == 200
    assert '"error"' in response.text.split("\n\n")[-2]
    assert "[DONE]" not in response.text
    check_error(complete(client, "bad", max_tokens=9), 500)
    assert complete(client, "ok").json()["choices"][0]["text"] == "okoko"


# -- models, health, tools


def test_models(client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model == client.get("/v1/models/fake").json()
    assert (model["id"], model["exact"], model["exact_mode"]) == ("fake", True, "rows")
    assert model["max_model_len"] == 128
    check_error(client.get("/v1/models/x/y"), 404, code="model_not_found", param="model")


def test_health_and_routes_while_loading(client, port) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    port.ready = False
    for response in (client.get("/health"), client.get("/v1/models"), complete(client)):
        check_error(response, 503, code="not_ready")


def test_tokenize_round_trip(client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "hé"}).json()
    assert tokens == {"tokens": list("hé".encode()), "count": 3, "max_model_len": 128}
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == "hé"
    check_error(client.post("/detokenize", json={"tokens": [256]}), 400, param="tokens")
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]) == b"user:x\n"


def test_stats_count_what_was_served(client) -> None:
    complete(client)
    totals = client.get("/v1/valuspec/stats").json()["totals"]
    assert totals["valuspec_generation_tokens"] == 5
    assert totals["valuspec_request_success_length"] == 1
    assert totals["valuspec_spec_decode_num_accepted_tokens_per_pos_0"] == 2


def test_filter_values_a_foreign_tree(client) -> None:
    tree = {"tokens": [5, 6, 7], "parents": [-1, 0, -1], "probabilities": [0.99, 0.99, 0.001]}
    body = client.post("/v1/valuspec/filter", json=tree).json()
    assert len(body["values"]) == 3
    assert body["values"][1] <= body["values"][0]
    assert all(0 <= node < 3 for node in body["kept"])
    assert body["threshold_version"]
    cyclic = {"tokens": [5, 6], "parents": [1, 0]}
    check_error(client.post("/v1/valuspec/filter", json=cyclic), 400, param="parents")
    short = {"tokens": [5], "parents": [-1], "probabilities": []}
    check_error(client.post("/v1/valuspec/filter", json=short), 400, param="probabilities")
    uneven = {"tokens": [5, 6], "parents": [-1]}
    check_error(client.post("/v1/valuspec/filter", json=uneven), 400, param="parents")
    empty = client.post("/v1/valuspec/filter", json={"tokens": [], "parents": []}).json()
    assert (empty["kept"], empty["values"]) == ([], [])


def test_thresholds_show_the_set_in_use_and_why(client, port) -> None:
    shown = client.get("/v1/valuspec/thresholds").json()
    assert shown["model_fingerprint"] == "fake-model"
    assert shown["active"]["version"] == port.engine.thresholds.version
    assert shown["active"]["origin"] == "shipped"
    assert shown["active"]["buckets"][0]["max_batch_size"] == 1
    assert shown["active"]["provenance"]["borrowed_from"]
    assert (shown["pinned"], shown["store"], shown["events"]) == (None, None, [])


# -- keys


@pytest.mark.fault(47)
def test_every_route_but_health_needs_a_key(port) -> None:
    app = create_app(port, ARGS, ApiKeys(["acme:key"]))
    guarded = [route for route in app.routes if isinstance(route, APIRoute)]
    assert [r.path for r in app.routes if r not in guarded] == ["/health"]
    listed = {(method, route.path) for route in guarded for method in route.methods}
    named = {(m, p.replace("/v1/models/fake", "/v1/models/{model:path}")) for m, p in PROTECTED}
    assert listed == named, "list a new route in PROTECTED"
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        for method, path in PROTECTED:
            check_error(client.request(method, path), 401, code="invalid_api_key")
            wrong = {"authorization": "Bearer nope"}
            check_error(client.request(method, path, headers=wrong), 401, code="invalid_api_key")
        right = {"authorization": "Bearer key"}
        assert client.get("/v1/models", headers=right).status_code == 200
        odd = ["//v1/models", "/v1/%2e%2e/v1/models", "/V1/models", "/v1/models/", "/docs"]
        for path in odd:
            assert client.get(path, follow_redirects=False).status_code in (307, 401, 404), path


def test_only_the_operator_sees_what_concerns_all_tenants(port) -> None:
    with TestClient(create_app(port, ARGS, ApiKeys(["acme:k1", "operator:k2"]))) as client:
        for path in ("/v1/valuspec/stats", "/v1/valuspec/thresholds"):
            refused = client.get(path, headers={"authorization": "Bearer k1"})
            check_error(refused, 403, code="insufficient_permissions")
            shown = client.get(path, headers={"authorization": "Bearer k2"})
            assert shown.status_code == 200


@pytest.mark.fault(47)
@pytest.mark.parametrize("host", ["a/?x=", "a b", "evil.com@b", "[::1", "a:b", "", "a,b"])
def test_a_host_that_is_none_is_refused(client, host) -> None:
    check_error(client.get("/v1/models", headers={"host": host}), 400, code="invalid_host")
    check_error(client.get("/health", headers={"host": host}), 400, code="invalid_host")


def test_a_keyless_server_answers_to_its_own_names_only(port) -> None:
    """A page that points a name of its own at 127.0.0.1 cannot help sending that name."""
    with TestClient(create_app(port, ARGS, ApiKeys([]), local_only=True)) as client:
        for host in ("localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"):
            check_error(client.get("/v1/models", headers={"host": host}), 421, code="unknown_host")


@pytest.mark.fault(46)
def test_deep_nesting_and_giant_numbers_are_invalid_requests(client) -> None:
    for value in ("[" * 2000 + "]" * 2000, '{"a":' * 700 + "1" + "}" * 700, "[" * 4000, "9" * 4000):
        for field in ("prompt", "user", "stop", "metadata", "stream_options", "max_tokens"):
            body = f'{{"prompt": "a", "max_tokens": 1, "{field}": {value}}}'
            response = client.post("/v1/completions", content=body[:4096])
            assert response.status_code in (200, 400), (field, response.text)
            assert "Traceback" not in response.text


def test_tenants_have_namespaces_of_their_own(port) -> None:
    seen = []
    add = port.engine.add
    port.engine.add = lambda request: (seen.append(request.namespace), add(request))
    with TestClient(create_app(port, ARGS, ApiKeys(["a:k1", "b:k2"]))) as client:
        for key in ("k1", "k2", "k1"):
            client.post(
                "/v1/completions",
                json={"prompt": "x", "tenant": "a", "namespace": "a"},
                headers={"authorization": f"Bearer {key}"},
            )
    assert seen[0] == seen[2] != seen[1]


# -- load and disconnects


class Connection:
    """One HTTP request driven by hand, so that the test decides when the client goes away."""

    def __init__(self, app, body: dict, first: list[dict] | None = None, window: int = 0) -> None:
        """window: so many messages are taken before one is read; 0 for any number"""
        whole = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        self._messages = [whole] if first is None else first
        self._gone = asyncio.Event()
        self.received: asyncio.Queue[dict] = asyncio.Queue(window)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        self.task = asyncio.create_task(app(scope, self._receive, self.received.put))

    async def _receive(self) -> dict:
        if self._messages:
            return self._messages.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def disconnect(self) -> None:
        self._gone.set()

    async def status(self) -> int:
        return (await asyncio.wait_for(self.received.get(), 10))["status"]


@pytest.mark.fault(48)
def test_a_client_that_goes_away_frees_its_slot_before_the_next_step(port) -> None:
    async def scenario() -> None:
        app = create_app(port, ARGS, ApiKeys([]))
        port.engine.hold_after_step = 1
        connection = Connection(app, {"prompt": "abc", "max_tokens": 100, "stream": True})
        assert await connection.status() == 200
        assert b"data" in (await asyncio.wait_for(connection.received.get(), 10))["body"]
        connection.disconnect()
        await asyncio.wait_for(connection.task, 10)
        assert port.replica._num_unfinished == 0
        port.engine.gate.set()
        other = Connection(app, {"prompt": "q", "max_tokens": 2})
        assert await other.status() == 200
        await other.task
        assert len(port.engine.cancelled) == 1

    asyncio.run(scenario())


@pytest.mark.fault(51)
def test_clients_that_do_not_read_stall_nobody(port) -> None:
    async def scenario() -> None:
        app = create_app(port, ARGS, ApiKeys([]))
        body = {"prompt": "abc", "max_tokens": 100, "stream": True}
        stuck = [Connection(app, body, window=1) for _ in range(4)]
        for connection in stuck:
            assert await connection.status() == 200
        for _ in range(2):
            other = Connection(app, {"prompt": "q", "max_tokens": 100, "stream": True})
            assert await other.status() == 200
            await asyncio.wait_for(other.task, 10)
        assert not any(connection.task.done() for connection in stuck), "they read after all"
        for connection in stuck:
            connection.disconnect()
            connection.received = asyncio.Queue()
            connection.task.cancel()
        await asyncio.gather(*(c.task for c in stuck), return_exceptions=True)

    asyncio.run(scenario())


def test_beyond_batch_and_queue_the_answer_is_429_at_once(port) -> None:
    async def scenario() -> None:
        app = create_app(port, ARGS, ApiKeys([]))
        port.engine.gate.clear()
        encoded = []
        encode = port.engine.target.encode
        port.engine.target.encode = lambda text: encoded.append(text) or encode(text)
        held = [Connection(app, {"prompt": "ab", "max_tokens": 2, "n": 2}) for _ in range(2)]
        while port.replica._num_unfinished < 4:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0)
        refused = Connection(app, {"prompt": "late", "max_tokens": 2, "stream": True})
        start = await asyncio.wait_for(refused.received.get(), 10)
        assert "late" not in encoded, "tokenised before it was refused"
        assert start["status"] == 429
        assert (b"retry-after", b"1") in start["headers"]
        port.engine.gate.set()
        assert [await connection.status() for connection in held] == [200, 200]
        await asyncio.gather(refused.task, *(connection.task for connection in held))

    asyncio.run(scenario())
