"""The speech engine makes the very samples that transformers makes: alone, in company, and however they are cut."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from snac import SNAC
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BarkModel,
    CsmForConditionalGeneration,
    DacFeatureExtractor,
    DacModel,
    DiaFeatureExtractor,
    DiaForConditionalGeneration,
    DiaProcessor,
    GradiumPhononTTSForConditionalGeneration,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2Processor,
    HiggsAudioV2TokenizerModel,
    LlamaForCausalLM,
    PocketTTSAudioTokenizerModel,
    PocketTTSFeatureExtractor,
    PocketTTSForConditionalGeneration,
    SpeechT5ForTextToSpeech,
    SpeechT5HifiGan,
    VibeVoiceAcousticTokenizerFeatureExtractor,
    VibeVoiceForConditionalGeneration,
    VibeVoiceProcessor,
    VitsModel,
)

from motet_shared.errors import BadRequest, ConfigError, Overloaded
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import StepOutput, Utterance, VoiceSample
from motet_tts.models import higgs_audio, voices
from motet_tts.models.codec_lm import Drawn
from motet_tts.models.noise import Noise, hash_numbers
from support.checkpoints import tts_checkpoints
from support.engine.token_speaker import engine_of
from support.running.refusals import refuses

# Of samples whose peaks are about 1: the order of float32 additions differs, nothing else. Latents are fed back as they
# are, so that in PocketTTS the difference grows over the frames.
TOLERANCE = 1e-4
TEXTS = (
    "hello there",
    "a",
    "the blue circle is left of the star",
    "no one knows",
    "seven small squares and one more",
)
FRAMES = 9
WHOLE = {"bark"}  # families that finish a sentence before its first sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by family and options, each made once."""
    made: dict[Any, Path] = {}

    def make(family: str, **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            makers: dict[str, Any] = dict(tts_checkpoints.MAKERS)
            made[key] = makers[family](tmp_path_factory.mktemp(family) / "model", **options)
        return made[key]

    return make


def engine(path: Path, **options: Any) -> Engine:
    return engine_of(
        EngineConfig(model=str(path), **{"first_chunk": 0.002, "chunk": 0.008, **options})
    )


def say(text: str, voice: str, **options: Any) -> Utterance:
    return Utterance(words=tuple(text.split()), voice=voice, **{"max_frames": FRAMES, **options})


def finish(engine: Engine) -> dict[Any, list[StepOutput]]:
    """All pieces of everything that runs, by key."""
    pieces: dict[Any, list[StepOutput]] = {}
    while engine.has_work:
        for piece in engine.step():
            pieces.setdefault(piece.key, []).append(piece)
        engine.check_integrity()
    return pieces


def joined(pieces: list[StepOutput]) -> Tensor:
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return torch.cat([piece.samples for piece in pieces if piece.samples is not None])


def near(got: Tensor, wanted: Tensor) -> None:
    assert wanted.abs().max() > 0.01, "the reference is silent: nothing would be proved"
    torch.testing.assert_close(
        got, wanted, rtol=0, atol=TOLERANCE * max(1.0, float(wanted.abs().max()))
    )


# --------------------------------------------------------------------------------------------------- what is due
@functools.cache
def loaded(kind: Any, path: Path, **options: str) -> Any:
    """Return what transformers reads of a checkpoint, once for all references."""
    found = kind.from_pretrained(path, **options)
    return found.eval() if isinstance(found, torch.nn.Module) else found


@torch.inference_mode()
def csm_reference(
    path: Path, text: str, voice: str, frames: int = FRAMES, sample: VoiceSample | None = None
) -> Tensor:
    model = loaded(CsmForConditionalGeneration, path)
    tokenizer, config = loaded(AutoTokenizer, path), model.config
    ids, heard = tokenizer(f"[{voice}]{text}")["input_ids"], dict[str, Tensor]()
    if sample is not None:
        count = math.ceil(len(sample.samples) / (4 * 3 * 2 * 2))  # Mimi halves its rate once more
        audio = [config.audio_token_id] * count + [config.audio_eos_token_id]
        ids = [*tokenizer(f"[{voice}]{sample.words}")["input_ids"], *audio, *ids]
        heard["input_values"] = sample.samples[None, None]
        heard["input_values_cutoffs"] = torch.tensor([[len(sample.samples)]])
    heard["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)  # audio is no padding
    spoken: Tensor = model.generate(
        torch.tensor([ids]), output_audio=True, max_new_tokens=frames, do_sample=False, **heard
    )[0]
    return spoken


@torch.inference_mode()
def pocket_reference(
    path: Path,
    text: str,
    voice: str,
    frames: int | None = FRAMES,
    sample: VoiceSample | None = None,
    *,
    architecture: Any = PocketTTSForConditionalGeneration,
) -> Tensor:
    model = loaded(architecture, path)
    tokenizer = loaded(PocketTTSAudioTokenizerModel, path / "audio_tokenizer")
    config = model.config
    if sample is None:
        latents = load_file(path / "voices" / f"{voice}.safetensors")["audio_prompt"]
    else:
        size = tokenizer.config.frame_size
        extractor = PocketTTSFeatureExtractor(
            sampling_rate=24_000, frame_size=size, pad_to_multiple_of=size
        )
        sound = extractor(sample.samples.numpy(), sampling_rate=24_000)
        latents = tokenizer.encode(sound["input_values"], sound["padding_mask"]).latents
    ids = loaded(AutoTokenizer, path)(text)["input_ids"]
    voice_ids = [config.audio_prompt_token_id] * latents.shape[1]
    if (begin := getattr(config, "audio_prompt_bos_token_id", None)) is not None:
        voice_ids = [begin, *voice_ids]
    output = model.generate(
        torch.tensor([[*voice_ids, *ids, config.audio_bos_token_id]]),
        attention_mask=torch.ones(1, len(voice_ids) + len(ids) + 1, dtype=torch.long),
        audio_prompt_latents=latents,
        frames_after_eos=torch.tensor([4 if len(text.split()) <= 4 else 2]),
        do_sample=False,
        return_dict_in_generate=True,
        **({"max_new_tokens": frames} if frames else {}),
    )
    audio: Tensor = tokenizer.decode(output.audio_latents).audio_values[0, 0]
    audio[:120] *= torch.linspace(0, 1, 120)  # the processor's fade-in of 5 ms
    return audio


@torch.inference_mode()
def vits_reference(path: Path, text: str, voice: str, seed: int = 0) -> Tensor:
    model = loaded(VitsModel, path)
    torch.manual_seed(hash_numbers(seed, 0))
    inputs = loaded(AutoTokenizer, path)(text, return_tensors="pt")
    speaker = int(voice) if voice != "default" else None
    waveform: Tensor = model(**inputs, speaker_id=speaker).waveform[0]
    return waveform


@torch.inference_mode()
def speecht5_reference(path: Path, text: str, voice: str, frames: int = FRAMES) -> Tensor:
    model = loaded(SpeechT5ForTextToSpeech, path)
    model.speech_decoder_postnet.prob_out.bias.fill_(-1e4)  # it ends at the limit, as here
    vocoder = loaded(SpeechT5HifiGan, path / "vocoder")
    speaker = load_file(path / "voices" / f"{voice}.safetensors")["speaker"]
    prenet = model.speecht5.decoder.prenet
    calls = itertools.count()

    def dropout(hidden: Tensor, p: float) -> Tensor:
        """Drop as transformers does, with the noise that belongs to each position."""
        layers, units = len(prenet.layers), hidden.shape[-1]
        layer = next(calls) % layers
        drawn = [
            Noise(0, 0, place).uniform(layers, units)[layer] for place in range(hidden.shape[1])
        ]
        return torch.where(torch.stack(drawn) < p, hidden, 0) * 1 / (1 - p)

    prenet._consistent_dropout = dropout
    ids = loaded(AutoTokenizer, path)(text, return_tensors="pt")["input_ids"]
    ratio = (frames + 0.5) * model.config.reduction_factor / ids.shape[1]
    audio: Tensor = model.generate(
        ids, speaker_embeddings=speaker, vocoder=vocoder, maxlenratio=ratio
    )
    return audio


@torch.inference_mode()
def dia_reference(
    path: Path, text: str, voice: str, frames: int = FRAMES, sample: VoiceSample | None = None
) -> Tensor:
    model = loaded(DiaForConditionalGeneration, path)
    tokenizer = loaded(AutoTokenizer, path)
    codec = loaded(DacModel, path / "audio_tokenizer")
    decoder, delays = model.config.decoder_config, model.config.delay_pattern
    extractor = DiaFeatureExtractor(sampling_rate=codec.config.sampling_rate, hop_length=32)
    processor = DiaProcessor(extractor, tokenizer, codec)
    special = {
        "bos_token_id": decoder.bos_token_id,
        "eos_token_id": decoder.eos_token_id,
        "pad_token_id": decoder.pad_token_id,
        "delay_pattern": delays,
        "sampling_rate": codec.config.sampling_rate,
    }
    text = f"[{voice}] {text}"
    inputs = processor(
        text=[text if sample is None else f"[{voice}] {sample.words} {text}"],
        audio=None if sample is None else [sample.samples.numpy()],
        text_kwargs={"padding": False, "return_tensors": "pt"},
        audio_kwargs={**special},
    )
    steps = frames + max(delays) + 1
    output = model.generate(**inputs, max_new_tokens=steps, do_sample=False)
    length = inputs["decoder_attention_mask"].shape[1] - max(delays)
    audio: Tensor = processor.decode(output, audio_prompt_len=length, audio_kwargs=special)
    return audio


@torch.inference_mode()
def higgs_reference(
    path: Path,
    text: str,
    voice: str,
    frames: int = FRAMES,
    sample: VoiceSample | None = None,
    scene: str = "",
) -> Tensor:
    model = loaded(HiggsAudioV2ForConditionalGeneration, path)
    codec = loaded(HiggsAudioV2TokenizerModel, path / "audio_tokenizer")
    tokenizer, config = loaded(AutoTokenizer, path), model.config
    processor = HiggsAudioV2Processor(
        DacFeatureExtractor(sampling_rate=24_000, hop_length=codec.config.hop_length),
        tokenizer,
        codec,
        audio_token=tokenizer.convert_ids_to_tokens(config.audio_token_id),
        audio_bos_token=tokenizer.convert_ids_to_tokens(config.audio_bos_token_id),
        audio_delay_token=tokenizer.convert_ids_to_tokens(config.audio_delay_token_id),
        audio_stream_bos_id=config.audio_stream_bos_id,
        audio_stream_eos_id=config.audio_stream_eos_id,
    )
    turns: list[dict[str, Any]] = [_turn("system", "Generate audio following instruction.")]
    if scene:
        turns.append(_turn("scene", scene))
    if sample is not None:
        turns.append(_turn("user", sample.words))
        turns.append({"role": "assistant", "content": [{"type": "audio"}]})
    turns.append(_turn("user", text))
    inputs = processor(
        text=tokenizer.apply_chat_template(turns, tokenize=False),
        audio=None if sample is None else [sample.samples.numpy()],
        text_kwargs={"padding": False, "return_tensors": "pt"},
        audio_kwargs={"return_tensors": "pt"},
    )
    output = model.generate(**inputs, max_new_tokens=frames + config.num_codebooks, do_sample=False)
    audio: Tensor = processor.decode(output)
    return audio


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


@torch.inference_mode()
def orpheus_reference(path: Path, text: str, voice: str, frames: int = FRAMES) -> Tensor:
    model = loaded(LlamaForCausalLM, path)
    tokenizer = loaded(AutoTokenizer, path)
    first = tokenizer.convert_tokens_to_ids("<custom_token_0>")
    prompt = (
        f"<custom_token_3>{voice}: {text}<|eot_id|><custom_token_4><custom_token_5><custom_token_1>"
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=7 * frames, do_sample=False, eos_token_id=first + 2)
    codes_N7 = (made[0, ids.shape[1] :] - first - 10)[: 7 * frames]
    codes_N7 = codes_N7[codes_N7 >= 0].unflatten(0, (-1, 7)) - 32 * torch.arange(7)
    assert ((codes_N7 >= 0) & (codes_N7 < 32)).all()
    codec = SNAC.from_pretrained(path / "audio_tokenizer")
    levels = [codes_N7[:, places].reshape(1, -1) for places in ([0], [1, 4], [2, 3, 5, 6])]
    key, sizes = hash_numbers(0, 0) >> 1, (16, 32)  # steps of a frame in each layer
    drawn = [Noise(key, 0, number).normal(sum(sizes)) for number in range(len(codes_N7))]
    layers = iter(torch.stack(drawn).split(sizes, dim=1))
    with mock.patch("snac.layers.torch.randn", lambda shape, **_: next(layers).reshape(shape)):
        audio: Tensor = codec.decode(levels)[0, 0]
    return audio


class _Tokens:
    """Keep the tokens of `generate`, as its streamer: the prompt comes first."""

    def __init__(self) -> None:
        self._pieces: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        self._pieces.append(tokens.flatten().tolist())

    def end(self) -> None: ...

    @property
    def new(self) -> list[int]:
        return [token for piece in self._pieces[1:] for token in piece]


def vibevoice_reference(
    path: Path, text: str, voice: str, frames: int = FRAMES, sample: VoiceSample | None = None
) -> Tensor:
    return vibevoice_generate(path, text, voice, frames, sample)[0]


@torch.inference_mode()
def vibevoice_generate(
    path: Path, text: str, voice: str, frames: int, sample: VoiceSample | None = None
) -> tuple[Tensor, list[int]]:
    """Its samples and its tokens."""
    model = loaded(VibeVoiceForConditionalGeneration, path)
    tokenizer = loaded(AutoTokenizer, path)
    content, heard = [{"type": "text", "text": text}], {}
    extractor = VibeVoiceAcousticTokenizerFeatureExtractor(pad_to_multiple_of=24)
    processor = VibeVoiceProcessor(extractor, tokenizer, tokenizer.chat_template)
    if sample is not None:
        content.append({"type": "audio"})
        heard = {"audio": [sample.samples.numpy()], "audio_kwargs": {"sampling_rate": 24_000}}
    script = tokenizer.apply_chat_template([{"role": voice, "content": content}], tokenize=False)
    inputs = processor(text=script, return_tensors="pt", **heard)
    tokens, size = _Tokens(), model.config.audio_config.hidden_size
    noises = [Noise(0, 0, step).normal(size) for step in range(frames)]
    with mock.patch("torch.randn", lambda rows, _: noises[len(tokens.new) - 1].repeat(rows, 1)):
        audio = model.generate(
            **inputs, max_new_tokens=frames, do_sample=False, sample=False, streamer=tokens
        )
    return torch.zeros(0) if audio[0] is None else audio[0].flatten(), tokens.new


@torch.inference_mode()
def bark_reference(path: Path, text: str, voice: str, frames: int = FRAMES) -> Tensor:
    model = loaded(BarkModel, path, attn_implementation="eager")
    history = None
    if voice != "default":
        parts = ("semantic_prompt", "coarse_prompt", "fine_prompt")
        history = {part: torch.from_numpy(np.load(path / f"anna_{part}.npy")) for part in parts}
    inputs = loaded(AutoTokenizer, path)(
        text, padding="max_length", max_length=300, return_tensors="pt"
    )
    audio: Tensor = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        history_prompt=history,
        semantic_max_new_tokens=frames,
    )
    return audio[0]


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "bark": bark_reference,
    "csm": csm_reference,
    "dia": dia_reference,
    "gradium_phonon_tts": functools.partial(
        pocket_reference, architecture=GradiumPhononTTSForConditionalGeneration
    ),
    "higgs_audio_v2": higgs_reference,
    "llama": orpheus_reference,
    "pocket_tts": pocket_reference,
    "speecht5": speecht5_reference,
    "vibevoice": vibevoice_reference,
    "vits": vits_reference,
}
VOICES = {
    "bark": ("default", "anna"),
    "csm": ("0", "3"),
    "dia": ("S1", "S2"),
    "gradium_phonon_tts": tts_checkpoints.VOICES,
    "higgs_audio_v2": ("default", "default"),
    "llama": tts_checkpoints.VOICES,
    "pocket_tts": tts_checkpoints.VOICES,
    "speecht5": tts_checkpoints.VOICES,
    "vibevoice": ("0", "3"),
    "vits": ("default", "default"),
}


