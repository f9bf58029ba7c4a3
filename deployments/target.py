"""The target replica: one engine, the thread that steps it, and a stream for each call.

Nothing here waits for retrieval or storage. A lookup starts when a request is admitted, and its
trees join the request whenever they arrive; finished answers are stored by a task of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.autoscaling import LOAD_METRIC, load
from deployments.choices import Choice, make_choices
from deployments.drafts import DraftStore
from deployments.engine_loop import EngineLoop
from deployments.loading import Engine, Target, load_engine
from deployments.local_costs import LocalCosts
from deployments.messages import (
    ChoiceReport,
    Delta,
    GenerateCall,
    Message,
    ModelCard,
    Refusal,
    ReplicaName,
    Reply,
)
from deployments.outbox import Addressed, Outboxes
from deployments.replica_log import ReplicaLog
from deployments.replica_thresholds import ReplicaThresholds
from deployments.settings import AppArgs
from deployments.telemetry import Telemetry
from valuspec.engine.types import RequestStats, StepOutput
from valuspec.errors import RequestError

logger = logging.getLogger(__name__)

#: A step that takes longer means a hung engine; the prefill of a long prompt on a CPU does not.
STALLED_AFTER_S = 120.0
#: Nodes of stored trees a replica reads before its first request: half of the shared store.
WARM_NODES = 1 << 17


class TargetReplica:
    """Hosts the target model. Capacity is max_batch_size running plus max_waiting queued."""

    def __init__(
        self,
        args: AppArgs,
        retrieval: DeploymentHandle[Any] | None,
        valuation: DeploymentHandle[Any] | None,
        load: Callable[[AppArgs], tuple[Target, Engine]] = load_engine,
    ) -> None:
        self._args = args
        self._telemetry = Telemetry()

        def load_engine_and_target() -> Engine:  # on the thread that steps the engine
            from valuspec.engine import team  # and torch, which building the graph does without

            self._target, engine = load(args)
            if args.device == "cpu":  # beside a GPU one thread does all, on whichever core
                team.bind()
            return engine

        self._loop = EngineLoop(load_engine_and_target, post=self._post)
        self._engine = self._loop.engine
        self._log = ReplicaLog(args, self._target, self._telemetry)
        self._costs = LocalCosts(self._engine, self._loop, refreshed=self._log.use_costs)
        self._thresholds = ReplicaThresholds(
            self._target.model_fingerprint,
            retrieval,
            self._telemetry,
            swap=self._costs.use,
            plain_step_s=lambda *step: self._engine.thresholds.plain_step_s(*step),
        )
        self._drafts: DraftStore | None = None
        if retrieval is not None and valuation is not None:
            self._drafts = DraftStore(
                retrieval,
                valuation,
                self._telemetry,
                model_fingerprint=self._target.model_fingerprint,
                vocab_size=self._target.vocab_size,
                k=args.retrieval_k,
                deadline_s=args.retrieval_deadline_s,
            )
        self._name = _replica_name()
        self._outboxes = Outboxes(args.stream_interval_s)
        self._warmed = False
        self._num_unfinished = 0
        self._open_calls: dict[int, dict[str, Choice]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None  # known from the first call on
        self._loaded_at = int(time.time())
        self._telemetry.gauge("valuspec_exact", float(self._target.exact))
        if not self._target.exact:
            logger.error("output identity could NOT be proved on this machine (exact: false)")

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook, at the start and for each change: which threshold set to use, and whom
        not to log."""
        self._log.reconfigure(user_config)
        self._thresholds.apply(user_config)
        await self._thresholds.follow()
        if self._drafts is not None and not self._warmed:
            # Serve sends requests only once this hook has returned.
            self._warmed = True
            recent = await self._drafts.recent(WARM_NODES)
            self._loop.run(lambda: self._engine.remember(recent))

    def check_health(self) -> None:
        """Serve's hook: raise when the engine makes no progress, to be replaced by Serve."""
        self._loop.check(stalled_after_s=STALLED_AFTER_S)
        # Every few seconds: answers grow, and autoscaling, which would ask, may be off.
        self._telemetry.gauge("valuspec_load", self._load())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook, called periodically: what `deployments.autoscaling` decides by."""
        return {LOAD_METRIC: self._load()}

    def _load(self) -> float:
        # Copies, as Serve may be told to call its hooks from threads.
        choices = [one for call in list(self._open_calls.values()) for one in list(call.values())]
        num_tokens = sum(len(c.request.prompt_ids) + len(c.output_ids) for c in choices)
        max_batch_size, kv_tokens = self._args.max_batch_size, self._engine.kv_tokens
        return load(len(choices), num_tokens, max_batch_size=max_batch_size, kv_tokens=kv_tokens)

    async def begin(
        self, call: GenerateCall, gateway: str, key: str
    ) -> AsyncGenerator[ReplicaName]:
        """Answer a call by way of its gateway's outbox, under `key`: yield who has taken it, and
        end when the gateway has all of it. Closing it cancels the call."""
        with self._outboxes.of(gateway) as outbox, outbox.call(key):
            yield self._name
            async with contextlib.aclosing(self.generate(call)) as replies:
                async for reply in replies:
                    outbox.put(key, reply)
            outbox.put(key, None)
            await outbox.taken()

    async def replies(self, replica: ReplicaName, gateway: str) -> AsyncGenerator[list[Addressed]]:
        """Replies to all calls of a gateway that this replica has taken, for as long as there are
        any. Raises LookupError where the gateway means another replica."""
        if replica != self._name:
            raise LookupError(f"{replica.unique_id} is gone")
        with self._outboxes.of(gateway) as outbox:
            async for batch in outbox.batches():
                yield batch

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
        """Stream a call: one Refusal, or the Deltas of all choices. Closing it cancels them.

        A Refusal comes after Deltas when the request's time is up.
        """
        started = time.monotonic()
        num_choices = call.num_choices if call.resumed is None else len(call.resumed)
        if self._num_unfinished + num_choices > self._args.max_batch_size + self._args.max_waiting:
            self._telemetry.count("valuspec_requests_refused", status="429")
            yield Refusal(
                status=429,
                message=f"The replica is at capacity ({self._num_unfinished} unfinished).",
                code="overloaded",
                retry_after_s=1,
            )
            return
        # Counted before they are tokenised: whoever finds no place learns it at once, and two that
        # come together cannot both take the last one.
        self._count_unfinished(num_choices)
        try:
            choices = await asyncio.to_thread(make_choices, call, self._target, self._engine)
        except BaseException as error:
            self._count_unfinished(-num_choices)
            if not isinstance(error, RequestError):
                raise
            self._telemetry.count("valuspec_requests_refused", status="400")
            chat = call.messages is not None and error.param == "prompt"
            param = "messages" if chat else error.param
            yield Refusal(status=400, message=str(error), param=param, code=error.code)
            return
        outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._event_loop = asyncio.get_running_loop()
        by_id = {choice.request.request_id: choice for choice in choices}
        unfinished = dict(by_id)
        self._open_calls[id(unfinished)] = unfinished

        def deliver(output: StepOutput) -> None:
            # Here, not where the client takes it: one who reads slowly must hold no place.
            if output.finish_reason is not None and output.request_id in unfinished:
                del unfinished[output.request_id]
                self._count_unfinished(-1)
            outputs.put_nowait(output)

        self._loop.submit([choice.request for choice in choices], deliver)
        lookups = self._start_lookups(choices)
        deadline = started + self._args.request_timeout_s
        try:
            while by_id:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        output = await outputs.get()
                except TimeoutError:
                    self._telemetry.count("valuspec_requests_refused", status="504")
                    yield Refusal(
                        status=504,
                        message=f"Not finished within {self._args.request_timeout_s:g} s, waiting "
                        "included. Lower max_tokens, or try again when there is less to do.",
                        code="timeout",
                    )
                    return
                choice = by_id[output.request_id]
                if output.finish_reason is not None:
                    del by_id[output.request_id]
                yield self._delta(choice, output, started)
        finally:
            for lookup in lookups:
                lookup.cancel()
            del self._open_calls[id(unfinished)]
            self._count_unfinished(-len(unfinished))
            self._loop.cancel(list(unfinished))
            unfinished.clear()  # what is still on its way from the engine's thread counts no more
            self._telemetry.count("valuspec_request_success", len(by_id), finished_reason="abort")

    def _post(self, deliver_all: Callable[[], None]) -> None:
        """Have the outputs of a step delivered on the event loop; on the engine's thread."""
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(deliver_all)

    def _count_unfinished(self, change: int) -> None:
        self._num_unfinished += change
        running = min(self._num_unfinished, self._args.max_batch_size)
        self._telemetry.gauge("valuspec_num_requests_running", running)
        self._telemetry.gauge("valuspec_num_requests_waiting", self._num_unfinished - running)
        self._telemetry.gauge("valuspec_kv_cache_usage", self._engine.kv_usage)

    def _start_lookups(self, choices: list[Choice]) -> list[asyncio.Task[None]]:
        """One lookup per prompt, beside prefill."""
        if self._drafts is None or not choices[0].request.params.speculative:
            return []
        prompts: dict[int, list[Choice]] = {}
        for choice in choices:
            prompts.setdefault(id(choice.retrieval), []).append(choice)
        return [
            asyncio.create_task(self._look_up(self._drafts, same_prompt))
            for same_prompt in prompts.values()
        ]

    async def _look_up(self, drafts: DraftStore, choices: list[Choice]) -> None:
        request = choices[0].request
        trees = await drafts.lookup(request.namespace, request.prompt_ids, choices[0].retrieval)
        if trees:
            self._loop.attach_retrieved([c.request.request_id for c in choices], trees)

    def _delta(self, choice: Choice, output: StepOutput, started: float) -> Delta:
        now = time.monotonic()
        choice.output_ids.extend(output.token_ids)
        if choice.first_token_s is None and output.token_ids:
            choice.first_token_s = now - started
        report = None
        if output.finish_reason is not None and output.stats is not None:
            report = ChoiceReport(
                stats=output.stats,
                retrieval=choice.retrieval,
                time_to_first_token_s=choice.first_token_s or now - started,
            )
            self._telemetry.finished(report, output.finish_reason, now - started)
            self._thresholds.finished(output.stats)
            self._costs.refresh()
            if choice.request.params.greedy and output.finish_reason in ("stop", "length"):
                self._keep(choice, output.finish_reason, output.stats)
        return Delta(
            index=choice.index,
            num_prompt_tokens=len(choice.request.prompt_ids),
            token_ids=output.token_ids,
            text=output.text,
            finish_reason=output.finish_reason,
            report=report,
        )

    def _keep(
        self, choice: Choice, finish_reason: Literal["stop", "length"], stats: RequestStats
    ) -> None:
        """Store and log a whole greedy answer, off the path."""
        request, output_ids = choice.request, tuple(choice.output_ids)
        if self._drafts is not None:
            self._drafts.write_back(choice.owner, request.prompt_ids, output_ids)
        if not request.resumed_ids:  # of those, the first steps are unknown
            self._log.add(request, output_ids, finish_reason, stats)

    async def encode(
        self, prompt: str | None, messages: tuple[Message, ...] | None
    ) -> list[int] | Refusal:
        """Token ids of a prompt, or of messages through the chat template."""
        try:
            if messages is not None:
                return await asyncio.to_thread(self._target.render_chat, list(messages))
            return await asyncio.to_thread(self._target.encode, prompt or "")
        except RequestError as error:
            return Refusal(status=400, message=str(error), param=error.param, code=error.code)

    async def decode(self, token_ids: list[int]) -> str | Refusal:
        """Text of token ids, special tokens included."""
        if token_ids and max(token_ids) >= self._target.vocab_size:
            message = f"token id {max(token_ids)}; the vocabulary has {self._target.vocab_size}"
            return Refusal(status=400, message=message, param="tokens")
        text: str = await asyncio.to_thread(self._target.tokenizer.decode, token_ids)
        return text

    async def card(self) -> ModelCard:
        return ModelCard(
            name=self._args.model_name,
            max_model_len=self._target.max_model_len,
            exact=self._target.exact,
            exact_mode=self._target.exact_mode,
            dtype=self._args.dtype,
            model_fingerprint=self._target.model_fingerprint,
            loaded_at=self._loaded_at,
        )

    async def stats(self) -> dict[str, Any]:
        return {
            "model": self._args.model_name,
            "model_fingerprint": self._target.model_fingerprint,
            "tokenizer_fingerprint": self._target.tokenizer_fingerprint,
            "exact": self._target.exact,
            "exact_mode": self._target.exact_mode,
            "threshold_version": self._thresholds.current.version,
            "num_requests_running": self._engine.num_running,
            "num_requests_waiting": self._engine.num_waiting,
            "num_requests_unfinished": self._num_unfinished,
            "kv_cache_usage": self._engine.kv_usage,
            "totals": self._telemetry.totals() | dict(self._engine.counters),
        }

    async def thresholds(self) -> dict[str, Any]:
        return await self._thresholds.status()

    def __del__(self) -> None:
        self._loop.stop()
        self._engine.live_costs.close()
        self._log.close()


def _replica_name() -> ReplicaName:
    try:
        return ReplicaName(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:  # not in a replica
        return ReplicaName("local")
