"""`motet up --llm` with whole omni models: speech in chats, the talker's death, a thinker alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from e2e.stack import MotetStack

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.slow]

TOKENS = 400
LONG = 1200  # whose text takes longer than the talker's first codes, also where text is fast
SPOKEN: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "pcm16"},
}


@dataclass
class Heard:
    """A streamed reply: what came, in the order in which it came."""

    text: str = ""
    sound: bytes = b""
    kinds: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    reason: str = ""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """A stack with one checkpoint twice, once told not to speak, and a Qwen3-Omni."""
    from support.families import omni, qwen3_omni  # they need torch, which most tests do without

    parent = tmp_path_factory.mktemp("omni")
    whole, silent, third = parent / "whole", parent / "silent", parent / "third"
    omni.write(whole, sizes={"thinker": {"max_position_embeddings": 4 * LONG}})
    qwen3_omni.write(third)
    silent.mkdir()
    for path in whole.iterdir():
        (silent / path.name).symlink_to(path)
    config = json.loads((whole / "config.json").read_text())
    (silent / "config.json").unlink()
    (silent / "config.json").write_text(json.dumps({**config, "enable_audio_output": False}))
    models = ("--llm", str(whole), "--llm", str(silent), "--llm", str(third))
    others = ("--asr", "none", "--tts", "none", "--vad", "0")
    with MotetStack(parent, *models, *others) as made:
        made.wait_until_all_ready()
        yield made


def chunks(
    stack: MotetStack, model: str, *, seed: int = 5, tokens: int = TOKENS, **fields: Any
) -> Iterator[Any]:
    """Ask for a reply of `tokens` tokens, by OpenAI's own client."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield from client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me."}],
            temperature=0,
            seed=seed,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
            stream=True,
            **fields,
        )


def take(heard: Heard, chunk: Any) -> None:
    choice = chunk.model_dump()["choices"][0]
    audio: dict[str, Any] = choice["delta"].get("audio") or {}
    if text := audio.get("transcript") or choice["delta"].get("content"):
        heard.text += text
        heard.kinds.append("text")
    if data := audio.get("data"):
        heard.sound += base64.b64decode(data)
        heard.kinds.append("sound")
    heard.error = audio.get("error", heard.error)
    heard.reason = choice["finish_reason"] or heard.reason


def answer(stack: MotetStack, model: str, **fields: Any) -> Heard:
    heard = Heard()
    for chunk in chunks(stack, model, **fields):
        take(heard, chunk)
    return heard


def test_replies_are_spoken_and_outlive_their_talker(stack: MotetStack) -> None:
    """The text is that of a chat without sound; a talker that is killed is replaced, or missed."""
    written = answer(stack, "whole")
    answer(stack, "whole", **SPOKEN)  # the first one waits for what talker and code2wav load
    spoken = answer(stack, "whole", **SPOKEN)
    assert (spoken.text, spoken.reason, spoken.error) == (written.text, "length", None)
    assert spoken.sound
    long = answer(stack, "whole", tokens=LONG, **SPOKEN)
    assert long.text.startswith(written.text)
    assert long.kinds.index("sound") < len(long.kinds) - 1 - long.kinds[::-1].index("text")

    struck = Heard()
    restarted = None
    for chunk in chunks(stack, "whole", **SPOKEN):
        take(struck, chunk)
        if restarted is None and struck.text:
            assert len(struck.text) < len(written.text)
            restarted = stack.kill("talker-1")
    assert restarted is not None
    assert (struck.text, struck.reason) == (written.text, "length")
    assert struck.error is not None or struck.sound == spoken.sound
    restarted()
    stack.wait_until_all_ready()
    assert answer(stack, "whole", **SPOKEN).sound == spoken.sound
    assert {child["name"]: child["restarts"] for child in stack.children("decode")}["talker-1"] == 1


def test_frames_of_several_codes_are_spoken(stack: MotetStack) -> None:
    fields = {**SPOKEN, "audio": {"voice": "ethan", "format": "pcm16"}, "seed": 6}
    spoken = answer(stack, "third", **fields)
    assert (spoken.text, spoken.error) == (answer(stack, "third").text, None)
    assert spoken.sound


def test_a_thinker_serves_alone(stack: MotetStack) -> None:
    """A checkpoint without speech has no talker, writes the same text, and refuses to speak."""
    assert "silent-talker" not in {child["model"] for child in stack.children()}
    assert answer(stack, "silent").text == answer(stack, "whole").text
    with pytest.raises(openai.BadRequestError) as caught:
        answer(stack, "silent", **SPOKEN)
    assert "modalities" in str(caught.value)


def test_code2wav_that_dies_is_missed(stack: MotetStack) -> None:
    restarted = stack.kill("code2wav-1")
    heard = answer(stack, "whole", **SPOKEN)
    assert heard.reason == "length"
    assert heard.error is not None or heard.sound
    restarted()
