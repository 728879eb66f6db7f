"""Steps of speech that fail: the sentence that fails them ends, and all others sound as if it had not been there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motet_shared.errors import InternalError, MotetError, Overloaded
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import Key, StepOutput, Utterance
from motet_tts.models.bark import Bark
from motet_tts.models.codec_lm import CodecBatch
from motet_tts.models.orpheus import Orpheus
from motet_tts.models.vits import Vits
from support.checkpoints import tts_checkpoints
from support.engine.token_speaker import engine_of

TEXTS = (
    "hello there",
    "a",
    "the blue circle is left of the star",
    "no one knows",
    "seven small squares and one more",
)
BAD = 2
FRAMES = 9
TOLERANCE = 1e-4  # the order of float32 additions differs with the batch, nothing else
PARTS = {
    "bark": ("advance",),
    "csm": ("forward", "draw", "decode"),
    "dia": ("forward", "draw", "finish"),  # whose codec looks ahead beyond these sentences
    "higgs_audio_v2": ("forward", "draw", "finish"),
    "llama": ("decode",),
    "pocket_tts": ("forward", "draw", "decode"),
    "speecht5": ("forward", "draw", "decode"),
    "vibevoice": ("forward", "draw"),  # which decodes
    "vits": ("plan", "decode"),
}
CASES = [(family, part) for family, parts in PARTS.items() for part in parts]


def out_of_memory() -> None:
    torch.empty(1 << 60)


def a_bug() -> None:
    raise ValueError("a bug of model code")


@dataclass
class Fault:
    """Fail calls that concern the bad sentence, from its call `after` on, behind a share of their modules."""

    error: Callable[[], None]
    after: int
    share: float
    modules: int = 0  # of the last call that was whole
    calls: int = 0
    hits: int = 0
    _seen: int = field(default=0, init=False)
    _armed: bool = field(default=False, init=False)

    def around(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        keys: Callable[..., Iterable[Key]],
    ) -> None:
        """Have calls of a function fail, whose arguments tell the sentences that it computes for."""
        original = getattr(owner, name)

        def failing(*args: Any) -> Any:
            concerned = BAD in set(keys(*args))
            self._seen, self._armed = 0, concerned and self.calls >= self.after
            try:
                result = original(*args)
            finally:
                self._armed = False
            self.modules = self._seen
            self.calls += concerned
            return result

        patch.setattr(owner, name, failing)

    def on_module(self, *_: Any) -> None:
        self._seen += 1
        if self._armed and self._seen > self.share * (self.modules - 1):
            self._armed = False
            self._fail()

    def _fail(self) -> None:
        self.hits += 1
        self.error()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by family, each made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp(family) / "model"
            made[family] = tts_checkpoints.MAKERS[family](path)
        return made[family]

    return make


def engine(path: Path) -> Engine:
    return engine_of(EngineConfig(model=str(path), first_chunk=0.002, chunk=0.008))


def place(engine: Engine, part: str) -> tuple[Any, str, Callable[..., Iterable[Key]]]:
    """Return a function of the model, as owner and name, and which sentences its arguments are of."""
    model: Any = engine.model
    if isinstance(model, CodecBatch):
        if part == "forward":
            return model.family, "forward", lambda _, batch: (one.key for one in batch.sentences)
        if part == "draw":
            return model.family, "draw", lambda _, rows: (one.key for one in rows)
        if part == "finish":
            return model.family.codec, "finish", lambda state: _of(model._rows, [state])
        return model.family.codec, "decode", lambda states, _: _of(model._rows, states)
    if isinstance(model, Vits):
        if part == "plan":
            return model, "_plan", lambda one: [one.key]
        return model, "_decode", lambda group: (one.key for one in group)
    if isinstance(model, Bark):
        return model, "_advance", lambda one: [one.key]
    assert isinstance(model, Orpheus)
    return model._codec, "decode", lambda states, _: _of(model._sentences.values(), states)


def _of(sentences: Iterable[Any], states: list[Any]) -> list[Key]:
    return [one.key for one in sentences if any(one.codec is state for state in states)]


def add(engine: Engine, key: int) -> None:
    words = tuple(TEXTS[key % len(TEXTS)].split())
    voice = engine.voices[0]
    engine.add(key, Utterance(words=words, voice=voice, max_frames=FRAMES, seed=key))


def spoken(engine: Engine, *keys: int) -> dict[Key, Tensor | MotetError]:
    """Return what is said of sentences that are added one step after the other, or their errors."""
    left, pieces, errors = list(keys), dict[Key, list[StepOutput]](), dict[Key, MotetError]()
    while left or engine.has_work:
        if left:
            add(engine, left.pop(0))
        for piece in engine.step():
            pieces.setdefault(piece.key, []).append(piece)
            if piece.error is not None:
                errors[piece.key] = piece.error
        engine.check_integrity()
    assert len(engine.model) == 0
    joined = {
        key: torch.cat([one.samples for one in found if one.samples is not None])
        for key, found in pieces.items()
        if key not in errors
    }
    return {**joined, **errors}


def check_others(found: dict[Key, Any], due: dict[Key, Any]) -> None:
    assert found.keys() == due.keys()
    for key, wanted in due.items():
        if key != BAD:
            scale = max(1.0, float(wanted.abs().max()))
            torch.testing.assert_close(found[key], wanted, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.extended("families", after=6)
@pytest.mark.long(after=1)
@pytest.mark.parametrize(("family", "part"), CASES)
def test_the_sentence_that_fails_its_steps_ends_alone(
    family: str,
    part: str,
    folders: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At its first call and later on, behind the first module and behind the last one."""
    due = spoken(engine(folders(family)), *range(len(TEXTS)))
    for error, after, share in ((a_bug, 0, 0.0), (a_bug, 2, 1.0), (out_of_memory, 1, 0.5)):
        made = engine(folders(family))
        fault = Fault(error, after, share)
        with monkeypatch.context() as patch:
            fault.around(patch, *place(made, part))
            hook = nn.modules.module.register_module_forward_hook(fault.on_module)
            try:
                found = spoken(made, *range(len(TEXTS)))
            finally:
                hook.remove()
        if not fault.hits:  # a sentence has one plan, and few chunks
            assert after > 0
            continue
        assert isinstance(found[BAD], InternalError if error is a_bug else Overloaded)
        check_others(found, due)


