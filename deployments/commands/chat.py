"""Ask a running server one question; the answer streams, then one line says how it was made."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import httpx

EXAMPLE = """example:
  valuspec chat "Write a haiku about trees"
  valuspec chat --no-speculation --max-tokens 64 "Write a haiku about trees" """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="what to ask")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server (%(default)s)")
    parser.add_argument("--model", help="model id (the one the server serves)")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s: greedy)")
    parser.add_argument("--seed", type=int, help="for a temperature above 0")
    parser.add_argument(
        "--no-speculation", action="store_true", help="one token a step; the text is the same"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VALUSPEC_API_KEY"),
        help="key of the server (VALUSPEC_API_KEY)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the answer to stdout and its numbers to stderr; return the exit code."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        with (
            # Between two tokens a busy server may take its time.
            httpx.Client(base_url=options.url, headers=headers, timeout=300) as client,
            client.stream("POST", "/v1/chat/completions", json=_body(options)) as response,
        ):
            if response.is_error:
                response.read()
                return _fail(_error_message(response))
            return _print_stream(response)
    except httpx.ConnectError:
        return _fail(f"nothing answers at {options.url}; start it with: valuspec serve")
    except httpx.HTTPError as error:
        return _fail(f"the connection to {options.url} failed: {error}")


def _body(options: argparse.Namespace) -> dict[str, Any]:
    messages = [{"role": "user", "content": options.prompt}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    return {
        "model": options.model,
        "messages": messages,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "speculative": {"enabled": not options.no_speculation},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _print_stream(response: httpx.Response) -> int:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data in ("", "[DONE]") or data == line:  # blank lines and comments
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            print()
            return _fail(chunk["error"]["message"])
        for choice in chunk["choices"]:
            print(choice["delta"].get("content", ""), end="", flush=True)
        if chunk["usage"] is not None:
            print()
            print(_summary(chunk["usage"], chunk["metrics"]), file=sys.stderr)
    return 0


def _summary(usage: dict[str, int], metrics: dict[str, Any]) -> str:
    speculative, ours = metrics["speculative_decoding"], metrics["valuspec"]
    return (
        f"[{usage['completion_tokens']} tokens, {metrics['tokens_per_second']:.1f} tok/s, "
        f"first after {metrics['time_to_first_token_ms']:.0f} ms; "
        f"{speculative['num_spec_steps']} steps, "
        f"{speculative['mean_acceptance_length']:.2f} tokens a step; "
        f"nodes offered {ours['num_offered_nodes']}, verified {ours['num_kept_nodes']}; "
        f"retrieval: {ours['retrieval_outcome']}]"
    )


def _error_message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"


def _fail(message: str) -> int:
    print(f"valuspec chat: {message}", file=sys.stderr)
    return 1
