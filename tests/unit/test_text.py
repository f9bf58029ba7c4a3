"""Streamed text: whole characters, never a part of a stop string, and nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.tiny_models import EOS, byte_tokenizer
from valuspec.engine.text import TextStream

TOKENIZER = byte_tokenizer()
PROMPT = tuple(b"Say: ")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def stream(tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool, int]:
    """Texts of all pushes and of finish, whether a stop string ended it, and tokens pushed."""
    text = TextStream(TOKENIZER, PROMPT, stop)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    pushed = len(pieces)
    pieces.append(text.finish())
    return pieces, text.stopped, pushed


def test_characters_come_whole() -> None:
    pieces, _, _ = stream(list("aé漢🙂".encode()))
    assert pieces == ["a", "", "é", "", "", "漢", "", "", "", "🙂", ""]


def test_an_incomplete_last_character_is_shown_at_the_end() -> None:
    pieces, _, _ = stream(list("ok漢".encode())[:-1])
    assert pieces[:-1] == ["o", "k", "", ""]
    assert pieces[-1] == REPLACEMENT


def test_stop_string_across_pushes() -> None:
    pieces, stopped, pushed = stream(list(b"one STOP two"), ("STOP",))
    assert stopped
    assert "".join(pieces) == "one "
    assert pushed == len("one STOP")
    assert pieces[4:8] == ["", "", "", ""], "no part of the stop string may get out"


def test_held_text_comes_out_when_the_match_fails() -> None:
    pieces, stopped, _ = stream(list(b"a STOR b"), ("STOP",))
    assert not stopped
    assert pieces == ["a", " ", "", "", "", "STOR", " ", "b", ""]
    assert "".join(stream(list(b"a ST"), ("STOP",))[0]) == "a ST"


def test_overlapping_starts_of_a_stop_string() -> None:
    pieces, stopped, _ = stream(list(b"aabaabaac"), ("aabaac",))
    assert stopped
    assert "".join(pieces) == "aab"


def test_the_earliest_of_several_stop_strings_cuts() -> None:
    the = TOKENIZER.convert_tokens_to_ids("the")
    pieces, stopped, pushed = stream([*b"in ", the, *b" end"], ("he", "the", "end"))
    assert stopped
    assert pushed == 4
    assert "".join(pieces) == "in "


def test_stop_string_of_several_characters_and_bytes() -> None:
    pieces, stopped, _ = stream(list("x 漢字 y".encode()), ("漢字",))
    assert stopped
    assert "".join(pieces) == "x "


def test_stop_string_completed_by_finish_cuts() -> None:
    """The last character never becomes whole; its replacement may complete a stop string."""
    pieces, stopped, _ = stream([*b"ab", 0xE6], ("b" + REPLACEMENT,))
    assert stopped
    assert "".join(pieces) == "a"


def test_special_tokens_are_not_text() -> None:
    assert "".join(stream([*b"ab", EOS, *b"c"])[0]) == "abc"


TEXTS = st.text(st.sampled_from("abAB é漢🙂\n"), max_size=24)


@given(TEXTS, st.lists(st.text(st.sampled_from("abAB é漢"), min_size=1, max_size=4), max_size=3))
@pytest.mark.fault(45, 50)
def test_stream_is_the_decoded_text_up_to_the_first_stop_string(
    text: str, stops: list[str]
) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    pieces, stopped, pushed = stream(tokens, tuple(stops))
    shown = "".join(pieces)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert stopped == bool(ends)
    if not ends:
        assert shown == text
        return
    # The token at which the first stop string was complete decides, as in plain decoding.
    so_far = [TOKENIZER.decode(tokens[:n]) for n in range(1, len(tokens) + 1)]
    first = next(n for n, part in enumerate(so_far, 1) if any(stop in part for stop in stops))
    assert pushed == first
    complete = so_far[first - 1]
    assert shown == text[: min(complete.find(stop) for stop in stops if stop in complete)]
    assert not any(stop in shown for stop in stops)


@given(st.lists(st.integers(0, 261), max_size=40))
@example([0xFF, 0xFE, 65])
@example([0xE6, 65, 0xBC, 0xA2])
@example([0xF0] * 12 + [65])
@pytest.mark.fault(45)
def test_any_bytes_stream_as_they_decode(tokens: list[int]) -> None:
    pieces, stopped, pushed = stream(tokens)
    assert not stopped
    assert pushed == len(tokens)
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("prompt", [(), tuple("漢".encode()[:2]), (EOS,), tuple(b"x" * 50)])
def test_any_prompt_may_precede(prompt: tuple[int, ...]) -> None:
    text = TextStream(TOKENIZER, prompt)
    assert "".join([*map(text.push, b"abc"), text.finish()])[-3:] == "abc"