# -------------------------------------------------------------------------------------------------------- exactness
@pytest.mark.parametrize("family", REFERENCES)
def test_alone_it_is_what_transformers_makes(folder: Callable[..., Path], family: str) -> None:
    path = folder(family)
    for voice in dict.fromkeys(VOICES[family]):
        speaker = engine(path)
        speaker.add("a", say(TEXTS[0], voice))
        pieces = finish(speaker)["a"]
        near(joined(pieces), REFERENCES[family](path, TEXTS[0], voice))
        assert len(pieces) > 1 or family in WHOLE, "it came in one piece: nothing streams"


@pytest.mark.parametrize("family", REFERENCES)
def test_in_company_it_is_the_same(folder: Callable[..., Path], family: str) -> None:
    path = folder(family)
    references = [
        REFERENCES[family](path, text, VOICES[family][i % 2]) for i, text in enumerate(TEXTS)
    ]
    speaker = engine(path, max_running=3)
    pieces: dict[Any, list[StepOutput]] = {}
    for number, text in enumerate(TEXTS):  # one joins with every second step, and some wait
        speaker.add(number, say(text, VOICES[family][number % 2]))
        for piece in speaker.step() + speaker.step():
            pieces.setdefault(piece.key, []).append(piece)
    for key, rest in finish(speaker).items():
        pieces.setdefault(key, []).extend(rest)
    for number, wanted in enumerate(references):
        near(joined(pieces[number]), wanted)


