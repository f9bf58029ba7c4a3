"""bench.gpu_check, as far as it goes without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import gpu_check
from tests.support.tiny_models import tiny_target
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.target import Target
from valuspec.engine.two_zone import TwoZoneAttention

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(gpu_check, "QUESTIONS", ("One", "And another"))
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    return tiny_target("llama", dtype=torch.bfloat16)


def test_everything_is_compared_and_printed(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    result = gpu_check.check(target, max_tokens=6, batch_sizes=[2])
    table = capsys.readouterr().out
    assert {"probe", "answers", "ms, batch of 2"} <= {
        line.split("  ")[0].strip() for line in table.splitlines()
    }
    assert result["exact"] is result["kept"] is True
    for name in ("torch", "as it is"):
        in_envelope = result["probe"][name]["envelope"]
        assert in_envelope["equal"] == in_envelope["checked"] > 0
        assert len(result["costs"]["2"][name]["seconds"]) > 5
    assert result["identity"]["mixed"]["identical"] == 16


def test_a_broken_promise_is_reported(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.exact_mode = "rows"
    monkeypatch.setattr(gpu_check, "probes", lambda *_: {})
    for exact in (True, False):
        monkeypatch.setattr(gpu_check, "identity", lambda *_, e=exact: {"cold": {"exact": e}})
        assert gpu_check.check(target, 1, [])["kept"] is exact


def test_the_same_weights_in_three_ways(target: Target) -> None:
    recorded = replace(target, graphs=object())
    ways = gpu_check.ways(recorded)
    assert list(ways) == ["torch", "triton", "graphs"]
    assert [way.attention for way in ways.values()] == [
        TwoZoneAttention,
        PathAttention,
        PathAttention,
    ]
    assert [way.graphs is None for way in ways.values()] == [True, True, False]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
