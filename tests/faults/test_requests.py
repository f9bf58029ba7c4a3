"""Requests that are hostile, senseless or abandoned, over real connections to the real app."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.faults.conftest import Oracles
from tests.faults.site import KEYS, LONG, Joined, Site, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray]

COMPLETIONS = "/v1/completions"


def post(site: Site, **fields: Any) -> httpx.Response:
    return site.client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2} | fields)


def post_raw(site: Site, content: Any, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return site.client.post(
        COMPLETIONS, content=content, headers={"content-type": "application/json"} | named
    )


def raw(site: Site, *lines: str, body: bytes = b"") -> tuple[int, str]:
    """Status and body of a request written by hand, on a connection of its own."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest.decode()


@pytest.mark.fault(41)
def test_a_prompt_far_too_long(site: Site, oracles: Oracles) -> None:
    with oracles.beside():
        error = oracles.error(post(site, prompt="word " * 100_000), 400)
        assert error["code"] == "context_length_exceeded"
        assert "4096" in error["message"]
        error = oracles.error(post(site, prompt=[5] * 5000), 400)
        assert "4096" in error["message"]
        assert "5002" in error["message"]


@pytest.mark.fault(42, 43)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**18}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"best_of": 10**6}, "best_of"),
        ({"prompt": ["x"] * 10**6}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"stop": [str(n) for n in range(10**4)]}, "stop"),
        ({"stop": ["x" * 10**5]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"presence_penalty": 1.5}, "presence_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_values_beyond_reason(site: Site, oracles: Oracles, fields: Any, param: Any) -> None:
    error = oracles.error(post(site, **fields), 400, 413)
    assert param is None or error["param"] in (param, None)
    assert post(site).status_code == 200


@pytest.mark.fault(43)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have(site: Site, oracles: Oracles, number: str) -> None:
    body = f'{{"prompt": "x", "max_tokens": 2, "temperature": {number}}}'
    oracles.error(post_raw(site, body), 400)


@pytest.mark.fault(44)
@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt": "\xff\xfe", "max_tokens": 2}',
        b'{"prompt": "\xc0\xaf", "max_tokens": 2}',  # overlong
        b'{"prompt": "\\ud800", "max_tokens": 2}',
        b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 2}',  # byte order mark
        b'{"prompt": "a\\u0000b", "max_tokens": 2}',
        '{"prompt": "%s", "max_tokens": 2}'.replace("%s", "e" + "\u0301" * 900).encode(),
        b'{"prompt": "<s></s><|im_start|>system", "max_tokens": 2}',
    ],
    ids=["bytes", "overlong", "surrogate", "mark", "nul", "combining", "special"],
)
def test_strange_text(site: Site, oracles: Oracles, text: bytes) -> None:
    response = post_raw(site, text)
    if response.status_code != 200:
        oracles.error(response, 400)


@pytest.mark.fault(45, 50)
@pytest.mark.parametrize("seed", range(6))
def test_any_bytes_stream_as_the_whole_text(site: Site, oracles: Oracles, seed: int) -> None:
    """The tiny model writes every byte there is: broken characters, split ones, merged tokens."""
    fields: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "seed": seed}
    whole = site.plain("bytes", **fields)
    assert "\ufffd" in whole["text"]
    stop = whole["text"][40:42]
    for more in ({}, {"stop": [stop]}, {"stop_token_ids": [whole["token_ids"][90]]}):
        expected = site.plain("bytes", **fields, **more)
        for _ in range(2):  # the second time, its own tree is drafted from
            joined = Joined()
            with site.stream("bytes", **fields, **more) as choices:
                for choice in choices:
                    joined.add(choice)
            joined.check(expected)


@pytest.mark.fault(46)
def test_hostile_bodies(site: Site, oracles: Oracles) -> None:
    before = site.processes("ray::ServeReplica:valuspec:Gateway")[0].rss_mib
    with oracles.beside():
        oracles.error(post_raw(site, b"[" * 100_000), 400)
        oracles.error(post_raw(site, b'{"a":' * 100_000), 400)
        oracles.error(post_raw(site, b'{"prompt": "x"'), 400)
        oracles.error(
            post_raw(site, gzip.compress(b"0" * 10**8), content_encoding="gzip"), 400, 415
        )
        oracles.error(post_raw(site, b"prompt=x", content_type="text/plain"), 400, 415)
        doubled = post_raw(site, b'{"prompt": "x", "prompt": "y", "max_tokens": 2}')
        assert doubled.status_code == 200  # the last one counts, as everywhere in JSON
        status, body = raw(
            site,
            f"POST {COMPLETIONS} HTTP/1.1",
            "host: localhost",
            f"authorization: Bearer {KEYS['a']}",
            "content-type: application/json",
            f"content-length: {10**9}",
        )
        assert status == 413
        oracles.error_text(body)

        def endless() -> Any:
            for _ in range(64):
                yield b"x" * (1 << 20)

        # It may also hang up on us in mid-body.
        with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):
            oracles.error(post_raw(site, endless()), 413)
    after = site.processes("ray::ServeReplica:valuspec:Gateway")[0].rss_mib
    oracles.figure(f"gateway {before} MiB before, {after} MiB after")
    assert after < before + 200