@pytest.mark.parametrize("family", [name for name in REFERENCES if name not in {*WHOLE, "vits"}])
def test_samples_come_before_the_last_frame(folder: Callable[..., Path], family: str) -> None:
    """A network that looks ahead has enough of a long sentence before its end."""
    speaker = engine(folder(family))
    speaker.add("a", say(TEXTS[2], VOICES[family][0], max_frames=60))
    pieces = finish(speaker)["a"]
    heard = [piece for piece in pieces if piece.samples is not None and len(piece.samples)]
    assert len(heard) > 1
    assert heard[0].frames < pieces[-1].frames


@pytest.mark.parametrize("family", ["csm", "dia", "higgs_audio_v2", "pocket_tts", "vibevoice"])
def test_a_voice_is_cloned_as_transformers_clones_it(
    folder: Callable[..., Path], family: str
) -> None:
    path, voice = folder(family), VOICES[family][0]
    speaker = engine(path)
    generator = torch.Generator().manual_seed(3)
    recording = torch.randn(4_800, generator=generator).cumsum(0) / 60  # not as loud as noise
    sample = VoiceSample(recording, speaker.sample_rate, "no one knows")
    speaker.add("plain", say(TEXTS[0], voice))
    speaker.add("cloned", say(TEXTS[0], voice, sample=sample))
    pieces = finish(speaker)
    wanted = REFERENCES[family](path, TEXTS[0], voice, FRAMES, sample)
    near(joined(pieces["cloned"]), wanted)
    assert not torch.allclose(joined(pieces["plain"]), wanted, atol=1e-2)


