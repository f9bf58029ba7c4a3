import http.server
import json
import socket
import threading

import pytest

from deployments.cli import COMMANDS, main
from tests.support.tiny_models import tiny_model


def test_help_lists_the_commands(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"example:\n  valuspec {name}" in text


def test_a_wrong_command_is_an_error(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["sreve"])
    assert end.value.code == 2
    assert "sreve" in capsys.readouterr().err


def test_serve_refuses_a_taken_port_and_bad_values_before_starting_anything(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
    assert main(["serve", "--max-batch-size", "0"]) == 2
    assert "max_batch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "num_ranks", "message"),
    [
        ("llama", 3, "4 attention heads cannot be split among 3 ranks"),
        ("gpt2", 2, "a gpt2 model cannot be split"),
        ("llama", 16, "--tensor-parallel-size 16 needs 16 CPU cores; there are 8"),
        ("llama", 65, "tensor_parallel_size"),
    ],
)
def test_serve_refuses_what_cannot_be_split_before_loading_anything(
    family, num_ranks, message, capsys, monkeypatch, tmp_path
) -> None:
    tiny_model(family).config.save_pretrained(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--model", str(tmp_path), "--port", str(port)]
    assert main(["serve", *options, "--tensor-parallel-size", str(num_ranks)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({}, "no API keys"),
        ({"VALUSPEC_API_KEYS": "a:k", "RAY_AUTH_MODE": "disabled"}, "no Ray's token"),
    ],
)
def test_serve_refuses_to_be_open_to_other_machines(
    environment, missing, capsys, monkeypatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    error = capsys.readouterr().err
    assert missing in error
    assert "--insecure" in error


def test_serve_refuses_a_key_variable_without_keys(capsys, monkeypatch) -> None:
    monkeypatch.setenv("VALUSPEC_API_KEYS", " ")
    assert main(["serve"]) == 2
    assert "holds no key" in capsys.readouterr().err


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with `reply`: (status, body); keeps the last request."""

    reply: tuple[int, str]
    received: dict

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).received = {"key": self.headers["authorization"], **body}
        status, text = self.reply
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def url():
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def sse(*bodies: dict) -> str:
    return "".join(f"data: {json.dumps(b)}\n\n" for b in bodies)


def piece(text: str) -> dict:
    return {"choices": [{"delta": {"content": text}}], "usage": None}


def test_chat_prints_the_answer_and_its_numbers(url, capsys) -> None:
    metrics = {
        "tokens_per_second": 50.0,
        "time_to_first_token_ms": 12.0,
        "speculative_decoding": {"num_spec_steps": 3, "mean_acceptance_length": 2.5},
        "valuspec": {
            "num_offered_nodes": 9,
            "num_kept_nodes": 4,
            "retrieval_outcome": "hit",
        },
    }
    last = {"choices": [], "usage": {"completion_tokens": 7}, "metrics": metrics}
    stream = sse(piece("Hel"), piece("lo")) + ": ping\n\n" + sse(last) + "data: [DONE]\n\n"
    Server.reply = (200, stream)
    arguments = ["chat", "--url", url, "--api-key", "k", "--no-speculation", "hi"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert "7 tokens, 50.0 tok/s" in err
    assert "2.50 tokens a step" in err
    assert Server.received["key"] == "Bearer k"
    assert Server.received["speculative"] == {"enabled": False}


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        ((401, json.dumps({"error": {"message": "no key"}})), "401: no key"),
        ((502, "<html>"), "502"),
        ((200, sse(piece("He"), {"error": {"message": "replica lost"}})), "replica lost"),
    ],
)
def test_chat_fails_with_the_servers_words(url, reply, shown, capsys) -> None:
    Server.reply = reply
    assert main(["chat", "--url", url, "hi"]) == 1
    assert shown in capsys.readouterr().err


def test_chat_without_a_server_says_how_to_start_one(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["chat", "--url", f"http://127.0.0.1:{port}", "hi"]) == 1
    assert "valuspec serve" in capsys.readouterr().err
