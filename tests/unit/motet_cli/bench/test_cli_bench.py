"""Test `motet bench` against a scripted server."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet_cli.bench.results import plot
from motet_cli.main import main
from motet_shared.errors import ConfigError
from support.peers.scripted_http import ScriptedHandler, ScriptedServer

TIMING = {
    "decode.queue": 0.001,
    "decode.prefill": 0.002,
    "decode.decode": 0.003,
    "decode.model": 0.004,
}


class Scripted(ScriptedServer):
    """Stream one word per token, `together` of them in each event.

    Counts a prompt as ten tokens plus two per word.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = ["m", "n"]
        self.pace = 0.0
        self.together = 1
        self.usage = True
        self.error: tuple[int, dict[str, Any]] | None = None
        self.refuse_after = 10**9
        self.stream_error = False
        self.requests: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class Handler(ScriptedHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Scripted

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        self.answer(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        with server.lock:
            server.bodies.append(data)
            server.requests.append({"path": self.path, **json.loads(data)})
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            refused = server.error is not None and len(server.requests) > server.refuse_after
        try:
            if refused:
                assert server.error is not None
                self.answer(*server.error)
            else:
                self._stream(json.loads(data))
        finally:
            with server.lock:
                server.at_once -= 1

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = "messages" in body
        words = (body["messages"][0]["content"] if chat else body["prompt"]).split()
        count = body["max_tokens"]
        for start in range(0, count, self.server.together):
            text = "word " * min(self.server.together, count - start)
            self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            time.sleep(self.server.pace)
            if self.server.stream_error:
                self._event({"error": {"code": "worker_lost", "message": "decode is gone"}})
                break
        if self.server.usage:
            usage = {"prompt_tokens": 10 + 2 * len(words), "completion_tokens": count}
            self._event({"choices": [], "usage": usage, "timing": TIMING})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    with server.serving():
        yield server


def bench(server: Scripted, folder: Path, *args: str) -> Any:
    """Run `motet bench` successfully and return its JSON report."""
    report = folder / "report.json"
    assert main(["bench", server.url, "--json", str(report), *args]) == 0
    return json.loads(report.read_text())


def test_a_closed_loop(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.pace = 0.002
    args = "--concurrency 3 --requests 12 --input 50 --output 8"
    args += " --ttft 5s --itl 5s --e2e 1us --price-per-hour 2 --records"
    report = bench(server, tmp_path, *args.split())
    summary = report["summary"]
    assert (summary["sent"], summary["completed"], summary["failed"]) == (12, 12, 0)
    assert server.most_at_once == 3
    assert (summary["input_tokens"], summary["output_tokens"]) == (12 * 50, 12 * 8), (
        "lengths are in the server's tokens"
    )
    assert (report["config"]["tokens_per_word"], report["config"]["tokens_of_template"]) == (
        2.0,
        10.0,
    )
    assert 0.002 < summary["itl"]["p50"] < summary["e2e"]["p50"] <= summary["e2e"]["p99"] < 5
    assert summary["goodput"]["requests"] == 0
    assert summary["cost"]["per_million_output"] > 0
    assert summary["stages"]["prefill"]["mean"] == pytest.approx(0.002)
    rest = [r["ended"] - r["sent"] - 0.006 for r in report["records"]]
    assert summary["stages"]["plumbing"]["max"] == pytest.approx(max(rest))
    assert [record["number"] for record in report["records"]] == list(range(12))
    assert {(record["output_tokens"], sum(record["events"])) for record in report["records"]} == {
        (8, 8)
    }
    shown = capsys.readouterr().out
    for words in (
        "12 of 12 completed",
        "TTFT",
        "ITL, per token",
        "plumbing",
        "TTFT ≤ 5 s, p95 ITL ≤ 5 s",
        "of a core",
    ):
        assert words in shown
    warm_up = [request["max_tokens"] for request in server.requests[:4]]
    assert warm_up == [1, 1, 8, 8], "two to learn what words cost, two to warm up"


def test_the_same_seed_sends_the_same_bytes(server: Scripted, tmp_path: Path) -> None:
    args = "--requests 5 --concurrency 1 --input uniform:20,60 --output 1 --tokens-per-word 2 --warmup 0".split()
    sent = []
    for seed in ("1", "1", "2"):
        bench(server, tmp_path, "--seed", seed, *args)
        sent.append(server.bodies[:])
        server.bodies.clear()
    assert sent[0] == sent[1]
    assert not set(sent[0]) & set(sent[2])


def test_requests_are_sent_when_due(server: Scripted, tmp_path: Path) -> None:
    server.pace = 0.05  # a reply takes much longer than the time between two requests
    args = "--rate 50 --arrivals constant --requests 10 --output 4 --records".split()
    report = bench(server, tmp_path, *args)
    assert [record["due"] for record in report["records"]] == pytest.approx(
        [0.02 * n for n in range(10)]
    )
    assert all(record["sent"] >= record["due"] for record in report["records"])
    assert server.most_at_once > 3
    assert report["summary"]["client"]["late"]["count"] == 10


def test_sending_stops_after_duration(server: Scripted, tmp_path: Path) -> None:
    report = bench(
        server, tmp_path, *"--rate 40 --arrivals constant --duration 250ms --output 1".split()
    )
    assert report["summary"]["sent"] == 10
    server.pace = 0.05
    report = bench(server, tmp_path, *"--concurrency 2 --duration 200ms --output 1".split())
    assert 2 <= report["summary"]["sent"] <= 10
    assert report["summary"]["completed"] == report["summary"]["sent"], (
        "what is in flight may finish"
    )


def test_a_trace_at_another_speed(server: Scripted, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival": n, "prompt": f"line {n}", "max_tokens": n + 1} for n in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    report = bench(
        server, tmp_path, "--trace", str(trace), "--speed", "20", "--warmup", "0", "--records"
    )
    assert [record["due"] for record in report["records"]] == pytest.approx([0, 0.05, 0.1, 0.15])
    sent = {
        request["messages"][0]["content"]: request["max_tokens"] for request in server.requests[2:]
    }
    assert sent == {"line 0": 1, "line 1": 2, "line 2": 3, "line 3": 4}


def test_several_tokens_per_event(server: Scripted, tmp_path: Path) -> None:
    server.pace, server.together = 0.01, 4
    summary = bench(server, tmp_path, *"--requests 2 --output 16".split())["summary"]
    assert 0 < summary["itl_per_token"]["max"] <= summary["itl"]["max"] / 4 + 1e-9
    assert summary["tpot"]["max"] * 15 <= summary["e2e"]["max"]
    assert summary["output_tokens"] == 32


def test_a_server_without_usage(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.usage = False
    report = bench(server, tmp_path, *"--requests 3 --output 5 --input 30".split())
    assert (report["summary"]["output_tokens"], report["summary"]["counted"]) == (15, "events")
    assert report["config"]["tokens_per_word"] == 1.0
    assert report["summary"]["stages"] == {}
    assert "events are counted as tokens" in capsys.readouterr().out.replace("\n", " ")


def test_completions_and_further_fields(server: Scripted, tmp_path: Path) -> None:
    args = [
        "--endpoint",
        "completions",
        "--model",
        "n",
        "--ignore-eos",
        "--extra",
        '{"top_k": 1}',
        "--requests",
        "1",
    ]
    bench(server, tmp_path, *args)
    last = server.requests[-1]
    assert (last["path"], last["model"], last["ignore_eos"], last["top_k"]) == (
        "/v1/completions",
        "n",
        True,
        1,
    )
    assert isinstance(last["prompt"], str)


def test_errors_are_reported_by_kind(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.error, server.refuse_after = (
        (429, {"error": {"code": "overloaded", "message": "[full]"}}),
        6,
    )
    summary = bench(server, tmp_path, *"--concurrency 1 --requests 5 --output 1".split())["summary"]
    assert (summary["completed"], summary["failed"]) == (2, 3)
    assert summary["failures"] == [{"kind": "429 overloaded", "count": 3, "message": "[full]"}]
    assert "[full]" in capsys.readouterr().out


def test_exit_code_is_1_if_all_requests_fail(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.stream_error = True
    assert main(["bench", server.url, "--requests", "2", "--tokens-per-word", "1"]) == 1
    assert "in the stream: worker_lost" in capsys.readouterr().out


def test_slow_replies_time_out(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.pace = 0.3
    args = "--requests 1 --timeout 100ms --warmup 0 --tokens-per-word 1".split()
    assert main(["bench", server.url, *args]) == 1
    assert "no complete reply within 0.1 s" in capsys.readouterr().out


def test_ctrl_c_reports_the_figures_so_far(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.pace = 0.01

    def interrupt() -> None:
        while len(server.requests) < 8:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    args = "--concurrency 2 --duration 60s --output 5 --warmup 0 --tokens-per-word 1".split()
    assert main(["bench", server.url, *args]) == 130
    interrupter.join()
    shown = capsys.readouterr().out
    assert "interrupted" in shown
    assert "TPOT" in shown


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["run.png", "run.svg"])
def test_plots_are_written(server: Scripted, tmp_path: Path, name: str) -> None:
    bench(server, tmp_path, "--requests", "4", "--ttft", "1s", "--plot", str(tmp_path / name))
    head = (tmp_path / name).read_bytes()[:300]
    assert (
        head.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in head or b"<?xml" in head
    )


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError) as caught:
        plot.check(str(tmp_path / "run.png"))
    assert caught.value.param == "--plot"


# ----------------------------------------------------------------------------------------------------------- refusals
def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = main(["bench", *args])
    shown = capsys.readouterr()
    assert not shown.out
    return code, shown.err


def test_an_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = refusal(capsys, "http://127.0.0.1:9")
    assert code == 1
    assert "http://127.0.0.1:9/v1" in said


def test_an_unknown_model(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = refusal(capsys, server.url, "--model", "x")
    assert (code, "'x'" in said, "m, n" in said) == (1, True, True)
    server.models = []
    assert refusal(capsys, server.url)[0] == 1


def test_a_refused_probe_ends_the_run(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.error, server.refuse_after = (
        (400, {"error": {"code": "invalid_request", "message": "no `stream`"}}),
        0,
    )
    code, said = refusal(capsys, server.url)
    assert (code, len(server.requests)) == (1, 1)
    assert "no `stream`" in said


def test_the_key_is_read_from_a_file(server: Scripted, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    bench(server, tmp_path, "--api-key-file", str(key), "--requests", "1")
    assert server.keys == {"Bearer sesame"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("localhost:8000", "URL: 'localhost:8000"),
        ("--input many", "--input: 'many'"),
        ("--output uniform:9,1", "--output: 'uniform:9,1'"),
        ("--prefix-length 0", "--prefix-length: '0'"),
        ("--prefix-share 1.5", "--prefix-share: 1.5"),
        ("--prefix-share nan", "--prefix-share: nan"),
        ("--rate 0", "--rate: 0.0"),
        ("--rate inf", "--rate: inf"),
        ("--concurrency 0", "--concurrency: 0"),
        ("--requests 0", "--requests: 0"),
        ("--warmup -1", "--warmup: -1"),
        ("--speed 2", "--speed: "),
        ("--records", "--records: "),
        ("--ttft soon", "--ttft: 'soon'"),
        ("--duration 0", "--duration: '0'"),
        ("--timeout -5s", "--timeout: '-5s'"),
        ("--extra [1]", "--extra: '[1]'"),
        ("--json /nowhere/x.json", "--json: '/nowhere/x.json'"),
        ("--plot run.gif", "--plot: 'run.gif'"),
        ("--trace /nowhere.jsonl", "--trace: cannot read '/nowhere.jsonl'"),
        ("--api-key-file /nowhere", "--api-key-file: cannot read '/nowhere'"),
        ("--tokens-per-word 0", "--tokens-per-word: 0.0"),
        ("--price-per-hour -1", "--price-per-hour: -1.0"),
    ],
)
def test_wrong_options_are_rejected(
    capsys: pytest.CaptureFixture[str], args: str, said: str
) -> None:
    words = args.replace("--timeout -5s", "--timeout=-5s").split()
    code, shown = refusal(capsys, *words)
    assert code == 2
    assert shown.startswith(f"motet bench: {said}")