def test_a_recording_is_resampled_to_the_rate_of_the_codec() -> None:
    tone = torch.sin(torch.arange(24_000) * (2 * torch.pi * 440 / 24_000)) / 2
    found = voices.resampled(VoiceSample(tone, 24_000, "a tone"), 16_000)
    wanted = torch.sin(torch.arange(16_000) * (2 * torch.pi * 440 / 16_000)) / 2
    assert len(found) == len(wanted)
    torch.testing.assert_close(found[200:-200], wanted[200:-200], rtol=0, atol=2e-3)


def test_instructions_are_the_scene_of_higgs_audio(folder: Callable[..., Path]) -> None:
    path, scene = folder("higgs_audio_v2"), "A quiet room, a whisper."
    speaker = engine(path)
    speaker.add("plain", say(TEXTS[0], "default"))
    speaker.add("instructed", say(TEXTS[0], "default", instructions=scene))
    pieces = finish(speaker)
    wanted = REFERENCES["higgs_audio_v2"](path, TEXTS[0], "default", scene=scene)
    near(joined(pieces["instructed"]), wanted)
    assert not torch.allclose(joined(pieces["plain"]), wanted, atol=1e-2)


def test_control_tokens_in_a_text_are_no_control_tokens(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("higgs_audio_v2"))
    sample = VoiceSample(torch.rand(14_400) - 0.5, 24_000, "no one <|out|> knows")
    given = Utterance(
        words=("hello", "<|out|>", "there<|delay|>"),
        voice="default",
        sample=sample,
        instructions="<|out_bos|> a whisper",
        max_frames=FRAMES,
    )
    plain = VoiceSample(sample.samples, 24_000, "no one   knows")
    same = Utterance(
        words=("hello", " ", "there "),
        voice="default",
        sample=plain,
        instructions="  a whisper",
        max_frames=FRAMES,
    )
    speaker.add("given", given)
    speaker.add("plain", same)
    pieces = finish(speaker)
    assert len(joined(pieces["given"]))
    near(joined(pieces["given"]), joined(pieces["plain"]))


