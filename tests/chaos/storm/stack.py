"""Two processes of every service and of the gateway behind a descriptor store, with tiny models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from chaos.processes import Processes, processes
from e2e import markov
from motet_shared.testing import free_port
from support.checkpoints import tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.checkpoints.diffusion_checkpoints import stable_diffusion
from support.stages import diffusion_stage

CHAT, ASR_MODEL, VOICE, BRUSH = "markov", "ears", "voice", diffusion_stage.MODEL
STORE = "fdstore"
TWO = 2  # of each


def _commands(folder: Path, socket: Path) -> dict[str, tuple[str, ...]]:
    """Return module and flags of a process, by role."""
    chat, brush = markov.save(folder / CHAT), stable_diffusion(folder / BRUSH)
    ears, voice = (
        tiny_whisper(folder / ASR_MODEL),
        tts_checkpoints.pocket_tts(folder / VOICE, threshold=1.0),
    )
    heard = ("--model", str(ears), "--name", ASR_MODEL, "--no-fallback", "--no-live")
    # One sentence at a time: what is computed together is rounded together, and a sound must come out to the bit.
    spoken = ("--model", str(voice), "--name", VOICE, "--greedy", "--max-running", "1")
    return {
        "gateway": ("motet_gateway", "--descriptor-store", str(socket), "--patience", "10"),
        "tokenizer": ("motet_tokenizer", "--model", f"{CHAT}={chat}"),
        "decode": ("motet_llm", "--model", str(chat), "--name", CHAT, "--threads", "1"),
        "vad": ("motet_vad",),
        "asr": ("motet_asr", *heard, "--parallel", "1"),
        "tts": ("motet_tts", *spoken, "--threads", "1"),
        "diffusion": ("motet_diffusion", *diffusion_stage.flags(brush)),
    }


@asynccontextmanager
async def storm_stack(folder: Path) -> AsyncIterator[tuple[Processes, str]]:
    """Run all of it, ready, and the address that clients use."""
    socket, port = folder / "front.sock", free_port()
    commands = await asyncio.to_thread(_commands, folder, socket)
    async with processes() as stack:
        argv = ("motet_fdstore", "--path", str(socket), "--port", str(port))
        await stack.add(STORE, STORE, argv, is_service=False)
        for role, command in commands.items():
            for number in range(1, TWO + 1):
                await stack.add(f"{role}-{number}", role, command)
        await stack.all_ready()
        yield stack, f"http://127.0.0.1:{port}"
