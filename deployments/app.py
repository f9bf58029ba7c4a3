"""The Serve app: a request's way through it, and the graph.

1. gateway: authenticates, validates, streams
2. target replica: renders the chat template, admits the request, and once per request asks
   retrieval, by way of valuation, for draft trees (beside prefill, deadline 50 ms, a miss is
   normal)
3. every engine step, in process: draft sources -> candidate tree -> values -> keep -> one target
   forward -> accept + bonus token -> commit keys and values
4. telemetry and draft-tree write-back: off the path, never blocking

Beside all requests, target replicas and valuation poll retrieval for published threshold sets.

No call leaves the replica during a step: a call costs 0.5 to 2 ms, a step a few. With
tensor_parallel_size, a replica is several processes that compute each step together (ranks.py).
"""

# No `from __future__ import annotations`: see deployments.settings.
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.admission import MAX_OPEN_REQUESTS
from deployments.gateway import Gateway
from deployments.ranks import ShardedTargetReplica
from deployments.retrieval import Retrieval
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from deployments.valuation import Valuation

#: These deployments wait more than they compute; a CPU reserved for each would not fit a laptop.
_NO_CPU = {"num_cpus": 0}
#: What a replica that goes may take to finish the streams it is in.
_LEAVE_S = 120


def build_app(args: AppArgs) -> Application:
    """Gateway -> target replicas -> valuation <- retrieval."""
    # Which sets to follow. Here a change reaches running replicas; in args it would restart them.
    thresholds = {"threshold_file": args.threshold_file}
    capacity = args.max_batch_size + args.max_waiting

    retrieval = serve.deployment(
        name="Retrieval",
        num_replicas=args.num_retrieval_replicas,  # each has an index, which follows the store
        max_ongoing_requests=256,
        ray_actor_options=_NO_CPU,
        logging_config={"enable_access_log": False},  # every replica polls every few seconds
    )(Retrieval).bind(args)
    valuation = serve.deployment(
        name="Valuation",
        user_config=thresholds,
        max_ongoing_requests=256,
        ray_actor_options=_NO_CPU,
    )(Valuation).bind(retrieval if args.retrieval else None)
    num_gpus = 1 if args.device == "cuda" else 0
    ranks: dict[str, Any] = {}
    if args.tensor_parallel_size > 1:
        # They come and go together, and on one node: they talk in every layer.
        bundle = {"CPU": 1, "GPU": 1} if num_gpus else {"CPU": 1}
        ranks["placement_group_bundles"] = [bundle] * args.tensor_parallel_size
        ranks["placement_group_strategy"] = "STRICT_PACK"
    target = serve.deployment(
        name="Target",
        num_replicas=args.num_replicas,
        user_config=thresholds,
        # The replica refuses what exceeds its capacity itself; this leaves it room to. What a full
        # queue refuses is Serve's BackPressureError, which deployments.port turns into ours.
        max_ongoing_requests=capacity + 16,
        max_queued_requests=capacity,
        ray_actor_options={"num_cpus": 1, "num_gpus": num_gpus},
        **ranks,
        request_router_config={
            "request_router_class": "deployments.routing:AffinityRouter",
            "request_router_kwargs": {"places": args.max_batch_size},
        },
        health_check_period_s=5,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=_LEAVE_S,
    )(ShardedTargetReplica if ranks else TargetReplica).bind(
        args, retrieval if args.retrieval else None, valuation
    )
    app: Application = serve.deployment(
        name="Gateway",
        # Admission refuses far below this, and the proxy's queue has no limit: a refusal of the
        # proxy's would not be in OpenAI's form.
        max_ongoing_requests=16 * MAX_OPEN_REQUESTS,
        ray_actor_options=_NO_CPU,
        graceful_shutdown_timeout_s=_LEAVE_S,
    )(serve.ingress()(Gateway)).bind(args, target, valuation)
    return app
