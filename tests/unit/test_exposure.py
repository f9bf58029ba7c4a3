"""No keys, no strangers: when a server may listen where others can reach it."""

import pytest

from deployments.auth import ApiKeys
from deployments.exposure import ExposedError, check_exposure, check_host

KEYS = ApiKeys(["acme:key"])
NO_KEYS = ApiKeys([])
TOKEN = {"RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_may_always_ask(host) -> None:
    check_exposure(host, NO_KEYS, insecure=False, environment={})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", None])
@pytest.mark.parametrize(
    ("keys", "environment", "missing"),
    [
        (NO_KEYS, TOKEN, "no API keys"),
        (KEYS, {}, "no Ray's token"),
        (KEYS, {"RAY_AUTH_MODE": "disabled"}, "no Ray's token"),
        (NO_KEYS, {}, "no API keys .* and no Ray's token"),
    ],
)
def test_others_may_only_with_keys_and_a_token(host, keys, environment, missing) -> None:
    with pytest.raises(ExposedError, match=missing):
        check_exposure(host, keys, insecure=False, environment=environment)
    check_exposure(host, keys, insecure=True, environment=environment)
    check_exposure(host, KEYS, insecure=False, environment=TOKEN)


def test_two_hosts_are_none() -> None:
    one = (b"host", b"a.example")
    assert check_host([one], local_only=False) is None
    assert check_host([], local_only=True) is None
    wrong = check_host([one, (b"host", b"b.example")], local_only=False)
    assert wrong is not None
    assert wrong.status == 400
