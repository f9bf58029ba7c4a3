"""The site all tests here share, and the oracles common to all cases."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.faults.site import Bystander, Site, wait_for

#: What must not show in an answer: a traceback, a path of ours, an address of memory.
_INTERNALS = re.compile(r"Traceback|File \"|\.py\b|/(?:root|home|tmp|usr|work)/|0x[0-9a-f]{6,}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last, as the site lives until the session ends: other tests start clusters of their own."""
    items.sort(key=lambda item: "site" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    site.start()
    yield site
    site.stop()


class Oracles:
    """Each check notes that it was asked, for the table."""

    def __init__(self, site: Site, item: pytest.Item) -> None:
        self._site = site
        self._item = item
        self.num_errors = 0

    def note(self, oracle: str) -> None:
        self._item.user_properties.append(("oracle", oracle))

    def figure(self, text: str) -> None:
        self._item.user_properties.append(("figure", text))

    def error(self, response: httpx.Response, *statuses: int) -> dict[str, str]:
        """The error of an answer that has to be one of these statuses."""
        assert response.status_code in statuses, (response.status_code, response.text)
        return self.error_text(response.text)

    def error_text(self, text: str) -> dict[str, str]:
        assert not _INTERNALS.search(text), text
        assert text.startswith("{"), text
        error: dict[str, str] = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}, text
        assert error["message"]
        self.note("silent")
        self.note("shaped")
        return error

    def counted(self, before: int, after: int, events: int) -> None:
        assert after - before == events
        self.note("counted")

    @contextmanager
    def beside(
        self,
        *,
        killed: int = 0,
        errors_allowed: bool = False,
        not_ours: tuple[str, ...] = (),
        patience_s: float = 90,
    ) -> Iterator[Bystander]:
        """Whatever happens inside, other requests get their bytes, and all is free afterwards.

        killed: Target replicas that the case ends; the others must be the same processes after it
        not_ours: beginnings of errors that Serve answers before it knows of the app
        """
        before = {p.pid for p in self._site.replicas()}
        files = {p.pid: p.num_files for p in self._site.replicas() + self._site.replicas("Gateway")}
        bystander = Bystander(self._site)
        bystander.start()
        try:
            yield bystander
        finally:
            bystander.stop()
        assert not bystander.wrong
        assert bystander.num_right > 0
        for text in bystander.errors:
            if not text.startswith(("connection:", *not_ours)):
                self.error_text(text)
        assert errors_allowed or not bystander.errors
        self.note("others")
        wait_for("both replicas", self._site.ready, patience_s)
        lost = before - {p.pid for p in self._site.replicas()}
        assert len(lost) <= killed, lost
        self.note("alive")
        self.freed(files)

    def freed(self, files: dict[int, int]) -> None:
        """Nothing is held by a request any more, and no process keeps many more files open."""

        def idle() -> bool:
            return all(
                stats["num_requests_unfinished"] == 0 and stats["kv_cache_usage"] == 0
                for stats in (self._site.client.get("/v1/valuspec/stats").json() for _ in range(6))
            )

        def closed() -> bool:
            now = self._site.replicas() + self._site.replicas("Gateway")
            return all(p.num_files <= files.get(p.pid, 1 << 20) + 24 for p in now)

        wait_for("slots and blocks", idle, 30)
        wait_for("open files", closed, 30)
        self.note("freed")


@pytest.fixture
def oracles(site: Site, request: pytest.FixtureRequest) -> Oracles:
    wait_for("a whole site", site.ready)
    return Oracles(site, request.node)
