"""Test the log of `motet up`: prefixes, formats, and a reader that hangs."""

import io
import json
import threading

from motet_cli.supervision.logs import Log


def lines(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_prefix_column_is_as_wide_as_the_longest_name() -> None:
    out = io.StringIO()
    log = Log(out)
    log.reserve(["tokenizer-1", "gateway"])
    log.child("gateway", "gateway", "hello")
    log.note("ready")
    log.close()
    assert lines(out) == ["    gateway │ hello", "      motet │ ready"]


def test_colour_is_constant_per_name_and_absent_without_a_terminal() -> None:
    out = io.StringIO()
    log = Log(out, colour=True)
    log.child("gateway", "gateway", "a")
    log.child("gateway", "gateway", "b")
    log.close()
    first, second = lines(out)
    assert first.startswith("\x1b[")
    assert first.removesuffix("a") == second.removesuffix("b")


def test_json_lines_pass_and_others_are_wrapped() -> None:
    out = io.StringIO()
    log = Log(out, fmt="json")
    log.child("gateway", "gateway", '{"message": "made by the service"}')
    log.child("gateway", "gateway", "Traceback (most recent call last):")
    log.note("careful", "warning")
    log.close()
    service, wrapped, own = map(json.loads, lines(out))
    assert service == {"message": "made by the service"}
    assert (wrapped["process"], wrapped["message"]) == (
        "gateway",
        "Traceback (most recent call last):",
    )
    assert (own["process"], own["level"]) == ("motet", "warning")


def test_nats_lines_are_shown_from_warnings_up() -> None:
    out = io.StringIO()
    log = Log(out)
    log.child("nats", "nats", "[77] 2026/01/02 10:00:00.123456 [INF] Server is ready")
    log.child("nats", "nats", "[77] 2026/01/02 10:00:00.123456 [WRN] Slow consumer")
    log.child("nats", "nats", "nats-server: bad flag")
    log.close()
    assert lines(out) == [" nats │ Slow consumer", " nats │ nats-server: bad flag"]


def test_progress_line_is_wiped_before_a_line_and_drawn_again_after_it() -> None:
    out = io.StringIO()
    log = Log(out, live=True)
    log.progress("loading")
    log.note("hello")
    log.progress("")
    log.close()
    assert out.getvalue() == "loading\r\x1b[Kmotet │ hello\nloading\r\x1b[K"


def test_no_progress_line_without_a_terminal() -> None:
    out = io.StringIO()
    log = Log(out)
    log.progress("loading")
    log.close()
    assert out.getvalue() == ""


def test_a_hanging_reader_drops_lines_without_blocking() -> None:
    class Stuck(io.StringIO):
        gate = threading.Event()

        def write(self, text: str) -> int:
            self.gate.wait(30)
            return super().write(text)

    out = Stuck()
    log = Log(out)
    for number in range(25_000):
        log.child("w", "w", str(number))
    out.gate.set()
    log.close(timeout=30)
    dropped = [line for line in lines(out) if "lines dropped" in line]
    assert len(dropped) == 1
    assert 4000 < int(dropped[0].split()[1]) < 5001


def test_a_closed_stream_is_ignored() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log = Log(Gone())
    log.note("anyone?")
    log.close()
