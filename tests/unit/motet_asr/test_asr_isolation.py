"""Steps of recognition that fail: the window that fails them ends, and all others say what they say alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_asr.engine.audio_stream import StreamChunk
from motet_asr.engine.engine import Engine
from motet_asr.engine.request import TranscriptionOptions
from motet_shared.errors import InternalError, MotetError, Overloaded, StreamBroken
from support.checkpoints.asr_checkpoints import noise, tiny_parakeet, tiny_whisper
from support.checkpoints.recognizers import TINY, tiny_nemotron
from support.engine.recognizer_runs import add, engine_of

BAD, COUNT = 2, 5
# By kind of engine: a checkpoint, and the function of its model that decodes.
KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "encoder-decoder": (tiny_whisper, "decoder.step"),
    "transducer": (TINY["parakeet_rnnt"], "join"),
    "ctc": (tiny_parakeet, "transcribe"),
}
SOUNDS = [noise(1.0 + 0.2 * seed, seed) for seed in range(COUNT)]


def out_of_memory() -> None:
    torch.empty(1 << 60)


def a_bug() -> None:
    raise ValueError("a bug of model code")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = KINDS[kind][0](tmp_path_factory.mktemp("recognizer"))
        return made[kind]

    return make


def recognizer(folder: Path) -> Engine:
    return engine_of(folder, fallback=False, threads=1)


def fail(
    engine: Engine, patch: pytest.MonkeyPatch, name: str, when: Callable[[], None], after: int = 0
) -> None:
    """Call `when` behind each call of a function of the model that computes for the bad window."""
    *owners, last = name.split(".")
    owner: Any = engine.family
    for one in owners:
        owner = getattr(owner, one)
    original, calls = getattr(owner, last), 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        result = original(*args)
        if BAD in engine._taken:
            calls += 1
            if calls > after:
                when()
        return result

    patch.setattr(owner, last, failing)


def heard(engine: Engine) -> dict[Any, list[int] | MotetError]:
    """Return the tokens of all sounds, or their errors, after none of them is left."""
    for key, sound in enumerate(SOUNDS):
        add(engine, key, sound, language="" if engine.decoding != "encoder-decoder" else "en")
    found: dict[Any, list[int] | MotetError] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.key not in found
            assert output.result is not None or output.error is not None
            found[output.key] = output.error or output.result.tokens  # type: ignore[union-attr]
        engine.check_integrity()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_that_fails_its_steps_ends_alone(
    kind: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    due = heard(recognizer(folders(kind)))
    del due[BAD]
    for error, after in ((a_bug, 0), (out_of_memory, 3)):
        engine = recognizer(folders(kind))
        with monkeypatch.context() as patch:
            fail(engine, patch, KINDS[kind][1], error, 0 if kind == "ctc" else after)
            found = heard(engine)
        assert isinstance(found.pop(BAD), InternalError if error is a_bug else Overloaded)
        assert found == due


def test_what_does_not_fit_together_is_computed_in_parts(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    due = heard(recognizer(folders("encoder-decoder")))
    engine = recognizer(folders("encoder-decoder"))

    def when() -> None:
        if len(engine._taken) > 1:
            out_of_memory()

    fail(engine, monkeypatch, "decoder.step", when)
    assert heard(engine) == due


def test_a_window_that_leaves_a_failed_step_is_not_computed_again(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = recognizer(folders("encoder-decoder"))
    fail(engine, monkeypatch, "decoder.step", a_bug)
    for key in range(COUNT):
        add(engine, key, SOUNDS[key], language="en")
    engine.step()
    for key in range(COUNT):
        assert engine.holds(key)
        engine.cancel(key)
    assert not engine.has_work
    assert not engine.step()
    engine.check_integrity()


def test_ctc_scores_that_are_no_numbers_end_their_window_alone(
    folders: Callable[[str], Path],
) -> None:
    due = heard(recognizer(folders("ctc")))
    engine = recognizer(folders("ctc"))
    for key, sound in enumerate(SOUNDS):
        spoiled = sound.copy()
        spoiled[100] = float("nan") if key == BAD else spoiled[100]
        add(engine, key, spoiled)
    found = {output.key: output for _ in range(COUNT) for output in engine.step()}
    assert isinstance(found.pop(BAD).error, InternalError)
    assert {key: one.result and one.result.tokens for key, one in found.items()} == {
        key: tokens for key, tokens in due.items() if key != BAD
    }


def test_live_streams_of_a_failed_step_move_and_the_one_that_is_alone_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk changes the state of its stream, so it is not computed twice."""
    engine = recognizer(tiny_nemotron(tmp_path))
    fail(engine, monkeypatch, "join", a_bug)

    def chunk() -> StreamChunk:
        stream = engine.family.open_stream()
        return (stream.feed(noise(4.0)) or stream.finish())[0]

    for keys, kind in (((1, BAD), StreamBroken), ((BAD,), InternalError)):
        for key in keys:
            one = chunk()
            engine.add(key, one, one.seconds, TranscriptionOptions())
        ended = {output.key: output.error for output in engine.step()}
        assert ended.keys() == set(keys)
        assert all(isinstance(error, kind) for error in ended.values())
        assert not engine.has_work
