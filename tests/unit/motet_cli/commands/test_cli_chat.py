"""Test `motet chat` and `motet models` against a scripted server."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from motet_cli.main import main
from support.peers.scripted_http import ScriptedHandler, ScriptedServer


class Scripted(ScriptedServer):
    """Answer every chat with `pieces`, or with `error` and its status; keep the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = ["pocket-chat"]
        self.pieces = ["Two ", "circles", "."]
        self.error: tuple[int, dict[str, Any]] | None = None
        self.break_after = -1
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


class Handler(ScriptedHandler):
    server: Scripted

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.server.requests.append(
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        )
        if self.server.error:
            self.answer(*self.server.error)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number, piece in enumerate(self.server.pieces):
            if number == self.server.break_after:
                self._event({"error": {"message": "decode is gone", "code": "worker_lost"}})
                return
            self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    with server.serving():
        yield server


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make standard input a terminal where the given lines are typed and exceptions are raised."""

    def type_lines(*lines: str | type[BaseException]) -> None:
        typed = iter(lines)

        def answer(_: str) -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", answer)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    return type_lines


def test_one_reply_to_a_prompt(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", server.url, "How", "many?"]) == 0
    assert capsys.readouterr().out == "Two circles.\n"
    messages = [{"role": "user", "content": "How many?"}]
    assert server.requests == [
        {"model": "pocket-chat", "messages": messages, "temperature": 0.0, "stream": True}
    ]


def test_one_reply_to_standard_input(
    server: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("How many?\n"))
    assert main(["chat", "--url", server.url, "--system", "Be brief.", "--model", "m"]) == 0
    assert capsys.readouterr().out == "Two circles.\n"
    assert server.requests[0]["model"] == "m"
    assert [message["role"] for message in server.requests[0]["messages"]] == ["system", "user"]


def test_a_dialogue_keeps_its_messages_until_new(
    server: Scripted, terminal: Callable[..., None]
) -> None:
    terminal("one", "two", "", KeyboardInterrupt, "/new", "three", "/exit")
    assert main(["chat", "--url", server.url]) == 0
    sent = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert sent == [["one"], ["one", "Two circles.", "two"], ["three"]]


def test_an_error_does_not_end_a_dialogue(
    server: Scripted, terminal: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    server.error = (
        400,
        {"error": {"message": "8 tokens are too many for 4", "code": "context_length_exceeded"}},
    )
    terminal("one", "two")
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().err.count("error: 8 tokens are too many for 4") == 2
    assert [len(request["messages"]) for request in server.requests] == [1, 1], (
        "what got no answer is forgotten"
    )


def test_an_error_in_the_middle_keeps_what_was_shown(
    server: Scripted, terminal: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    server.break_after = 1
    terminal("one", "two")
    assert main(["chat", "--url", server.url]) == 0
    assert "decode is gone" in capsys.readouterr().err
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "Two "}


def test_ctrl_c_stops_only_the_reply(
    server: Scripted,
    terminal: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(self: Any, *request: Any) -> Iterator[str]:
        yield "Two "
        raise KeyboardInterrupt

    monkeypatch.setattr("motet_cli.commands.server.Server.reply", interrupted)
    terminal("one", "/exit")
    assert main(["chat", "--url", server.url]) == 0
    assert "Two \n(stopped)" in capsys.readouterr().out


def test_a_failed_reply_is_exit_code_1(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.error = (404, {"error": {"message": "no model 'x'", "code": "model_not_found"}})
    assert main(["chat", "--url", server.url, "--model", "x", "hello"]) == 1
    assert capsys.readouterr().err == "motet chat: no model 'x'\n"


def test_another_kind_of_server_is_reported(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.error = (500, {"oops": True})
    assert main(["chat", "--url", server.url, "hello"]) == 1
    assert "500" in capsys.readouterr().err


def test_a_missing_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "hello"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_a_server_without_models_is_reported(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = []
    assert main(["chat", "--url", server.url, "hello"]) == 1
    assert server.url in capsys.readouterr().err


def test_the_key_is_read_from_a_file(server: Scripted, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    assert main(["chat", "--url", server.url, "--api-key-file", str(key), "hello"]) == 0
    assert server.keys == ["Bearer sesame"]
    assert (
        main(["chat", "--url", server.url, "--api-key-file", str(tmp_path / "none"), "hello"]) == 2
    )


def test_models_lists_served_and_local_models(
    server: Scripted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setenv("MOTET_MODELS", str(tmp_path))
    assert main(["models", "--url", server.url]) == 0
    served, local = capsys.readouterr().out.split("local folders:")
    assert "pocket-chat" in served
    assert f"tiny  {folder}" in local
    assert main(["models", "--url", "http://127.0.0.1:9"]) == 0
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().out
