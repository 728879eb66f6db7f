"""Write docs/recognizers.md: which speech recognizers load, and what each of them tells.

.venv/bin/python scripts/list_recognizers.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from motet_asr.checkpoint import refusal
from motet_asr.models.registry import RECOGNIZERS, Recognizer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recognizers.md"
# transformers' own lists of classes that hear and write.
_LISTS = ("CTC", "RNNT", "SPEECH_SEQ_2_SEQ", "TDT")

HEAD = """# Recognizers

Which checkpoints `motet up --asr` takes, by the `model_type` of their config.json. Each is *exact*: on a tiny model of
the class with random float32 weights, tokens (and the frames of those that have any) equal those of transformers' own
code for one window alone, whatever is transcribed beside it (`tests/unit/motet_asr/test_asr_engine.py`,
`test_asr_frames.py`, `test_asr_decoders.py`, `test_asr_causal.py`). Longer recordings are cut at pauses.

* **Word times**: *frames* that tokens belong to (CTC, transducers, Kyutai STT), or *attention* of the heads that a
  Whisper's generation_config.json names. Where nothing times words, `timestamp_granularities: ["word"]` is refused.
* **Language**: *detected* where none is given; *named*: a request without `language` is refused. Without either, the
  model knows what it was trained for only, and `language` is ignored.
* **Translates**: `/v1/audio/translations`, into English; others refuse `task`.
* **Live**: *by chunk*: each stretch of a live stream is heard once, and the audio that its words wait for is at most
  300 ms long: Nemotron's lookahead and Voxtral-realtime's delay are the longest within that. Kyutai STT's delay cannot
  be chosen, it is in the weights (0.5 s, or 2.5 s of the larger checkpoint); a frame of 80 ms is heard as soon as it is
  there. Others hear what was said again and again while it lasts (`--partial-every`).

Qwen3-ASR takes a `prompt` (names, subjects) as context, and names the language that it heard. Voxtral detects the
language without naming it; its prompt is the one of mistral-common's transcription requests, `lang:…` included, and
its `tekken.json` is read without that library. Voxtral is a chat model too, then asked for the words in a chat.

Chat models that hear are served by `--llm` ([models.md](models.md)). `scripts/list_recognizers.py` writes this page
from `services/motet_asr/models/registry.py`; a test compares the two, and another one what loaded models of every row
say of themselves.

## Served: {count}

| `model_type` | class | decoding | word times | language | translates | live |
|---|---|---|---|---|---|---|"""

REFUSED = """
## Refused

Other classes of transformers {version} that hear and write, and what they are refused with when they are loaded.

| `model_type` | class | reason |
|---|---|---|"""


def served_row(kind: str, recognizer: Recognizer) -> str:
    """Return the row of a type that loads."""
    family = recognizer.family
    named = "named" if family.needs_language else ""
    cells = (
        kind,
        recognizer.class_name,
        recognizer.engine.decoding,
        family.word_times,
        "detected" if family.detects else named,
        "yes" if family.translates else "",
        "by chunk" if family.streams else "",
    )
    return f"| {' | '.join(cells)} |"


def refused() -> Iterator[tuple[str, str]]:
    """Yield type and class of what transformers lists beside those that load, in order."""
    found: dict[str, str] = {}
    for name in _LISTS:
        listed: Any = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
        found |= dict(listed)
    yield from sorted((kind, name) for kind, name in found.items() if kind not in RECOGNIZERS)


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD.format(count=len(RECOGNIZERS))]
    lines += [served_row(kind, recognizer) for kind, recognizer in sorted(RECOGNIZERS.items())]
    lines.append(REFUSED.format(version=transformers.__version__))
    lines += [f"| {kind} | {name} | {refusal(kind)} |" for kind, name in refused()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