@pytest.mark.fault(47)
def test_hosts_paths_and_keys(site: Site, oracles: Oracles) -> None:
    key = f"authorization: Bearer {KEYS['a']}"
    host = "host: localhost"
    for path in (
        "//v1/models",
        "/v1/%2e%2e/v1/models",
        "/V1/models",
        "/v1/models/../models",
        "/v1/models%00",
        "/health/../v1/models",
        "/v1/models;a=b",
        "/-/routes/../v1/models",
    ):
        status, body = raw(site, f"GET {path} HTTP/1.1", host)
        assert status in (307, 400, 401, 404), (path, status)
        assert "tiny" not in body
    for headers in (
        [],
        ["authorization:"],
        ["authorization: Bearer"],
        [f"authorization: Basic {KEYS['a']}"],
        [key, key],
        [key, "authorization: Bearer wrong"],
        [f"x-{key}"],
    ):
        status, body = raw(site, "GET /v1/models HTTP/1.1", host, *headers)
        assert status == 401, headers
        oracles.error_text(body)
    for name in ("a/?x=", "evil.example", "localhost:1/health", ""):
        status, body = raw(site, "GET /v1/models HTTP/1.1", f"host: {name}")
        assert status in (400, 401, 404), name
        assert "tiny" not in body


@pytest.mark.fault(48)
def test_clients_that_go_away(site: Site, oracles: Oracles) -> None:
    """Before the headers, after them, after some tokens; the next answers are right."""
    before = site.totals().get("valuspec_request_success_abort", 0)

    async def leave(number: int) -> None:
        body = json.dumps(site.body(f"leaving {number}", stream=True, max_tokens=LONG)).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer {KEYS['a']}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write((head + body)[: None if number % 4 else len(head) + 10])
        await writer.drain()
        if number % 4 > 1:
            await reader.readuntil(b"\r\n\r\n")
        if number % 4 > 2:
            for _ in range(number % 8):
                await reader.readuntil(b"\n\n")
        writer.transport.abort()

    async def everybody() -> None:
        for start in range(0, 96, 8):
            await asyncio.gather(*(leave(start + n) for n in range(8)))

    with oracles.beside():
        asyncio.run(everybody())
    assert site.totals()["valuspec_request_success_abort"] > before


@pytest.mark.fault(49)
def test_idle_connections_and_a_client_that_does_not_read(site: Site, oracles: Oracles) -> None:
    idle = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(1000)]
    try:
        with oracles.beside(), site.stream("unread", max_tokens=LONG) as choices:
            next(choices)  # and no more of it while others are served
            for number in range(10):
                prompt = f"beside the unread {number % 3}"
                assert site.ask(prompt)["choices"][0] == site.plain(prompt)
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.fault(51)
def test_ten_times_the_load(site: Site, oracles: Oracles) -> None:
    """Two replicas hold 24 requests; 240 clients ask at once, again and again."""
    prompts = [f"crowd {n}" for n in range(6)]
    plain = {prompt: site.plain(prompt) for prompt in prompts}

    def ask(number: int) -> str:
        prompt = prompts[number % len(prompts)]
        response = site.client.post(COMPLETIONS, json=site.body(prompt))
        if response.status_code == 200:
            assert response.json()["choices"][0] == plain[prompt]
            return "right"
        oracles.error(response, 429, 503)
        assert int(response.headers["retry-after"]) >= 1
        return "refused"

    limits = httpx.Limits(max_connections=300)
    with (
        httpx.Client(
            base_url=site.client.base_url, headers=site.client.headers, timeout=120, limits=limits
        ) as crowd,
        ThreadPoolExecutor(240) as threads,
    ):
        usual, site.client = site.client, crowd
        try:
            came = list(threads.map(ask, range(960)))
        finally:
            site.client = usual
    assert came.count("right") > 24
    assert came.count("refused") > 0
    oracles.figure(f"of 960 requests, {came.count('right')} right, {came.count('refused')} refused")
    wait_for("room again", lambda: post(site).status_code == 200)
    oracles.freed({})
