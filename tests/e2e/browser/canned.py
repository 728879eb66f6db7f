"""Answer the page's requests with fixed replies, so that what it shows is the same every time."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

from playwright.async_api import Page, Route

NOW = 1_790_000_000.0  # Unix time of everything that has a time
POLL = 3.0  # seconds from one state of the stack to the next
FONT = Path(__file__).parents[2] / "support/javascript/vendor/inter.woff2"

REPLY = """Two of them, and here is how to **count** them:

1. Look at each shape.
2. Keep those that are *circles*.

| shape | colour | count |
|---|---|---|
| circle | red | 2 |
| square | blue | 1 |

```python
def count(shapes: list[str]) -> int:
    return sum(shape == "circle" for shape in shapes)  # 2
```

> A square is no circle."""
REASONING = "The picture has a red circle, another red circle and a blue square."

# Replaces all fonts of the page. Its content policy does not apply to a `FontFace` of bytes and a
# constructed style sheet.
_SET_FONT = """(() => {
  const bytes = Uint8Array.from(atob("FONT"), (char) => char.charCodeAt(0));
  document.fonts.add(new FontFace("Inter", bytes.buffer));
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { font-family: Inter, sans-serif !important; }");
  document.adoptedStyleSheets = [sheet];
})()"""


async def answer_canned(page: Page) -> None:
    """Fulfil the page's requests for data from now on; its files still come from the server."""
    answers: dict[str, Any] = {
        "**/v1/models": {"object": "list", "data": MODELS},
        "**/v1/audio/voices": {"object": "list", "data": []},
        "**/health/ready*": {"ready": True, "speech": {"missing": [], "hears": False}},
        "**/metrics/replies?*": {"replies": [reply(number) for number in range(4)]},
        "**/metrics/doctor": {"findings": [FINDING]},
    }
    for pattern, answer in answers.items():
        await page.route(pattern, _fulfil(answer))
    await page.route("**/v1/chat/completions", _stream)
    seconds = itertools.count(0, POLL)

    async def fulfil(route: Route) -> None:
        await route.fulfill(json=stack(next(seconds)))

    await page.route("**/metrics/stack?*", fulfil)


async def set_font(page: Page) -> None:
    """Have all pages that are opened from now on use one font for all text."""
    data = base64.b64encode(FONT.read_bytes()).decode()
    await page.add_init_script(_SET_FONT.replace("FONT", data, 1))


def _fulfil(answer: Any) -> Any:
    async def fulfil(route: Route) -> None:
        await route.fulfill(json=answer)

    return fulfil


async def _stream(route: Route) -> None:
    call = {"index": 0, "id": "call_0", "function": {"name": "count", "arguments": '{"n": 2}'}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "reasoning_content": REASONING},
        {"content": REPLY},
        {"tool_calls": [call]},
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    await route.fulfill(
        headers={"content-type": "text/event-stream", "x-request-id": "request-0"},
        body="".join(f"data: {line}\n\n" for line in lines),
    )


def _model(name: str, kind: str, status: str = "ready", **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "kind": kind, "status": status, **more}


_CHAT: dict[str, Any] = {"images": True, "tools": True, "reasoning": False, "context_length": 4096}
MODELS = [
    _model("pocket-chat", "chat", **_CHAT),
    _model(
        "larger-chat",
        "chat",
        "loading",
        **_CHAT | {"reasoning": True, "context_length": 32768},
        loading={"stage": "loading", "share": 0.4, "seconds": 12.0},
    ),
    _model(
        "other-chat", "chat", "unloaded", loading={"stage": "absent", "share": 0.0, "seconds": 20.0}
    ),
    _model("pocket-tts", "speech", voices=["a", "b"]),
    _model("pocket-asr", "transcription"),
    _model("pocket-embed", "embedding", context_length=512),
    _model("pocket-draw", "image"),
]

_WORK = {
    "decode": (40.0, "tokens/s"),
    "asr": (1.5, "× real time"),
    "tts": (0.0, "× real time"),
    "diffusion": (0.25, "pictures/s"),
}
_ACTIVE = {"tokenizer": 3, "decode": 2, "encoder": 1}
ROLES = (
    "gateway", "tokenizer", "decode", "decode", "encoder", "vad", "asr", "tts", "diffusion",
    "embedding", "planner",
)  # fmt: skip


def stack(seconds: float) -> dict[str, Any]:
    """Return a stack of every common service, some of them busy, after so many seconds."""
    instances = [_instance(role, number, seconds) for number, role in enumerate(ROLES)]
    instances[7]["state"] = "draining"
    replies = {
        "active": 3,
        "window_seconds": 60.0,
        "replies": 14,
        "failed": 1,
        "replies_per_second": 0.233,
        "tokens_per_second": 18.4,
        "first_token_seconds": {"p50": 0.21, "p95": 0.84, "p99": 1.9},
        "between_tokens_seconds": {"p50": 0.024, "p95": 0.041, "p99": 0.08},
        "good": 0.929,
    }
    return {"time": NOW + seconds, "instances": instances, "replies": replies}


def _instance(role: str, number: int, seconds: float) -> dict[str, Any]:
    active = float(_ACTIVE.get(role, 0))
    load = {"active": active, "requests": 40.0, "cpu": 0.3 * seconds}
    if role == "decode":
        load |= {"running": active, "queued": 1.0, "batch": 2.0, "kv_free": 0.62}
    speed, unit = _WORK.get(role, (0.0, ""))
    return {
        "role": role,
        "instance": f"{role}-{number:08x}",
        "state": "ready",
        "host": "host",
        "pid": 100 + number,
        "models": [f"pocket-{role}"] if role in _WORK else [],
        "load": load,
        "work": {"done": speed * seconds, "unit": unit} if unit else None,
    }


def reply(number: int) -> dict[str, Any]:
    """Return the reply to `request-NUMBER`; the last ones took longer."""
    total, first = 0.6 + number, 0.15 + 0.4 * number
    spans = [
        ("gateway", 0.0, total),
        ("tokenizer", 0.0, total - 0.01),
        ("tokenizer.encode", 0.0, 0.004),
        ("decode", 0.004, total - 0.02),
        ("decode.queue", 0.004, first / 2),
        ("decode.prefill", 0.004 + first / 2, first / 2 - 0.01),
        ("decode.decode", first, total - first - 0.02),
    ]
    return {
        "ended": NOW - 10 * number,
        "request": f"request-{number}",
        "model": "pocket-chat",
        "status": "failed" if number == 2 else "stop",
        "prompt_tokens": 96,
        "cached_tokens": 64,
        "tokens": 20 + number,
        "first": first,
        "total": total,
        "moves": 0,
        "between": 0.02,
        "spans": [{"name": name, "start": start, "seconds": took} for name, start, took in spans],
    }


FINDING = {
    "name": "too_few_decode",
    "what": "Requests wait because all decode instances are full.",
    "layer": "L4",
    "layer_name": "fleet",
    "resource": "the decode instances",
    "where": ["decode-00000002", "decode-00000003"],
    "numbers": {"queued": 4.2, "running_share": 0.98},
    "knob": "motet scale decode=3",
    "severity": "critical",
    "cost": 4.2,
}
