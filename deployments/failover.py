"""One stream of replies to a call, whichever replicas it takes.

A lost replica's work is not lost: the tokens sent so far are known here, greedy choices depend on
them alone, and the draws of a sampled answer are keyed by (seed, position). So another replica
takes them in as it would a prompt, and the stream goes on behind them with the bytes it would have
had (with `exact: true`; without, it is as reproducible as anything is then).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from deployments.errors import ApiError
from deployments.inbox import NotTakenError, ReplicaLostError
from deployments.messages import Delta, GenerateCall, Reply
from deployments.port import TargetPort

logger = logging.getLogger(__name__)

#: Replicas lost in a row without a new token. More would let one request end replica after replica.
MAX_LOST_IN_A_ROW = 2


async def generate_through_losses(
    target: TargetPort, call: GenerateCall, *, timeout_s: float
) -> AsyncGenerator[Reply]:
    """`target.generate`, going on with another replica where one is lost.

    Waits for one that is ready, and raises ApiError 504 when timeout_s have passed since the call.
    Raises ReplicaLostError after MAX_LOST_IN_A_ROW.
    """
    deadline = time.monotonic() + timeout_s
    sent: dict[int, list[int]] = {index: [] for index in range(call.num_choices)}
    num_lost = 0
    while sent:
        replies = target.generate(call)
        try:
            while True:
                if call.resumed is None:  # a replica keeps to the limit itself
                    reply = await anext(replies)
                else:  # but the wait for a new one must end as well
                    async with asyncio.timeout(deadline - time.monotonic()):
                        reply = await anext(replies)
                if isinstance(reply, Delta):
                    num_lost = 0
                    sent[reply.index] += reply.token_ids
                    if reply.finish_reason is not None:
                        del sent[reply.index]
                yield reply
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(
                504, f"Not finished within {timeout_s:g} s; a replica was lost.", code="timeout"
            ) from None
        except NotTakenError:
            logger.warning("request %s: no replica has taken it yet", call.request_id)
        except ReplicaLostError:
            num_lost += 1
            logger.warning(
                "request %s lost its replica after %d tokens of %d unfinished choices",
                call.request_id,
                sum(map(len, sent.values())),
                len(sent),
            )
            if num_lost == MAX_LOST_IN_A_ROW:
                raise
        finally:
            await replies.aclose()
        call = replace(call, resumed={index: tuple(ids) for index, ids in sent.items()})
