"""Which target replica gets a request: one that has seen its beginning, unless that one is busy.

A replica that has answered requests of a session, or ones that begin alike, holds their keys and
values and their draft sources. Each request has a key; rendezvous hashing (Thaler and Ravishankar
1998) ranks the replicas for it, so all routers agree without talking, and a replica that comes or
goes moves only its own share of the keys. The first replica of the ranking that is not overloaded
is taken, as in consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Set
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.messages import GenerateCall, ReplicaName

PREFIX_CHARS = 256
PREFIX_IDS = 64
"""Requests that agree in so much of their text, or in so many token ids, have the same key."""
BALANCE = 1.25
"""A replica without a free place may still be this much fuller than the mean."""


def routing_key(call: GenerateCall) -> bytes:
    """Equal for requests of one session, and else for requests that begin alike; per tenant.

    Of a chat, the messages up to the first of the user count: they stay while the chat goes on.
    """
    if call.session is not None:
        return _digest("session", call.tenant, call.session)
    if call.messages is not None:
        opening = []
        for message in call.messages:
            opening += [message["role"], message["content"]]
            if message["role"] == "user":
                opening[-1] = opening[-1][:PREFIX_CHARS]
                break
        return _digest("chat", call.tenant, *opening)
    first = call.prompts[0] if call.prompts else ""
    if isinstance(first, str):
        return _digest("text", call.tenant, first[:PREFIX_CHARS])
    return _digest("ids", call.tenant, *map(str, first[:PREFIX_IDS]))


def preferred(
    key: bytes, queue_lengths: Mapping[str, int], *, places: int, avoided: Set[str] = frozenset()
) -> list[str]:
    """Replicas in the order to try them.

    queue_lengths: requests at each replica, by its id
    places:        requests a replica decodes together; below it nobody waits
    avoided:       replicas to try when all others are full
    """
    if not queue_lengths:
        return []
    ranked = sorted(queue_lengths, key=lambda replica: _digest(replica, key), reverse=True)
    mean = (sum(queue_lengths.values()) + 1) / len(queue_lengths)
    limit = max(places, math.ceil(BALANCE * mean))
    fitting = [replica for replica in ranked if queue_lengths[replica] < limit]
    crowded = [replica for replica in ranked if queue_lengths[replica] >= limit]
    order = fitting + sorted(crowded, key=lambda replica: queue_lengths[replica])
    return sorted(order, key=lambda replica: replica in avoided)


def _digest(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


class AffinityRouter(RequestRouter):
    """Serve's request router of the Target deployment. Calls that neither name a replica nor begin
    a generation go to the replica with the shortest queue."""

    def initialize_state(self, *, places: int = 1, **_: Any) -> None:
        """Serve's hook. places: see `preferred`."""
        self._places = places

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Serve's hook: groups of replicas in the order to try; of a group, the least busy."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        # Between two rounds in which every replica was full, wait a little.
        pending_request.routing_context.should_backoff = True
        call = pending_request.args[0] if pending_request.args else None
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if isinstance(call, ReplicaName) and call.unique_id in replicas:
            return [[replicas[call.unique_id]]]
        if not isinstance(call, GenerateCall):
            return [candidate_replicas]
        lengths = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in replicas.items()
        }
        avoided = {replica.unique_id for replica in call.avoided}
        order = preferred(routing_key(call), lengths, places=self._places, avoided=avoided)
        return [[replicas[name]] for name in order]