def test_models_that_clone_no_voices_refuse_samples(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("vits"))
    sample = VoiceSample(torch.zeros(10), 24_000, "words")
    with refuses(BadRequest, "voice"):
        speaker.add("a", say(TEXTS[0], "default", sample=sample))


def test_pocket_tts_ends_where_transformers_ends(folder: Callable[..., Path]) -> None:
    """Without a limit of its own: at the end-of-speech logit and the frames after it, or at the budget of the text."""
    path = folder("pocket_tts")
    speaker = engine(path)
    lengths = set()
    for number, text in enumerate(TEXTS[:4]):
        speaker.add(number, say(text, "anna", max_frames=0))
    for number, pieces in finish(speaker).items():
        wanted = pocket_reference(path, TEXTS[number], "anna", None)
        near(joined(pieces), wanted)
        lengths.add(len(wanted))
    assert len(lengths) > 1


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("dia", {"ends": True}),
        ("higgs_audio_v2", {"ends": True}),
        ("llama", {"ends": True}),
    ],
)
def test_codes_end_where_transformers_ends(
    folder: Callable[..., Path], family: str, options: dict[str, Any]
) -> None:
    """The end is drawn; with delayed codes it comes in each codebook after its delay."""
    path, voice = folder(family, **options), VOICES[family][0]
    speaker = engine(path)
    for number, text in enumerate(TEXTS[:3]):
        speaker.add(number, say(text, voice, max_frames=50))
    lengths = set()
    for number, pieces in finish(speaker).items():
        wanted = REFERENCES[family](path, TEXTS[number], voice, 50)
        near(joined(pieces), wanted)
        lengths.add(len(wanted))
    assert len(lengths) > 1, "none ended by itself"


