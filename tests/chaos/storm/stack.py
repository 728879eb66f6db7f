"""Two processes of every service and of the gateway behind a descriptor store, with tiny models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from chaos.processes import Processes, processes
from e2e import markov
from motet_models.omni import talker_name
from motet_shared.testing import free_port
from support.checkpoints import embedding_checkpoints, tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.checkpoints.diffusion_checkpoints import stable_diffusion
from support.families import qwen3_omni, video_families
from support.stages import diffusion_stage

CHAT, ASR_MODEL, VOICE, BRUSH = "markov", "ears", "voice", diffusion_stage.MODEL
EYES, VECTORS = "eyes", "vectors"
FILMS, OMNI = "films", "omni"
STORE = "fdstore"
TWO = 2  # of each
_CONTEXT = 160  # tokens of the omni model's talker: a reply costs little, so that nothing starves beside it
_EYES_PATH = Path(__file__).resolve().parents[3] / "models" / "pocket-chat"


def _commands(folder: Path, socket: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return role, and module with flags, by the name of a process."""
    chat, brush = markov.save(folder / CHAT), stable_diffusion(folder / BRUSH)
    ears, voice = (
        tiny_whisper(folder / ASR_MODEL),
        tts_checkpoints.pocket_tts(folder / VOICE, threshold=1.0),
    )
    heard = (
        "--model",
        str(ears),
        "--name",
        ASR_MODEL,
        "--no-fallback",
        "--no-live",
        "--threads",
        "1",
    )
    # One sentence at a time: what is computed together is rounded together, and a sound must come out to the bit.
    spoken = ("--model", str(voice), "--name", VOICE, "--greedy", "--max-running", "1")
    names = {CHAT: chat, EYES: _EYES_PATH, OMNI: folder / OMNI}
    texts = [word for name, path in names.items() for word in ("--model", f"{name}={path}")]
    seen = ("--model", str(_EYES_PATH), "--name", EYES, "--threads", "1")
    vectors = embedding_checkpoints.sentence_transformer(folder / VECTORS)
    # One text at a time, for the same reason.
    alone = ("--max-batch-tokens", "1", "--threads", "1")
    embedded = ("--model", str(vectors), "--name", VECTORS, *alone)
    films = video_families.write("WanPipeline", folder / FILMS)
    filmed = ("--model", str(films), "--name", FILMS, "--threads", "1")
    qwen3_omni.write(folder / OMNI, endless=True, context=_CONTEXT)
    # One reply at a time: what a mixture of experts computes together is rounded together.
    whole = ("--model", str(folder / OMNI), "--threads", "1", "--max-running", "1")
    talking = ("--name", talker_name(OMNI), "--stage", "talker")
    served = ("--descriptor-store", str(socket), "--patience", "10", "--job-patience", "5")
    return {
        "gateway": ("gateway", ("motet_gateway", *served)),
        "tokenizer": ("tokenizer", ("motet_tokenizer", *texts)),
        "decode": (
            "decode",
            ("motet_llm", "--model", str(chat), "--name", CHAT, "--threads", "1"),
        ),
        "seeing decode": ("decode", ("motet_llm", *seen, "--deterministic")),
        "encoder": ("encoder", ("motet_encoder", *seen)),
        "embedding": ("embedding", ("motet_embedding", *embedded)),
        "vad": ("vad", ("motet_vad",)),
        "asr": ("asr", ("motet_asr", *heard, "--parallel", "1")),
        "tts": ("tts", ("motet_tts", *spoken, "--threads", "1")),
        "diffusion": ("diffusion", ("motet_diffusion", *diffusion_stage.flags(brush))),
        "film diffusion": ("diffusion", ("motet_diffusion", *filmed)),
        "thinker": ("decode", ("motet_llm", *whole, "--name", OMNI)),
        "talker": ("decode", ("motet_llm", *whole, *talking)),
        "code2wav": (
            "tts",
            ("motet_tts", *whole, "--name", OMNI, "--greedy"),
        ),
    }


@asynccontextmanager
async def storm_stack(
    folder: Path, names: Collection[str] = (), of_each: int = TWO
) -> AsyncIterator[tuple[Processes, str]]:
    """Run all of it, or the services of these names, ready, and the address that clients use."""
    socket, port = folder / "front.sock", free_port()
    commands = await asyncio.to_thread(_commands, folder, socket)
    async with processes(folder / "jetstream") as stack:
        argv = ("motet_fdstore", "--path", str(socket), "--port", str(port))
        await stack.add(STORE, STORE, argv, is_service=False)
        for name, (role, command) in commands.items():
            for number in range(1, 1 + of_each) if not names or name in names else ():
                await stack.add(f"{name}-{number}", role, command)
        await stack.all_ready()
        yield stack, f"http://127.0.0.1:{port}"
