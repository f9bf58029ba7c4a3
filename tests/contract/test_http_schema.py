"""Every route, asked with what its OpenAPI schema allows and with what it does not.

Schemathesis makes the requests. Whatever they hold, an answer is a success or an error of OpenAI's
shape, never a 500, and shows nothing of the inside. `make schemathesis` asks a thousand times each.
"""

import copy
import json
import os
import re
from collections.abc import Iterator

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.generation import GenerationMode

from deployments.auth import ApiKeys
from deployments.gateway import create_app
from deployments.settings import AppArgs
from tests.support.fake_port import InProcessPort

NUM_EXAMPLES = int(os.environ.get("VALUSPEC_SCHEMATHESIS_EXAMPLES", "5"))
ARGS = AppArgs(model="fake", max_body_bytes=1 << 16)
INSIDE = re.compile(r"Traceback|File \\?\"|\.py\b|site-packages|0x[0-9a-f]{6,}")
"""What a body shows only if it tells of our code."""
_app = create_app(InProcessPort(ARGS), ARGS, ApiKeys([]))
SCHEMA = _app.openapi()
OPERATIONS = {
    f"{operation.method.upper()} {operation.path}": operation
    for result in schemathesis.openapi.from_dict(copy.deepcopy(SCHEMA)).get_all_operations()
    for operation in [result.ok()]
}
RAW_TEXT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
"""JSON as Python writes it: NaN, lone surrogates, NUL and all."""


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    port = InProcessPort(ARGS)
    app = create_app(port, ARGS, ApiKeys([]))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
    port.replica._loop.stop()


def some(num_examples: int = NUM_EXAMPLES):
    """Random requests, the same ones in each run; no shrinking, for the request is printed."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def check(response, sent: object) -> None:
    shown = f"{sent!r:.500} -> {response.status_code} {response.text:.500}"
    assert response.status_code < 500, shown
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, shown
        assert not INSIDE.search(error["message"]) or INSIDE.search(repr(sent)), shown
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_request_breaks_a_route(client, name, mode) -> None:
    operation = OPERATIONS[name]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        assert client.get(operation.path, params={"a": "b"}).status_code in (200, 404)
        return  # nothing to be wrong about

    @some()
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        sent = {
            key: value
            for key, value in case.as_transport_kwargs(base_url="http://testserver").items()
            if key in ("method", "url", "params", "headers", "json", "data", "content")
            and value is not None
        }
        if isinstance(data := sent.pop("data", None), bytes | str):
            sent["content"] = data
        check(client.request(**sent), sent)

    ask()


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name.startswith("POST")])
def test_no_json_breaks_a_route(client, name) -> None:
    """Fields of the right name with anything in them, as Python's own json would read it."""
    path = OPERATIONS[name].path
    (media_type,) = SCHEMA["paths"][path]["post"]["requestBody"]["content"].values()
    model = media_type["schema"]["$ref"].rpartition("/")[2]
    fields = sorted(SCHEMA["components"]["schemas"][model]["properties"])

    @some()
    @given(st.dictionaries(st.sampled_from(fields), RAW_TEXT, min_size=1), st.booleans())
    def ask(body: dict[str, object], ascii_only: bool) -> None:
        text = json.dumps({"max_tokens": 2} | body, ensure_ascii=ascii_only)
        content = text.encode("utf-8", "surrogatepass")
        headers = {"content-type": "application/json"}
        check(client.post(path, content=content, headers=headers), content)

    ask()


def test_every_route_is_asked() -> None:
    routes = {route.path for route in _app.routes} - {"/health"}
    assert {name.partition(" ")[2] for name in OPERATIONS} == {
        path.replace(":path", "") for path in routes
    }
