"""Who may reach the server, and under which name.

A server without keys answers everybody who can connect, so it must not listen beyond this machine;
and without Ray's token, whoever reaches Ray's ports runs code. On this machine a browser is the way
in: a page may point a name of its own at 127.0.0.1 and ask in its visitor's place (DNS rebinding),
but cannot help sending that name.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping

from deployments.auth import ApiKeys
from deployments.errors import ApiError
from valuspec.errors import ValuSpecError

#: A name or IPv4 address, or an IPv6 address in brackets, and perhaps a port.
_HOST = re.compile(rb"(?P<name>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")


class ExposedError(ValuSpecError):
    """The server would be open to others; the message says to whom and what to do."""


def check_exposure(
    host: str | None,
    keys: ApiKeys,
    *,
    insecure: bool,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise ExposedError if a server at `host` lacks API keys or Ray's token. None is any address.

    Raises OSError if the host has no address.
    """
    if insecure or (host is not None and _is_loopback(host)):
        return
    missing = []
    if not keys:
        missing.append("API keys (VALUSPEC_API_KEYS or VALUSPEC_API_KEYS_FILE)")
    if environment.get("RAY_AUTH_MODE") != "token":
        missing.append("Ray's token authentication (RAY_AUTH_MODE=token)")
    if missing:
        raise ExposedError(
            f"{host or 'every address'} can be reached from other machines, and there is no "
            f"{' and no '.join(missing)}. Set what is missing, listen on 127.0.0.1, or say that "
            "it is meant (valuspec serve --insecure; `insecure: true` among the app's arguments)"
        )


def check_host(headers: Iterable[tuple[bytes, bytes]], *, local_only: bool) -> ApiError | None:
    """What is wrong with a request's Host headers, if anything.

    local_only: refuse names that are not this machine's; an address cannot be rebound
    """
    hosts = [value for name, value in headers if name == b"host"]
    matches = [_HOST.fullmatch(host) for host in hosts]
    if len(hosts) > 1 or not all(matches):
        return ApiError(400, "The Host header is not a host name.", code="invalid_host")
    for match in matches:
        assert match is not None
        if local_only and not _is_own_name(match["name"].decode()):
            return ApiError(421, "This server is not known by that name.", code="unknown_host")
    return None


def _is_own_name(name: str) -> bool:
    if name.lower().removesuffix(".") == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
