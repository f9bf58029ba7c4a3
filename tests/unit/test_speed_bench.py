"""bench.speed as a program, on a tiny model with a random draft head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import speed
from tests.support.eagle_heads import head_for
from tests.support.tiny_models import byte_tokenizer, tiny_model, wrap
from valuspec.eagle3.loading import save_head

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bench")
    model = tiny_model("llama", num_hidden_layers=4)
    model.save_pretrained(folder / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    save_head(head_for(wrap(model)), folder / "head")
    found = ["--model", str(folder / "model"), "--draft-head", str(folder / "head"),
             "--dtype", "float32", "--max-tokens", "24"]  # fmt: skip
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for part, count in (("history", 6), ("calibration", 10), ("test", 3)):
        path = folder / f"{part}.jsonl"
        texts = [f"{words[i]} and {words[(i + 3) % 10]} " * 3 for i in range(count)]
        path.write_text(
            "\n".join(
                json.dumps({"id": f"{part}{i}", "turns": [text]}) for i, text in enumerate(texts)
            )
        )
        found += [f"--{part}", str(path)]
    return found


def result_of(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> dict[str, Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert speed.main(arguments) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize("draft", ["retrieval", "hybrid"])
def test_one_stream(draft, arguments, monkeypatch, tmp_path, capsys) -> None:
    result = result_of([*arguments, "--draft", draft], monkeypatch, tmp_path, capsys)
    modes = {"plain", "unfiltered", "frequency", "filtered", "oracle"}
    modes |= {"retrieval"} if draft == "hybrid" else set()
    assert result["speedup"].keys() == modes
    assert result["identical"] == result["compared"] == 3 * (len(modes) - 1)
    assert result["nodes_per_step"]["plain"] == 0 < result["nodes_per_step"]["unfiltered"]
    assert (
        result["mean_acceptance_length"]["oracle"] >= result["mean_acceptance_length"]["filtered"]
    )


@pytest.mark.parametrize("draft", ["retrieval", "eagle3"])
def test_several_streams(draft, arguments, monkeypatch, tmp_path, capsys) -> None:
    result = result_of(
        [*arguments, "--draft", draft, "--streams", "2"], monkeypatch, tmp_path, capsys
    )
    num_modes = 5 if draft == "retrieval" else 6
    assert result["streams"] == 2
    assert result["identical"] == result["compared"] == 3 * 3 * num_modes
    assert result["tokens_per_step"]["plain"] == 1
    # The oracle keeps exactly what is accepted, and no filter of its candidates gets more.
    tokens = {mode: n for mode, n in result["tokens_per_step"].items() if mode != "retrieval"}
    assert tokens["oracle"] == max(tokens.values())
    assert tokens["oracle"] == pytest.approx(1 + result["nodes_per_step"]["oracle"])
