import math

import pytest
from pydantic import ValidationError

from deployments.schemas import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequestBody,
    TokenizeRequest,
)
from valuspec.errors import RequestError


def chat(**fields) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "hi"}], **fields}
    )


def refused_param(build) -> str:
    """The parameter an invalid body's error names."""
    with pytest.raises((ValidationError, RequestError)) as caught:
        build()
    if isinstance(caught.value, RequestError):
        return caught.value.param
    first = caught.value.errors()[0]
    cause = first.get("ctx", {}).get("error")
    return cause.param if isinstance(cause, RequestError) else first["loc"][0]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_a_prompt_is_text_or_token_ids_one_or_many(prompt, expected) -> None:
    assert CompletionRequest(prompt=prompt).prompts() == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [""], [[]], [[1], "a"], [1, "a"], [-1], [2**31], [1.5], 3, None, {}),
        "\ud800",
        ["a"] * (MAX_PROMPTS + 1),
    ],
)
def test_other_prompts_are_refused_by_name(prompt) -> None:
    assert refused_param(lambda: CompletionRequest.model_validate({"prompt": prompt})) == "prompt"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"suffix": "x"},
        {"best_of": 2},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1},
        {"repetition_penalty": 1.1},
        {"logprobs": True},
        {"logprobs": 3},
        {"top_logprobs": 2},
        {"echo": True},
        {"min_tokens": 4},
        {"guided_json": {}},
        {"n": 0},
        {"n": 10**9},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_completion_tokens": 0},
        {"temperature": "hot"},
        {"stop": ["a"] * 5},
        {"stop": [1]},
        {"stop_token_ids": list(range(65))},
        {"stream": "perhaps"},
        {"stream_options": {"include_usage": True}},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user"}]},
        {"cache_salt": ""},
    ],
)
@pytest.mark.fault(42, 43)
def test_what_is_not_supported_is_refused_by_name(fields) -> None:
    assert refused_param(lambda: chat(**fields)) == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": math.nan},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": [""]},
        {"stop": ["x" * 1000]},
    ],
)
@pytest.mark.fault(42, 43)
def test_values_out_of_range_are_refused_by_name(fields) -> None:
    assert refused_param(lambda: chat(**fields).call("r", "t")) == next(iter(fields))


def test_neutral_values_unknown_fields_and_nulls_pass() -> None:
    body = chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias={},
        presence_penalty=0.0,
        logprobs=False,
        echo=False,
        best_of=1,
        seed=None,
        stop=None,
        stream_options=None,
        user="u",
        brand_new_field=[1],
    )
    assert body.seed is None


def test_a_tenant_cannot_be_sent_and_a_salt_only_narrows_it() -> None:
    assert chat(tenant="other", namespace="other").call("r", "acme").tenant == "acme"
    salted = chat(cache_salt="s").call("r", "acme").tenant
    assert salted.startswith("acme#")
    assert salted != chat(cache_salt="t").call("r", "acme").tenant


def test_without_a_seed_sampled_requests_differ_and_greedy_ones_do_not() -> None:
    seeds = {chat(temperature=1).call("r", "t").params.seed for _ in range(3)}
    assert len(seeds) == 3
    assert chat(temperature=0).call("r", "t").params.seed == 0
    assert chat(seed=7).call("r", "t").params.seed == 7


def test_fields_reach_the_engine_parameters() -> None:
    body = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        stop="END",
        stop_token_ids=[3],
        ignore_eos=True,
        max_tokens=5,
        max_completion_tokens=6,
        n=2,
        speculative={"enabled": False},
    )
    call = body.call("r", "t")
    assert (call.params.temperature, call.params.top_p, call.params.top_k) == (0.5, 0.9, 0)
    assert call.params.stop == ("END",)
    assert call.params.stop_token_ids == (3,)
    assert call.params.ignore_eos
    assert not call.params.speculative
    assert (call.max_tokens, call.n) == (6, 2)


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": parts}])
    assert body.call("r", "t").messages == ({"role": "system", "content": "ab"},)


def test_default_lengths_are_openais() -> None:
    assert CompletionRequest(prompt="a").call("r", "t").max_tokens == 16
    assert chat().call("r", "t").max_tokens is None


def test_tokenize_takes_exactly_one_input() -> None:
    assert refused_param(lambda: TokenizeRequest()) == "prompt"
    assert TokenizeRequest(prompt="").prompt == ""


def test_every_refused_parameter_is_absent_from_the_schema() -> None:
    """A parameter both refused and declared would be refused with its default."""
    from deployments import schemas

    assert not set(schemas._UNSUPPORTED) & set(GenerationRequestBody.model_fields)