@pytest.mark.parametrize(
    ("seed", "guidance", "penalty", "limit", "ended"),
    [
        (18, 1.5, 1.0, 9, 1),
        (18, 1.0, 1.0, 50, 5),
        (24, 1.5, 1.3, 50, 5),
        (18, 1.5, 1.0, 50, 5),
        (24, 1.5, 1.0, 50, 2),
        (3, 1.5, 1.0, 50, 0),
        (18, 1.0, 1.1, 50, 5),
    ],
)
@pytest.mark.extended("families", after=3)  # a limit, no guidance, guidance with a penalty
def test_vibevoice_chooses_the_tokens_that_transformers_chooses(
    folder: Callable[..., Path], seed: int, guidance: float, penalty: float, limit: int, ended: int
) -> None:
    """It stops audio, begins it anew and ends by itself; `ended` of the texts end before the limit."""
    path = folder("vibevoice", seed=seed, guidance=guidance, penalty=penalty, ends=True)
    speaker = engine(path, max_running=3)
    tokens = _tokens_of(speaker)
    for number, text in enumerate(TEXTS):
        speaker.add(number, say(text, VOICES["vibevoice"][number % 2], max_frames=limit))
    pieces = finish(speaker)
    for number, text in enumerate(TEXTS):
        voice = VOICES["vibevoice"][number % 2]
        wanted, wanted_tokens = vibevoice_generate(path, text, voice, limit)
        assert tokens[number] == wanted_tokens
        near(joined(pieces[number]), wanted)
    ends = [chosen[-1] == tts_checkpoints.VIBEVOICE_END for chosen in tokens.values()]
    assert sum(ends) == ended


