"""Which store jobs and commands use."""

from retrieval.locations import store_url


def test_jobs_have_a_store_address_of_their_own(monkeypatch) -> None:
    """On a cluster, whoever publishes is another user of Valkey than the servers are."""
    monkeypatch.setenv("REDIS_URL", "redis://serving@host")
    assert store_url() == "redis://serving@host"
    monkeypatch.setenv("VALUSPEC_JOBS_REDIS_URL", "redis://jobs@host")
    assert store_url() == "redis://jobs@host"
    assert store_url("redis://given") == "redis://given"
