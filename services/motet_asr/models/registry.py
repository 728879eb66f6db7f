"""List the kinds of checkpoints that load: their class in transformers, family and engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from motet_asr.config import EngineConfig
from motet_asr.engine.causal_engine import CausalEngine
from motet_asr.engine.engine import Engine
from motet_asr.engine.slot_engine import SlotEngine
from motet_asr.engine.transducer_engine import TransducerEngine

from .canary import Canary, CohereTranscriber
from .ctc import GRANITE, LASR, SPECTRUM, STACKED, UNPADDED, WAVEFORM, Ctc, CtcEngine, CtcModel
from .delayed_streams import Kyutai, VoxtralRealtime
from .moonshine import Moonshine, StreamingMoonshine
from .nemotron import Nemotron, PromptedNemotron
from .spoken_prompts import Qwen3Asr, VoxtralTranscriber
from .transducer import Transducer
from .whisper import Whisper


@dataclass(frozen=True, slots=True)
class Recognizer:
    """Describe one `model_type`.

    class_name: its class in transformers.
    family: the subclass of `RecognizerFamily` that adapts it.
    engine: what schedules it, one for each way of decoding.
    ctc: of a CTC model, how it reads its features.
    """

    class_name: str
    family: type[Any]
    engine: type[Any] = SlotEngine
    ctc: CtcModel | None = None

    def load(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any) -> Engine:
        """Return the engine of a loaded model, its feature extractor and its tokenizer."""
        more = () if self.ctc is None else (self.ctc,)
        engine: Engine = self.engine(
            config, self.family(config, model, extractor, tokenizer, *more)
        )
        return engine


def _ctc(class_name: str, kind: CtcModel) -> Recognizer:
    return Recognizer(class_name, Ctc, CtcEngine, kind)


RECOGNIZERS: dict[str, Recognizer] = {
    "canary": Recognizer("CanaryForConditionalGeneration", Canary),
    "cohere_asr": Recognizer("CohereAsrForConditionalGeneration", CohereTranscriber),
    "data2vec-audio": _ctc("Data2VecAudioForCTC", UNPADDED),
    "granite_speech5_ctc": _ctc("GraniteSpeech5ForCTC", GRANITE),
    "hubert": _ctc("HubertForCTC", WAVEFORM),
    "kyutai_speech_to_text": Recognizer(
        "KyutaiSpeechToTextForConditionalGeneration", Kyutai, CausalEngine
    ),
    "lasr_ctc": _ctc("LasrForCTC", LASR),
    "moonshine": Recognizer("MoonshineForConditionalGeneration", Moonshine),
    "moonshine_streaming": Recognizer(
        "MoonshineStreamingForConditionalGeneration", StreamingMoonshine
    ),
    "nemotron3_5_asr": Recognizer("Nemotron3_5AsrForRNNT", PromptedNemotron, TransducerEngine),
    "nemotron_asr_streaming": Recognizer("NemotronAsrStreamingForRNNT", Nemotron, TransducerEngine),
    "parakeet_ctc": _ctc("ParakeetForCTC", SPECTRUM),
    "parakeet_rnnt": Recognizer("ParakeetForRNNT", Transducer, TransducerEngine),
    "parakeet_tdt": Recognizer("ParakeetForTDT", Transducer, TransducerEngine),
    "qwen3_asr": Recognizer("Qwen3ASRForConditionalGeneration", Qwen3Asr, CausalEngine),
    "sew": _ctc("SEWForCTC", UNPADDED),
    "sew-d": _ctc("SEWDForCTC", UNPADDED),
    "unispeech": _ctc("UniSpeechForCTC", WAVEFORM),
    "unispeech-sat": _ctc("UniSpeechSatForCTC", WAVEFORM),
    "voxtral": Recognizer("VoxtralForConditionalGeneration", VoxtralTranscriber, CausalEngine),
    "voxtral_realtime": Recognizer(
        "VoxtralRealtimeForConditionalGeneration", VoxtralRealtime, CausalEngine
    ),
    "wav2vec2": _ctc("Wav2Vec2ForCTC", WAVEFORM),
    "wav2vec2-bert": _ctc("Wav2Vec2BertForCTC", STACKED),
    "wav2vec2-conformer": _ctc("Wav2Vec2ConformerForCTC", UNPADDED),
    "wavlm": _ctc("WavLMForCTC", UNPADDED),
    "whisper": Recognizer("WhisperForConditionalGeneration", Whisper),
}