@pytest.mark.parametrize("family", ["csm", "speecht5"])
def test_what_does_not_fit_together_is_computed_in_parts(
    family: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    due = spoken(engine(folders(family)), *range(len(TEXTS)))
    made = engine(folders(family))
    model: Any = made.model
    for owner, name in ((model.family, "forward"), (model.family, "draw")):
        original = getattr(owner, name)

        def small(rows: Any, other: Any, compute: Any = original) -> Any:
            if len(rows) > 2:
                out_of_memory()
            return compute(rows, other)

        monkeypatch.setattr(owner, name, small)
    found = spoken(made, *range(len(TEXTS)))
    assert not isinstance(found[BAD], MotetError)
    check_others(found, due)


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("csm", "vits") else pytest.param(name, marks=pytest.mark.long)
        for name in PARTS
        if name not in ("bark", "llama")
    ],
)
def test_nan_ends_its_sentence_and_leaves_nothing_behind(
    family: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further sentence, short among long ones, takes the place of the one whose keys were NaN."""
    later = [3, 4, 6]
    keys = [0, 1, BAD, *later]
    due = spoken(engine(folders(family)), *keys)
    made = engine(folders(family))
    model: Any = made.model
    if isinstance(model, CodecBatch):
        embed = model.family.embed

        def spoiled(frames: Tensor, rows: list[Any]) -> Tensor:
            embedded = embed(frames, rows).clone()
            for row, sentence in enumerate(rows):
                if sentence.key == BAD:
                    embedded[row] = torch.nan
            return embedded

        monkeypatch.setattr(model.family, "embed", spoiled)
    else:
        plan = model._plan

        def planned(sentence: Any) -> None:
            plan(sentence)
            if sentence.key == BAD:
                sentence.latents.frames = sentence.latents.frames * torch.nan

        monkeypatch.setattr(model, "_plan", planned)
    found = spoken(made, *keys)
    assert isinstance(found[BAD], InternalError)
    assert "NaN" in str(found[BAD])
    check_others(found, due)


def test_a_text_that_cannot_be_begun_ends_alone(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(folders("csm"))
    model: Any = made.model
    begin = model.family.begin

    def beginning(key: Key, utterance: Utterance) -> Any:
        if key == BAD:
            a_bug()
        return begin(key, utterance)

    monkeypatch.setattr(model.family, "begin", beginning)
    found = spoken(made, 0, BAD, 1)
    assert isinstance(found[BAD], InternalError)
    assert not isinstance(found[1], MotetError)
