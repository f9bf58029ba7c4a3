import asyncio
import json

from deployments.errors import ApiError
from deployments.messages import ChoiceReport, Delta, RetrievalReport
from deployments.schemas import ChatCompletionRequest, CompletionRequest
from deployments.sse import Answer, stream_events
from valuspec.engine.types import RequestStats


def delta(text: str, finish_reason=None, index=0, num_tokens=1) -> Delta:
    report = None
    if finish_reason is not None:
        histogram = [1, 0, 2] + [0] * 14
        stats = RequestStats(
            num_steps=3,
            num_output_tokens=7,
            num_accepted_tokens=4,
            num_draft_tokens=8,
            num_offered_nodes=20,
            acceptance_histogram=histogram,
            threshold_version="v1",
        )
        report = ChoiceReport(
            stats=stats,
            retrieval=RetrievalReport(outcome="hit", latency_s=0.002, num_trees=2),
            time_to_first_token_s=0.01,
        )
    return Delta(
        index=index,
        num_prompt_tokens=5,
        token_ids=tuple(range(num_tokens)),
        text=text,
        finish_reason=finish_reason,
        report=report,
    )


def chat_body(**fields) -> ChatCompletionRequest:
    message = {"role": "user", "content": "hi"}
    return ChatCompletionRequest.model_validate({"messages": [message], "stream": True, **fields})


def answer(route="chat", n=1, num_choices=1, **fields) -> Answer:
    return Answer(route=route, request_id="r", model="m", n=n, num_choices=num_choices, **fields)


def events(deltas, body, building=None, error=None) -> list[str]:
    async def source():
        for item in deltas:
            yield item
        if error is not None:
            raise error

    async def collect():
        building_ = building or answer(
            "chat" if isinstance(body, ChatCompletionRequest) else "completions"
        )
        return [e.decode() async for e in stream_events(building_, source(), body)]

    return asyncio.run(collect())


def parsed(event: str) -> dict:
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    assert "\n" not in event[:-2]
    return json.loads(event[6:])


def test_role_first_finish_reason_last_then_done() -> None:
    raw = events([delta("Hel"), delta("lo", "stop")], chat_body())
    assert raw[-1] == "data: [DONE]\n\n"
    chunks = [parsed(e) for e in raw[:-1]]
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "stop"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert all("usage" not in c and "metrics" not in c for c in chunks)


def test_completion_chunks() -> None:
    body = CompletionRequest(prompt="p", stream=True)
    chunks = [parsed(e) for e in events([delta("a"), delta("", "length")], body)[:-1]]
    assert [c["choices"][0]["text"] for c in chunks] == ["a", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {c["object"] for c in chunks} == {"text_completion"}


def test_usage_chunk_only_when_asked_for_and_null_before() -> None:
    body = chat_body(stream_options={"include_usage": True})
    raw = events([delta("a", num_tokens=3), delta("b", "stop", num_tokens=4)], body)
    *chunks, last = [parsed(e) for e in raw[:-1]]
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert raw[-1] == "data: [DONE]\n\n"


def test_continuous_usage_grows() -> None:
    body = chat_body(stream_options={"include_usage": True, "continuous_usage_stats": True})
    raw = events([delta("a", num_tokens=3), delta("b", "stop", num_tokens=4)], body)
    counts = [parsed(e)["usage"]["completion_tokens"] for e in raw[:-1]]
    assert counts == [3, 3, 7, 7]


def test_metrics_have_vllms_shape_beside_ours() -> None:
    body = chat_body(stream_options={"include_usage": True})
    metrics = parsed(events([delta("a", "stop")], body)[-2])["metrics"]
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 0, 2],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 2,
    }
    assert metrics["time_to_first_token_ms"] == 10.0
    assert metrics["valuspec"]["num_offered_nodes"] == 20
    assert metrics["valuspec"]["num_kept_nodes"] == 8
    assert metrics["valuspec"]["retrieval_outcome"] == "hit"
    assert metrics["valuspec"]["retrieval_ms"] == 2.0
    assert metrics["valuspec"]["threshold_version"] == "v1"


def test_a_failure_in_the_middle_is_an_error_event_without_done() -> None:
    body = chat_body(stream_options={"include_usage": True})
    raw = events([delta("a")], body, error=ApiError(500, "broken"))
    assert parsed(raw[-1]) == {
        "error": {"message": "broken", "type": "server_error", "param": None, "code": None}
    }
    assert not any("[DONE]" in e for e in raw)


def test_gaps_become_comments() -> None:
    assert ": ping\n\n" in events([delta("a"), None, delta("b", "stop")], chat_body())


def test_tokens_without_settled_text_send_no_chunk_unless_ids_are_wanted() -> None:
    held_back = [delta("", num_tokens=2), delta("ab", "stop")]
    assert len(events(held_back, chat_body())) == 3  # role, text, [DONE]
    building = answer(return_token_ids=True)
    chunks = [parsed(e) for e in events(held_back, chat_body(), building)[:-1]]
    assert [c["choices"][0].get("token_ids") for c in chunks] == [None, [0, 1], [0]]


def test_unicode_is_sent_as_it_is() -> None:
    assert "é🙂" in events([delta("é🙂", "stop")], chat_body())[1]


def test_every_choice_gets_its_role_and_prompts_are_counted_once() -> None:
    building = answer(n=2, num_choices=4)
    for index in (1, 0, 3, 2):
        chunks = building.chunks(delta("x", "stop", index))
        assert [c["choices"][0]["index"] for c in chunks] == [index, index]
    whole = building.response()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [whole["usage"][name] for name in counts] == [10, 4, 14]
    assert "metrics" not in whole


def test_whole_response_joins_the_deltas() -> None:
    building = answer()
    building.add(delta("Hel"))
    building.add(delta("lo", "stop", num_tokens=2))
    whole = building.response()
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert whole["metrics"]["speculative_decoding"]["num_spec_steps"] == 3
