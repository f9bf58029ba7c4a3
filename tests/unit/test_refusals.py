"""What one refusal spares those that come next, over an app that says what reached it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from deployments.errors import FULL_HEADER, busy
from deployments.refusals import HOLD_S, HeldRefusals, middlewares

FULL, OTHER = "/v1/completions", "/v1/chat/completions"


class Site:
    """Every route answers what `answer` says; `asked` has the paths that reached the app."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.answer: Response = JSONResponse("answered")
        app = Starlette()
        for path in (FULL, OTHER):
            app.add_route(path, self._route, methods=["GET", "POST"])
        self.client = TestClient(HeldRefusals(app, clock=lambda: self.now))

    async def _route(self, request: Request) -> Response:
        self.asked.append(request.url.path)
        return self.answer

    def refuse(self, *, full: bool) -> None:
        """Have the app refuse one request to FULL, and answer all that follow."""
        refusal = busy()
        refusal.full = full
        self.answer = refusal.response()
        assert self.client.post(FULL).status_code == 429
        self.asked.clear()
        self.answer = JSONResponse("answered")


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with site.client:
        yield site


def test_a_refusal_holds_for_a_moment(site: Site) -> None:
    site.refuse(full=True)
    site.now = HOLD_S * 0.99
    assert [site.client.post(FULL).status_code for _ in range(3)] == [429] * 3
    assert site.asked == []
    site.now = HOLD_S
    assert site.client.post(FULL).status_code == 200
    assert site.asked == [FULL]


def test_what_is_held_looks_like_any_refusal(site: Site) -> None:
    site.refuse(full=True)
    held = site.client.post(FULL, headers={"x-request-id": "abc-1"})
    assert held.json() == busy().body()
    assert int(held.headers["retry-after"]) > 0
    assert held.headers.get_list("x-request-id") == ["abc-1"]
    assert len(site.client.post(FULL).headers["x-request-id"]) == 32


def test_other_routes_and_methods_go_through(site: Site) -> None:
    site.refuse(full=True)
    assert site.client.post(OTHER).status_code == 200
    assert site.client.get(FULL).status_code == 200
    assert site.asked == [OTHER, FULL]


def test_a_refusal_for_reasons_of_its_own_holds_for_nobody_else(site: Site) -> None:
    site.refuse(full=False)
    assert site.client.post(FULL).status_code == 200


def test_the_marked_header_is_found_however_it_is_written(site: Site) -> None:
    site.answer = JSONResponse("full", 429)
    site.answer.raw_headers.append((FULL_HEADER.title(), b"1"))  # as it is, unlike `headers`
    site.client.post(FULL)
    site.answer = JSONResponse("answered")
    assert site.client.post(FULL).status_code == 429


def test_serve_gets_it_as_a_middleware() -> None:
    (middleware,) = middlewares()
    assert middleware.cls is HeldRefusals
