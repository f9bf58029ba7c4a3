"""What the engine did can be read from its log and made again without the model."""

from __future__ import annotations

import numpy as np

from deployments.replica_log import ReplicaLog
from deployments.settings import AppArgs
from deployments.telemetry import Telemetry
from retrieval.trajectory_log import read_log
from tests.support.engines import random_prompt
from tests.support.tiny_models import tiny_target
from valuspec.drafting.drafter import Drafter
from valuspec.engine.engine import Engine
from valuspec.engine.types import GenerationRequest, SamplingParams
from valuspec.replay import Trajectory, filtered, steps
from valuspec.thresholds import ThresholdSet

NUM_REQUESTS = 12


def test_replay_of_a_log_makes_the_steps_that_were_logged(tmp_path) -> None:
    target, telemetry = tiny_target(), Telemetry()
    thresholds = ThresholdSet.starting(target.model_fingerprint)
    engine = Engine(target, drafter=Drafter(), thresholds=thresholds, max_batch_size=1)
    log = ReplicaLog(AppArgs(log_dir=str(tmp_path)), target, telemetry)
    for number in range(NUM_REQUESTS):
        request = GenerationRequest(
            request_id=str(number),
            # Each prompt comes twice, so that there is something to draft.
            prompt_ids=random_prompt(number // 2, 12),
            params=SamplingParams(max_tokens=40),
            namespace="tenant",
        )
        engine.add(request)
        output: list[int] = []
        while engine.has_work:
            for step in engine.step():
                output += step.token_ids
        assert step.finish_reason in ("stop", "length")
        log.add(request, output, step.finish_reason, step.stats)
    log.close()
    assert telemetry.totals()["valuspec_log_rows_written"] == NUM_REQUESTS

    read = read_log([tmp_path], model_fingerprint=target.model_fingerprint)
    assert [row.request_id for row in read.trajectories] == [str(n) for n in range(NUM_REQUESTS)]
    drafter = Drafter()
    for row in read.trajectories:
        trajectory = Trajectory(
            row.prompt_ids, row.output_ids, row.max_tokens, namespace=row.namespace
        )
        replayed = list(steps(trajectory, drafter, filtered(thresholds)))
        assert [len(step.kept) for step in replayed] == row.kept.tolist()
        assert [step.num_accepted for step in replayed] == row.accepted.tolist()
        drafter.remember(row.namespace, row.prompt_ids.tolist(), row.output_ids.tolist())
    assert sum(np.sum(row.accepted) for row in read.trajectories) > 100
