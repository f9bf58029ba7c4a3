"""bench.identity as a program: what it prints, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import identity
from bench.recorder import Output
from bench.tally import Tally
from tests.support.eagle_heads import head_for
from tests.support.tiny_models import byte_tokenizer, tiny_model, wrap
from valuspec.eagle3.loading import save_head
from valuspec.engine import acceptance
from valuspec.engine.rows import SequenceRows
from valuspec.engine.verify import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def write(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_table_and_last_line(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ("one and two ", "three ", "the end ")
    prompts = (json.dumps({"prompt": (text * 12)[:70]}) for text in texts)
    requests = write(tmp_path, *prompts)
    arguments = ["--requests", requests, "--model", model_folder, "--max-tokens", "12"]
    assert identity.main([*arguments, "--limit", "2"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    modes = ["cold", "warm", "truth", "random", "wrong", "mixed", "crowded"]
    assert [line.split()[0] for line in table] == ["mode", *modes]
    result = json.loads(last)
    assert result["exact"] is True
    assert result["prompts"] == 2
    assert result["requests"] == result["identical"] == 5 * 2 + 2 * 16
    assert result["tokens"] == result["logit_rows_checked"] == result["logit_rows_equal"] > 100
    assert list(result["modes"]) == modes
    assert result["modes"]["wrong"]["accepted_tokens"] == 0
    assert result["modes"]["truth"]["accepted_tokens"] > 0
    assert result["modes"]["mixed"]["mixed_steps"] > 0
    assert result["modes"]["crowded"]["preemptions"] > 0
    assert identity.main([*arguments, "--temperature", "0.8", "--seed", "4"]) == 0


def test_trees_of_a_draft_head_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    save_head(head_for(wrap(model)), tmp_path / "head")
    prompts = (json.dumps({"prompt": (text * 12)[:70]}) for text in ("one and two ", "three "))
    arguments = ["--requests", write(tmp_path, *prompts), "--model", str(tmp_path / "model")]
    arguments += ["--max-tokens", "12", "--dtype", "float32"]
    assert identity.main([*arguments, "--draft-head", str(tmp_path / "head")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    modes = result["modes"]
    assert list(modes)[-2:] == ["head", "hybrid"]
    assert modes["head"]["draft_tokens"] > 100
    assert modes["head"]["accepted_tokens"] > 0
    assert modes["hybrid"]["identical"] == modes["hybrid"]["requests"] == 16
    assert modes["hybrid"]["preemptions"] > 0
    assert identity.main([*arguments, "--draft-head", str(tmp_path / "model")]) == 2
    assert "4 decoder layers" in capsys.readouterr().err


def test_a_difference_is_found_and_fails(
    model_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that takes the first draft token on trust."""
    verify = acceptance.verify

    def trusting(rows: SequenceRows, choose: object) -> Verdict:
        verdict = verify(rows, choose)  # type: ignore[arg-type]
        if len(rows) > 1 and not verdict.accepted_rows:
            return Verdict((1,), (int(rows.token_ids[1]), *verdict.token_ids))
        return verdict

    monkeypatch.setattr(acceptance, "verify", trusting)
    requests = write(tmp_path, json.dumps({"prompt": "one and two and three"}))
    arguments = ["--requests", requests, "--model", model_folder, "--max-tokens", "12"]
    assert identity.main(arguments) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["exact"] is False
    assert result["identical"] < result["requests"]
    assert result["modes"]["random"]["differing"] == ["line 1"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no requests"),
        (['{"prompt": "a"}', "{"], "line 2"),
        (
            [json.dumps({"prompt": "ab" * 600})],
            "line 1: This model's maximum",
        ),
        (['{"prompt": ""}'], "line 1: expected"),
        (['["turns"]'], "line 1: expected"),
        (['{"turns": []}'], "line 1: expected"),
        (['{"turns": ["hello"]}'], "line 1: this model has no chat template"),
    ],
)
def test_bad_requests_are_named(
    model_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    message: str,
) -> None:
    requests = write(tmp_path, *lines)
    assert identity.main(["--requests", requests, "--model", model_folder]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_missing_files_are_named(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing.jsonl")
    assert identity.main(["--requests", missing, "--model", model_folder]) == 2
    assert missing in capsys.readouterr().err


def test_tally_compares_bits_only_under_the_same_context() -> None:
    plain = Output([1, 2, 3], "abc", "length", [b"a", b"b", b"c"])
    tally = Tally()
    tally.compare("same", plain, Output([1, 2, 3], "abc", "length", [b"a", b"b", b"c"]))
    assert tally.exact
    tally.compare("one bit", plain, Output([1, 2, 3], "abc", "length", [b"a", b"x", b"c"]))
    assert (tally.identical, tally.logit_rows_checked, tally.logit_rows_equal) == (2, 6, 5)
    assert not tally.exact
    # The second token differs: its row still had the same context, the third's had not.
    tally.compare("token", plain, Output([1, 9, 3], "axc", "length", [b"a", b"y", b"z"]))
    assert (tally.identical, tally.logit_rows_checked, tally.logit_rows_equal) == (2, 8, 6)
    tally.compare("short", plain, Output([1, 2], "ab", "stop", [b"a", b"b"]))
    assert (tally.identical, tally.requests) == (2, 4)
    assert tally.differing == ["token", "short"]
    assert not Tally().exact
