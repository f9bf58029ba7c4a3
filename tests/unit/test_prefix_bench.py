"""bench.prefix_reuse: what it shares and what it compares."""

from __future__ import annotations

import pytest

from bench.common import Prompt
from bench.prefix_reuse import measure
from tests.support import engines
from tests.support.tiny_models import tiny_target
from valuspec.engine.kv_cache import BLOCK

pytestmark = pytest.mark.usefixtures("one_thread")


def test_questions_over_a_schema_that_was_met_before_find_it() -> None:
    schema = engines.random_prompt(0, 2 * BLOCK)
    history, *questions = (
        Prompt(str(n), (*schema, *engines.random_prompt(n, BLOCK // 2))) for n in range(1, 5)
    )
    result = measure(tiny_target("llama"), [history], questions)
    assert result["identical"] == result["compared"] == 3
    assert result["cached_share"] == pytest.approx(2 / 2.5)
