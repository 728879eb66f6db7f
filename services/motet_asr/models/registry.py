"""List the kinds of checkpoints that load: their class in transformers, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from motet_asr.config import EngineConfig
from motet_asr.engine.engine import Engine
from motet_asr.engine.slot_engine import SlotEngine, SlotFamily
from motet_asr.engine.transducer_engine import TransducerEngine, TransducerFamily

from .ctc import GRANITE, LASR, SPECTRUM, STACKED, UNPADDED, WAVEFORM, Ctc, CtcEngine, CtcModel
from .moonshine import Moonshine
from .nemotron import Nemotron, PromptedNemotron
from .transducer import Transducer
from .whisper import Whisper

Build = Callable[[EngineConfig, Any, Any, Any], Engine]


@dataclass(frozen=True, slots=True)
class Recognizer:
    """Describe one `model_type`.

    class_name: its class in transformers.
    decoding: "encoder-decoder", "CTC" or "transducer".
    build: makes its engine of settings, model, feature extractor and tokenizer.
    """

    class_name: str
    decoding: str
    build: Build


def _slots(class_name: str, family: Callable[..., SlotFamily]) -> Recognizer:
    def build(config: EngineConfig, *parts: Any) -> Engine:
        return SlotEngine(config, family(config, *parts))

    return Recognizer(class_name, "encoder-decoder", build)


def _ctc(class_name: str, kind: CtcModel) -> Recognizer:
    def build(config: EngineConfig, *parts: Any) -> Engine:
        return CtcEngine(config, Ctc(config, *parts, kind))

    return Recognizer(class_name, "CTC", build)


def _transducer(class_name: str, family: Callable[..., TransducerFamily]) -> Recognizer:
    def build(config: EngineConfig, *parts: Any) -> Engine:
        return TransducerEngine(config, family(config, *parts))

    return Recognizer(class_name, "transducer", build)


RECOGNIZERS: dict[str, Recognizer] = {
    "data2vec-audio": _ctc("Data2VecAudioForCTC", UNPADDED),
    "granite_speech5_ctc": _ctc("GraniteSpeech5ForCTC", GRANITE),
    "hubert": _ctc("HubertForCTC", WAVEFORM),
    "lasr_ctc": _ctc("LasrForCTC", LASR),
    "moonshine": _slots("MoonshineForConditionalGeneration", Moonshine),
    "nemotron3_5_asr": _transducer("Nemotron3_5AsrForRNNT", PromptedNemotron),
    "nemotron_asr_streaming": _transducer("NemotronAsrStreamingForRNNT", Nemotron),
    "parakeet_ctc": _ctc("ParakeetForCTC", SPECTRUM),
    "parakeet_rnnt": _transducer("ParakeetForRNNT", Transducer),
    "parakeet_tdt": _transducer("ParakeetForTDT", Transducer),
    "sew": _ctc("SEWForCTC", UNPADDED),
    "sew-d": _ctc("SEWDForCTC", UNPADDED),
    "unispeech": _ctc("UniSpeechForCTC", WAVEFORM),
    "unispeech-sat": _ctc("UniSpeechSatForCTC", WAVEFORM),
    "wav2vec2": _ctc("Wav2Vec2ForCTC", WAVEFORM),
    "wav2vec2-bert": _ctc("Wav2Vec2BertForCTC", STACKED),
    "wav2vec2-conformer": _ctc("Wav2Vec2ConformerForCTC", UNPADDED),
    "wavlm": _ctc("WavLMForCTC", UNPADDED),
    "whisper": _slots("WhisperForConditionalGeneration", Whisper),
}
