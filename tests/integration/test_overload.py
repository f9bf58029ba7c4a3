"""Ten times as much asked as can be done: what the bench sees, over real connections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import overload
from deployments.settings import AppArgs
from tests.support import engines
from tests.support.fake_port import InboxPort
from tests.support.http_app import assert_idle, serving
from tests.support.tiny_models import tiny_target

ARGS = AppArgs(model="tiny", max_batch_size=2, max_waiting=2)


def test_what_cannot_be_served_is_refused_and_the_rest_is_served_as_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target = tiny_target("llama")
    target.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    engine = engines.engine_of(target, max_batch_size=ARGS.max_batch_size)
    port = InboxPort(ARGS, engine)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"turns": [f"question {n}"]}) for n in range(9)))
    arguments = ["--requests", str(questions), "--capacity-seconds", "1", "--seconds", "2"]
    try:
        with serving(port, ARGS) as (host, number):
            url = f"http://{host}:{number}"
            code = overload.main([*arguments, "--url", url, "--max-batch-size", "2"])
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, result
    assert result["failures"] == result["refused_without_retry_after"] == 0
    assert result["refused"] > 0
    assert result["answered"] > 0
    assert result["answered"] + result["refused"] == result["arrivals"]
    assert result["identical"] == result["compared"] == 4
    assert_idle(port)
    port.replica._loop.stop()
