"""API keys and the tenants they belong to.

A key file (or variable) holds one entry per line (or comma): `tenant:key`, or a bare key, whose
tenant is a digest of the key. The tenant decides which stored draft trees a request may see, so
it never comes from a field the client can set.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request

from deployments.errors import ApiError

#: Tenant of every request when no keys are configured.
OPEN_TENANT = "default"
#: The tenant who may ask what concerns all of them.
OPERATOR = "operator"


class ApiKeys:
    """Known keys, kept as digests. Empty means the server is open."""

    def __init__(self, entries: list[str]) -> None:
        self._tenants: list[tuple[bytes, str]] = []
        for entry in entries:
            tenant, colon, key = entry.partition(":")
            if not colon:
                tenant, key = "", entry
            if not key or (colon and not tenant):
                raise ValueError("an API key entry must be 'tenant:key' or 'key', both not empty")
            if "#" in tenant:  # divides a tenant's name from its requests' cache_salt
                raise ValueError(f"the tenant name {tenant!r} must not hold a '#'")
            digest = _digest(key)
            self._tenants.append((digest, tenant or digest.hex()[:16]))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ApiKeys:
        """Read VALUSPEC_API_KEYS and VALUSPEC_API_KEYS_FILE. Raises OSError, ValueError.

        A key variable that is set but holds no key is an error: a typing mistake must not open
        the server.
        """
        entries: list[str] = []
        if "VALUSPEC_API_KEYS" in environment:
            entries += environment["VALUSPEC_API_KEYS"].split(",")
        if path := environment.get("VALUSPEC_API_KEYS_FILE"):
            entries += Path(path).read_text(encoding="utf-8").splitlines()
        configured = "VALUSPEC_API_KEYS" in environment or "VALUSPEC_API_KEYS_FILE" in environment
        entries = [e.strip() for e in entries if e.strip() and not e.strip().startswith("#")]
        if configured and not entries:
            raise ValueError(
                "VALUSPEC_API_KEYS or VALUSPEC_API_KEYS_FILE is set but holds no key; "
                "unset both to serve without keys"
            )
        return cls(entries)

    def tenant_of(self, key: str) -> str | None:
        """Tenant of `key`, or None. Compares with every key, so timing tells nothing."""
        found = None
        digest = _digest(key)
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def __bool__(self) -> bool:
        return bool(self._tenants)

    async def require(self, request: Request) -> str:
        """Route dependency: the tenant of the request, or 401."""
        if not self:
            return OPEN_TENANT
        header = request.headers.getlist("authorization")
        scheme, _, key = header[0].partition(" ") if len(header) == 1 else ("", "", "")
        tenant = self.tenant_of(key.strip()) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise ApiError(
                401,
                "Missing or incorrect API key. Send 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )
        return tenant

    def require_operator(self, tenant: str) -> None:
        """Raise ApiError 403 for any tenant but the operator, where there are tenants."""
        if self and tenant != OPERATOR:
            raise ApiError(
                403, f"Only the tenant {OPERATOR!r} may ask this.", code="insufficient_permissions"
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
