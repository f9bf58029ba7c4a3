import asyncio

import pytest
from starlette.requests import Request

from deployments.auth import OPEN_TENANT, ApiKeys
from deployments.errors import ApiError


def tenant_for(keys: ApiKeys, *headers: str) -> str:
    raw = [(b"authorization", header.encode()) for header in headers]
    request = Request({"type": "http", "headers": raw})
    return asyncio.run(keys.require(request))


def test_without_keys_everybody_is_the_open_tenant() -> None:
    assert tenant_for(ApiKeys.from_environment({})) == OPEN_TENANT


def test_the_tenant_belongs_to_the_key() -> None:
    keys = ApiKeys.from_environment({"VALUSPEC_API_KEYS": "acme:k1, acme:k2 ,globex:k3"})
    assert [tenant_for(keys, f"Bearer {k}") for k in ("k1", "k2", "k3")] == [
        "acme",
        "acme",
        "globex",
    ]


def test_bare_keys_have_tenants_of_their_own_that_do_not_show_the_key() -> None:
    keys = ApiKeys(["secret-one", "secret-two"])
    one, two = tenant_for(keys, "Bearer secret-one"), tenant_for(keys, "Bearer secret-two")
    assert one != two
    assert "secret" not in one + two
    assert one == tenant_for(ApiKeys(["secret-one"]), "Bearer secret-one"), "stable over restarts"


def test_a_key_file_may_have_comments_and_blank_lines(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("# operators\n\nacme:k1\n  k2  \n")
    keys = ApiKeys.from_environment({"VALUSPEC_API_KEYS_FILE": str(path)})
    assert tenant_for(keys, "Bearer k1") == "acme"
    assert tenant_for(keys, "Bearer k2")


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("",),
        ("Bearer",),
        ("Bearer ",),
        ("Bearer wrong",),
        ("Bearer key2",),
        ("Basic key",),
        ("key",),
        ("Bearer key", "Bearer key"),  # two headers: which one a proxy checked is unknown
        ("Bearer acme:key",),
    ],
)
def test_anything_but_one_right_bearer_header_is_refused(headers) -> None:
    with pytest.raises(ApiError) as refused:
        tenant_for(ApiKeys(["acme:key"]), *headers)
    assert refused.value.status == 401
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize("value", ["", " , ", "# only a comment"])
def test_a_key_variable_without_keys_does_not_open_the_server(value) -> None:
    with pytest.raises(ValueError, match="holds no key"):
        ApiKeys.from_environment({"VALUSPEC_API_KEYS": value})


@pytest.mark.parametrize("entry", [":key", "tenant:", ":"])
def test_half_an_entry_is_an_error(entry) -> None:
    with pytest.raises(ValueError, match="must be"):
        ApiKeys([entry])


def test_a_tenant_cannot_be_named_like_a_salted_one() -> None:
    with pytest.raises(ValueError, match="'acme#1' must not hold"):
        ApiKeys(["acme#1:key"])
