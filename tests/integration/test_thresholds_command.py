"""`valuspec thresholds` on a real server's store."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from deployments.cli import main
from retrieval.embedded import EmbeddedValkey
from retrieval.locations import valkey_folder
from retrieval.threshold_store import Pointer, ThresholdStore
from tests.support.servers import admin
from tests.support.threshold_sets import set_like_shipped

MODEL = "aabbccdd"
A, B = (set_like_shipped(MODEL, note) for note in "ab")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory) -> Iterator[EmbeddedValkey]:
    """Where `valuspec serve` has its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VALUSPEC_CACHE", str(tmp_path_factory.mktemp("c")))
        with EmbeddedValkey(valkey_folder()) as server:
            yield server


@pytest.fixture
def thresholds(valkey, capsys):
    """Runs the command on an empty store; returns (exit code, stdout, stderr)."""
    with admin(valkey) as client:
        client.flushall()

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(["thresholds", *arguments])
        return code, *capsys.readouterr()

    return command


def pointer(valkey) -> Pointer | None:
    async def read() -> Pointer | None:
        store = ThresholdStore.at(valkey.url)
        try:
            return await store.pointer(MODEL)
        finally:
            await store.aclose()

    return asyncio.run(read())


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Files of A and B."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, made in zip(paths, (A, B), strict=True):
        path.write_text(made.to_json() + "\n")
    return [str(path) for path in paths]


def test_a_life_of_two_sets(thresholds, valkey, files, tmp_path) -> None:
    assert thresholds("import", files[0])[0] == 0
    assert pointer(valkey) is None
    assert "shipped set" in thresholds("show")[1]
    assert thresholds("activate", A.version[:6])[0] == 0
    assert thresholds("import", files[1], "--activate", "--reason", "better")[0] == 0
    now = pointer(valkey)
    assert (now.version, now.revision, now.previous, now.reason) == (
        B.version,
        2,
        A.version,
        "better",
    )
    code, out, _ = thresholds("show")
    assert code == 0
    assert f"active     {B.version}, revision 2: better" in out
    assert f"previous   {A.version}" in out
    assert "by hand" in out, "the history"
    assert 'note: "b"' in out, "the provenance"
    code, out, _ = thresholds("list")
    assert {line.split()[0]: line.split()[1] for line in out.splitlines()} == {
        A.version: "previous",
        B.version: "active",
    }
    assert thresholds("rollback")[0] == 0
    assert pointer(valkey).version == A.version
    code, _, err = thresholds("rollback")
    assert (code, "no_previous" in err) == (1, True)
    copy = tmp_path / "copy.json"
    assert thresholds("export", B.version, str(copy))[0] == 0
    assert copy.read_text() == B.to_json() + "\n"


def test_importing_twice_is_harmless(thresholds, files) -> None:
    thresholds("import", files[0])
    code, out, _ = thresholds("import", files[0])
    assert (code, "was kept already" in out) == (0, True)


def test_wrong_arguments_are_told_apart_from_failures(thresholds, valkey, files, tmp_path) -> None:
    code, _, err = thresholds("show")
    assert (code, "no set is kept for any model" in err) == (2, True)
    thresholds("import", files[0])
    other = tmp_path / "other.json"
    other.write_text(set_like_shipped("eeff", "c").to_json())
    thresholds("import", str(other))
    code, _, err = thresholds("list")
    assert (code, "--model" in err, "aabbccdd, eeff" in err) == (2, True, True)
    code, _, err = thresholds("activate", "zz", "--model", MODEL)
    assert (code, "zz fits no set" in err) == (2, True)
    code, _, err = thresholds("import", files[0], "--model", "eeff")
    assert (code, "is of model aabbccdd" in err) == (2, True)
    other.write_text("{}")
    code, _, err = thresholds("import", str(other))
    assert (code, "schema" in err) == (1, True)
    code, _, err = thresholds("show", "--redis-url", "redis://127.0.0.1:1")
    assert (code, "unreachable" in err) == (1, True)


def test_a_set_that_replicas_would_refuse_is_not_activated(thresholds, valkey, files) -> None:
    thresholds("import", files[0])
    with admin(valkey) as client:
        client.set(f"vs:thresholds:{A.version}", A.to_json().replace('"tau":0', '"tau":7'))
    assert thresholds("activate", A.version)[0] == 1
    assert pointer(valkey) is None
    assert "unusable" in thresholds("list")[1]


def test_activating_mends_a_damaged_pointer(thresholds, valkey, files) -> None:
    thresholds("import", files[0], "--activate")
    with admin(valkey) as client:
        client.set(f"vs:thresholds:active:{MODEL}", "garbage")
    code, _, err = thresholds("show")
    assert (code, "not a pointer" in err or "protocol" in err) == (1, True)
    assert thresholds("activate", A.version)[0] == 0
    assert pointer(valkey).version == A.version


def test_without_a_store_it_says_how_to_name_one(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path / "nothing"))
    assert main(["thresholds", "list"]) == 2
    assert "--redis-url" in capsys.readouterr().err


def test_a_server_is_asked_over_http(url, capsys) -> None:
    assert main(["thresholds", "show", "--url", url, "--api-key", "k"]) == 0
    assert json.loads(capsys.readouterr().out) == {"key": "Bearer k"}
    assert main(["thresholds", "show", "--url", f"{url}/missing"]) == 1
    assert "404" in capsys.readouterr().err


@pytest.fixture
def url() -> Iterator[str]:
    """A server that answers the route with the key it was given."""
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/v1/valuspec/thresholds"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"key": self.headers["authorization"]}).encode())

        def log_message(self, *_) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