def _tokens_of(speaker: Engine) -> dict[Any, list[int]]:
    """The tokens that VibeVoice chooses for each sentence, filled in while it speaks."""
    family: Any = speaker.model.family  # type: ignore[attr-defined]
    drawn, table_VE = family.draw, family._model.get_input_embeddings().weight
    tokens: dict[Any, list[int]] = {}

    def draw(hidden: Tensor, rows: list[Any]) -> Drawn:
        found: Drawn = drawn(hidden, rows)
        for row, (_, token_E) in zip(rows, found.frames, strict=True):
            (token,) = (table_VE == token_E).all(-1).nonzero().flatten().tolist()
            tokens.setdefault(row.key, []).append(token)
        return found

    family.draw = draw
    return tokens


def test_csm_ends_at_its_end_code(folder: Callable[..., Path]) -> None:
    """A frame of end codes is not heard and is the last one. Weights are set so that one comes."""
    speaker = engine(folder("csm"))
    family: Any = speaker.model.family  # type: ignore[attr-defined]
    drawn = family.draw
    family.draw = lambda hidden, rows: (
        drawn(hidden, rows) if rows[0].frames < 4 else _ended(family, drawn(hidden, rows), rows)
    )
    speaker.add("a", say(TEXTS[0], "0"))
    audio = joined(finish(speaker)["a"])
    near(audio, csm_reference(folder("csm"), TEXTS[0], "0", 4))


def _ended(family: Any, drawn: Drawn, rows: list[Any]) -> Drawn:
    codes = torch.full_like(drawn.frames, family._eos)
    return Drawn(codes, [None for _ in rows], [True for _ in rows])


def test_vits_with_speakers_and_plain_durations(folder: Callable[..., Path]) -> None:
    path = folder("vits", speakers=3, stochastic=False)
    speaker = engine(path)
    assert speaker.voices == ("0", "1", "2")
    for voice in speaker.voices:
        speaker.add(voice, say(TEXTS[3], voice))
    audio = {voice: joined(pieces) for voice, pieces in finish(speaker).items()}
    for voice in speaker.voices:
        near(audio[voice], vits_reference(path, TEXTS[3], voice))


@pytest.mark.parametrize(
    "family",
    [
        "csm",
        pytest.param("dia", marks=pytest.mark.extended("families")),
        pytest.param("higgs_audio_v2", marks=pytest.mark.extended("families")),
        pytest.param("llama", marks=pytest.mark.extended("families")),
        "pocket_tts",
        "speecht5",
        pytest.param("vibevoice", marks=pytest.mark.extended("families")),
    ],
)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_however_it_is_cut_and_whoever_comes_and_goes(
    folder: Callable[..., Path], family: str, data: st.DataObject
) -> None:
    """Random arrivals, cancels and chunk sizes, with noise: each sentence is what it is alone."""
    path = folder(family, sample=True)
    chunks = st.sampled_from([0.002, 0.004, 0.006, 0.02])
    speaker = engine(
        path,
        first_chunk=data.draw(chunks),
        chunk=data.draw(chunks),
        max_running=data.draw(st.integers(1, 4)),
    )
    pieces: dict[Any, list[StepOutput]] = {}
    wanted: dict[int, Utterance] = {}
    for number in range(data.draw(st.integers(1, 5))):
        text, frames = data.draw(st.sampled_from(TEXTS)), data.draw(st.integers(1, 14))
        wanted[number] = say(
            text, data.draw(st.sampled_from(VOICES[family])), max_frames=frames, seed=number % 2
        )
        speaker.add(number, wanted[number])
        for _ in range(data.draw(st.integers(0, 4))):
            for piece in speaker.step():
                pieces.setdefault(piece.key, []).append(piece)
        if data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(wanted)))
            if pieces.get(victim, [StepOutput(0)])[-1].done is False:
                speaker.cancel(victim)
                pieces.pop(victim, None)
                del wanted[victim]
        speaker.check_integrity()
    for key, rest in finish(speaker).items():
        pieces.setdefault(key, []).extend(rest)
    assert sorted(pieces) == sorted(wanted)
    alone = _alone(path)
    for number, utterance in wanted.items():
        alone.add(number, utterance)
        near(joined(pieces[number]), joined(finish(alone)[number]))


