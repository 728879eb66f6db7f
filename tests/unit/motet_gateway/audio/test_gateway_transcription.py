"""What a form may ask of a transcription: how speech is found, who is known, and what goes together."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from motet_gateway.audio.known_speakers import check_sounds
from motet_gateway.audio.transcription_schema import AudioBody, parse_audio
from motet_gateway.http.multipart import Form
from motet_shared.errors import BadRequest, UnsupportedParameter
from support.checkpoints.asr_checkpoints import noise, wav
from support.running.refusals import refuses

SOUND = "data:audio/wav;base64," + base64.b64encode(wav(noise(3.0))).decode()


def parsed(task: Any = "transcribe", **fields: Any) -> AudioBody:
    given = {"model": "ears"} | {
        name.replace("__", "[") + "]" * ("__" in name): v for name, v in fields.items()
    }
    form = Form(
        file=b"x", fields={name: v if isinstance(v, list) else [v] for name, v in given.items()}
    )
    return parse_audio(form, task)


def test_speech_is_found_as_we_like_unless_somebody_says_how() -> None:
    for body in (parsed(), parsed(chunking_strategy="auto")):
        assert not body.vad
        assert body.speech == parsed().speech
    sent = parsed(
        chunking_strategy__type="server_vad",
        chunking_strategy__threshold="0.7",
        chunking_strategy__prefix_padding_ms="9",
    )
    written = parsed(
        chunking_strategy='{"type": "server_vad", "threshold": 0.7, "prefix_padding_ms": 9}'
    )
    for body in (sent, written):
        assert body.vad
        assert (
            body.speech.threshold,
            body.speech.prefix_padding_ms,
            body.speech.silence_duration_ms,
        ) == (0.7, 9, 200)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
        ({"chunking_strategy": "[1]"}, "chunking_strategy"),
        ({"chunking_strategy": '{"type": "semantic_vad"}'}, "chunking_strategy"),
        ({"chunking_strategy": '{"type": "server_vad", "speed": 1}'}, "chunking_strategy"),
        ({"chunking_strategy": '{"type": "server_vad", "threshold": 1.5}'}, "chunking_strategy"),
        (
            {"chunking_strategy": '{"type": "server_vad", "silence_duration_ms": 1.5}'},
            "chunking_strategy",
        ),
        (
            {"chunking_strategy": '{"type": "server_vad", "silence_duration_ms": "long"}'},
            "chunking_strategy",
        ),
        ({"chunking_strategy__threshold": "0.5"}, "chunking_strategy"),
        (
            {"known_speaker_names": ["a", "b"], "known_speaker_references": [SOUND]},
            "known_speaker_names",
        ),
        (
            {"known_speaker_names": ["a", "a"], "known_speaker_references": [SOUND] * 2},
            "known_speaker_names",
        ),
        (
            {"known_speaker_names": list("abcde"), "known_speaker_references": [SOUND] * 5},
            "known_speaker_names",
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["https://x/y.wav"]},
            "known_speaker_references",
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": [SOUND + "!"]},
            "known_speaker_references",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parsed(response_format="diarized_json", **fields)
    assert refused.value.param == param


def test_what_does_not_go_together_is_named() -> None:
    known = {"known_speaker_names": ["a"], "known_speaker_references": [SOUND]}
    with refuses(BadRequest, "known_speaker_names"):
        parsed(**known)
    with refuses(BadRequest, "timestamp_granularities"):
        parsed(response_format="diarized_json", stream="true", timestamp_granularities=["word"])
    with refuses(BadRequest, "response_format"):
        parsed("translate", response_format="diarized_json")
    with refuses(UnsupportedParameter, "model[x]"):
        parsed(model__x="y")
    asked = parsed(response_format="diarized_json", **known).diarization
    assert asked is not None
    assert [name for name, _ in asked.known] == ["a"]
    assert parsed().diarization is None


@pytest.mark.parametrize(
    ("sound", "named"),
    [
        (wav(noise(1.0)), r"1\.0 s"),
        (wav(noise(11.0)), r"11\.0 s"),
        (b"no sound", "known_speaker"),
    ],
)
def test_a_reference_is_a_sound_of_some_seconds(sound: bytes, named: str) -> None:
    check_sounds((("Ann", wav(noise(2.5))),))
    with pytest.raises(BadRequest, match=named) as refused:
        check_sounds((("Ann", wav(np.zeros(40_000))), ("Bob", sound)))
    assert refused.value.param == "known_speaker_references"
    assert "[1]" in refused.value.message
