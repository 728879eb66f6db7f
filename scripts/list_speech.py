"""Write docs/speech.md: which speech models of transformers speak here, and what each can do.

.venv/bin/python scripts/list_speech.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from motet_tts.checkpoint import FAMILIES, REFUSED  # noqa: E402
from motet_tts.config import EngineConfig  # noqa: E402
from motet_tts.engine.utterance import Utterance  # noqa: E402
from support.checkpoints import tts_checkpoints  # noqa: E402
from support.engine.token_speaker import engine_of  # noqa: E402

PAGE = ROOT / "docs" / "speech.md"
OWN = "motet_pocket_tts"  # comes along with the repository
_WORDS = tuple("seven small squares and one more".split())
_FRAMES = 60

HEAD = """# Speech models

Which speech models of transformers {version} are spoken with (`--tts FOLDER`), by the `model_type` of their
config.json. Every other class is refused when it is loaded, with the cause.

## Spoken

On a tiny model of the class with random float32 weights, samples equal those of transformers' own `generate` and
decoder within 1e-4 of the peak, alone and together with others, however the chunks fall
(`tests/unit/motet_tts/test_tts_engine.py`). Sentences of all callers share each step (Bark's take turns in it). What
a row says was found with that model when this page was written:

* *voices*: what `voice` can name besides OpenAI's names, which stand for them in turn; *files* are the checkpoint's
  `voices/NAME.safetensors` (and `.wav`, where the model encodes recordings);
* *clones*: a tenant's own voice, `POST /v1/audio/voices`, can be used; other models refuse it by name;
* *streams*: samples of a sentence come before its last frame is computed. With *looks ahead* a decoder needs some
  frames behind a sample; with *in parts* the sentence is planned as a whole and only its samples come in parts;
  *no*: its last network looks at the whole sentence;
* *speed*: every model speaks at 0.25 to 4 times its speed, at the same pitch: by *itself*, or *stretched*;
* *instructions*: `instructions` are followed; other models refuse them by name;
* *word times*: *exact*, or *estimated* from the length of a sentence and the letters of its words.

VibeVoice's tokens are compared too, as it stops audio, begins it anew and ends. With a `guidance_scale` in
`generation_config.json`, transformers guides its tokens as well as its latents, by a pass over the tokens alone; so
does Motet. Its authors' code guides the latents only, and may end a sentence at another frame.

| model | `model_type` | voices | clones | streams | speed | instructions | word times |
|---|---|---|---|---|---|---|---|
"""
REFUSED_HEAD = """
## Voices that decode speaks

A language model whose tokens are codes of SNAC (Orpheus's layout) is served twice from one folder: decode generates
its tokens, with all that a decode engine has (batching, prefix cache, speculation, quantized weights), and the speech
service asks it for those of each sentence, decodes them as they come, and continues at another decode instance if one
is lost. A caller that leaves, a deadline and a missing credit reach decode by the speech service's own streams.

    motet up --llm path/to/orpheus --tts path/to/orpheus

The folder holds the language model with its tokenizer, and SNAC as its folder `audio_tokenizer` (`config.json`, and
`model.safetensors` or `pytorch_model.bin`; the SNAC of 24 kHz has no attention and can be streamed). Its decoder is the
package snac: `pip install "motet[snac]"`. `voices` in `processor_config.json` names other voices than Orpheus's own;
`generation_config.json` sets temperature, top_p, top_k and repetition_penalty, which are Orpheus's own without it.
SNAC adds noise to its samples; here it depends on seed, sentence and frame, as all noise does.

## Refused

| `model_type` | cause: it … |
|---|---|
"""
# What the loaded model does not say of itself.
_TITLES = {
    "bark": ("Bark", "its `speaker_embeddings`"),
    "csm": ("CSM", "speaker numbers"),
    "dia": ("Dia", "`S1`, `S2`"),
    "gradium_phonon_tts": ("Phonon", "files"),
    "higgs_audio_v2": ("Higgs Audio v2, with the package torchaudio", "`default`"),
    OWN: ("pocket-tts, the project's own", "four"),
    "llama": ("Orpheus: Llama and SNAC (see below)", "eight, or those that the folder names"),
    "pocket_tts": ("PocketTTS", "files"),
    "speecht5": ("SpeechT5, with its HiFi-GAN in the folder `vocoder`", "files: speaker vectors"),
    "vibevoice": ("VibeVoice", "speaker numbers"),
    "vits": ("VITS, MMS", "speaker numbers"),
}


def row(kind: str, folder: Path) -> str:
    """Return the row of a family, whose tiny model is loaded and speaks a sentence."""
    engine = engine_of(EngineConfig(model=str(folder), first_chunk=0.002, chunk=0.01))
    model = engine.model
    engine.add(
        0, Utterance(words=_WORDS, voice=engine.voices[0], max_frames=0 if kind == OWN else _FRAMES)
    )
    frames, heard_at, exact = 0, 0, False
    while engine.has_work:
        for output in engine.step():
            frames = output.frames
            exact = exact or output.starts is not None
            if not heard_at and output.samples is not None and len(output.samples):
                heard_at = output.frames
    streams = "frame by frame" if heard_at == 1 else "looks ahead"
    if heard_at >= frames:
        streams = "no"
    if kind == "vits":
        streams = "in parts"
    title, voices = _TITLES[kind]
    cells = [
        title,
        f"`{kind}`",
        voices,
        "yes" if model.clones else "",
        streams,
        "itself" if model.rates != (1.0, 1.0) else "stretched",
        "yes" if model.instructs else "",
        "exact" if exact else "estimated",
    ]
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    """Return the page."""
    rows = []
    for kind in sorted(FAMILIES):
        if kind == OWN:
            rows.append(row(kind, ROOT / "models" / "pocket-tts"))
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(kind, tts_checkpoints.MAKERS[kind](Path(folder) / "model")))
    refused = [f"| `{kind}` | {cause} |" for kind, cause in sorted(REFUSED.items())]
    head = HEAD.format(version=transformers.__version__) + "\n".join(rows) + "\n"
    return head + REFUSED_HEAD + "\n".join(refused) + "\n"


def main() -> None:
    """Run as a script."""
    torch.set_num_threads(1)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