@functools.cache
def _alone(path: Path) -> Engine:
    return engine(path)


# ------------------------------------------------------------------------------------------------------------ noise
@pytest.mark.parametrize("family", REFERENCES)
def test_noise_follows_seed_and_sentence(folder: Callable[..., Path], family: str) -> None:
    path = folder(family) if family == "vits" else folder(family, sample=True)
    speaker = engine(path)
    voice = VOICES[family][0]

    def speech(seed: int, index: int) -> Tensor:
        speaker.add(0, say(TEXTS[2], voice, seed=seed, index=index))
        return joined(finish(speaker)[0])

    again, first = speech(5, 1), speech(5, 1)
    assert torch.equal(again, first)
    for other in (speech(6, 1), speech(5, 2)):
        assert other.shape != first.shape or not torch.allclose(other, first, atol=1e-3)


def test_greedy_is_without_noise(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("csm", sample=True), greedy=True)
    speaker.add(0, say(TEXTS[0], "0", seed=1))
    speaker.add(1, say(TEXTS[0], "0", seed=2))
    pieces = finish(speaker)
    assert torch.equal(joined(pieces[0]), joined(pieces[1]))


# ----------------------------------------------------------------------------------------------------- what it tells
def test_vits_tells_where_its_words_begin(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("vits"))
    speaker.add("a", say("one two three", "default"))
    pieces = finish(speaker)["a"]
    starts = pieces[0].starts
    assert starts is not None
    assert all(piece.starts is None for piece in pieces[1:])
    assert 0 <= starts[0] < starts[1] < starts[2] < len(joined(pieces))
    model: Any = speaker.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash_numbers(0, 0))
        ids = AutoTokenizer.from_pretrained(folder("vits"))("one two three")["input_ids"]
        durations, _ = model._latents(torch.tensor([ids]), None)
    letters = "one two three"
    for word, start in zip(("one", "two", "three"), starts, strict=True):
        assert start == int(durations[: 2 * letters.index(word) + 1].sum()) * 32


def test_words_that_no_letter_stands_for_are_silence(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("vits"))
    speaker.add("a", Utterance(words=("…",), voice="default"))
    assert len(joined(finish(speaker)["a"])) == 0


def test_what_cannot_be_spoken_is_refused(folder: Callable[..., Path], tmp_path: Path) -> None:
    speaker = engine(folder("csm"), max_running=1, max_waiting=0)
    with refuses(BadRequest, "voice"):
        speaker.add("a", say(TEXTS[0], "zoe"))
    speaker.add("b", say("x" * 600, "0"))
    (piece,) = speaker.step()
    assert isinstance(piece.error, BadRequest)
    assert "leaves no room" in piece.error.message
    assert not speaker.has_work
    speaker.add("c", say(TEXTS[0], "0"))
    with pytest.raises(Overloaded):
        speaker.add("d", say(TEXTS[0], "0"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with refuses(ConfigError, "model"):
        engine(tmp_path)
    with refuses(ConfigError, "model"):
        engine(tmp_path / "none")


def test_a_cancelled_sentence_is_gone_before_the_next_step(folder: Callable[..., Path]) -> None:
    speaker = engine(folder("csm"))
    for key in "abc":
        speaker.add(key, say(TEXTS[2], "0", max_frames=40))
    speaker.step()
    speaker.cancel("b")
    assert {piece.key for _ in range(20) for piece in speaker.step()} == {"a", "c"}
    speaker.cancel("a")
    speaker.cancel("c")
    speaker.check_integrity()
    assert not speaker.has_work


def test_higgs_audio_names_the_package_that_it_lacks(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(higgs_audio, "is_torchaudio_available", lambda: False)
    with pytest.raises(ConfigError, match="pip install torchaudio"):
        engine(folder("higgs_audio_v2"))
