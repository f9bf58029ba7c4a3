"""The Valkey server that starts where nobody runs Redis."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from retrieval.embedded import EmbeddedValkey, EmbeddedValkeyError
from retrieval.locations import NoStoreError, store_url, valkey_folder
from tests.support.servers import admin


@pytest.fixture
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


def test_one_server_per_folder(tmp_path: Path) -> None:
    with (
        EmbeddedValkey(tmp_path),
        pytest.raises(EmbeddedValkeyError, match="in use by another"),
    ):
        EmbeddedValkey(tmp_path).start()


def test_listens_on_no_network_address(valkey: EmbeddedValkey) -> None:
    with admin(valkey) as client:
        settings = client.config_get("*")
    assert settings["port"] == "0"
    assert settings["maxmemory-policy"] == "volatile-lfu"
    socket = Path(valkey.url.removeprefix("unix://"))
    assert socket.stat().st_mode & 0o077 == 0


def test_a_temporary_folder_goes_with_its_server() -> None:
    with EmbeddedValkey() as valkey:
        folder = Path(valkey.url.removeprefix("unix://")).parent
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(EmbeddedValkeyError, match="not running"):
        _ = valkey.url


def test_a_folder_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedValkeyError, match="too long for a unix socket"):
        EmbeddedValkey(tmp_path / ("x" * 100)).start()


def test_the_server_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    """Its owner had no chance to stop it; two servers must not write to one folder."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from retrieval.embedded import EmbeddedValkey\n"
        "print(EmbeddedValkey(Path(sys.argv[1])).start().pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    orphan = int(owner.stdout.readline())
    with Redis.from_url(f"unix://{tmp_path / 'valkey.sock'}") as client:
        client.set("kept", "yes")
        owner.kill()
        owner.communicate()
        assert client.info("server")["process_id"] == orphan  # it lives on
        with EmbeddedValkey(tmp_path) as valkey, admin(valkey) as fresh:
            assert valkey.pid != orphan
            assert fresh.get("kept") == b"yes"
            # The old connection leads to no second server: it is dead, or it is the new one's.
            assert client.info("server")["process_id"] == valkey.pid


def test_commands_find_the_server_that_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path))
    with pytest.raises(NoStoreError, match="valuspec serve"):
        store_url()
    with EmbeddedValkey(valkey_folder()) as valkey:
        assert store_url() == valkey.url
        monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
        assert store_url() == "redis://elsewhere"
        assert store_url("redis://given") == "redis://given"
    monkeypatch.delenv("REDIS_URL")
    with pytest.raises(NoStoreError, match="--redis-url"):
        store_url()
