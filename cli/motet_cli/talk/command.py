"""Hold a spoken conversation with a model: `motet talk`."""

from __future__ import annotations

import asyncio
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator
from dataclasses import replace

from motet_cli.commands.devices import player, recorder
from motet_cli.commands.server import Server, read_key
from motet_cli.supervision import connection
from motet_cli.supervision.connection import NatsAccess
from motet_cli.talk.dialogue import Dialogue
from motet_cli.talk.options import Options
from motet_cli.talk.over_bus import converse_over_bus
from motet_cli.talk.over_socket import converse_over_socket
from motet_cli.talk.playback import Playback, Sink, Speakers, WavOutput
from motet_cli.talk.sound import microphone, paced, read_wav
from motet_cli.talk.transcript import Transcript
from motet_pipelines.voice.conversation.events import Event
from motet_shared.errors import ConfigError, Unavailable


def run(args: Namespace) -> int:
    """Talk until Ctrl-C, or until a recording is answered.

    Return 0; 1 if something that was said had no answer because of an error, unless Ctrl-C ended it.
    """
    options = _options(args)
    recording = None if args.input is None else read_wav(args.input)
    recorder_command = recorder() if recording is None else ()
    sink: Sink = Speakers(player()) if args.output is None else WavOutput(args.output)
    dialogue = Dialogue(Playback(sink), Transcript())
    if recording is None:
        sound = microphone(recorder_command)
        print("listening, best with headphones; Ctrl-C ends it", file=sys.stderr)
    else:
        sound = paced(recording, lambda: dialogue.over)
    stopped = asyncio.run(_talk(dialogue, sound, _conversation(args, dialogue, options), sink))
    return 1 if dialogue.failures and not stopped else 0


def _options(args: Namespace) -> Options:
    if not 0 <= args.temperature <= 2:
        raise ConfigError(
            f"--temperature: {args.temperature} is out of range; give 0 to 2", param="--temperature"
        )
    return Options(
        model=args.model or "",
        system=args.system or "",
        voice=args.voice or "",
        language=args.language,
        temperature=args.temperature,
    )


def _conversation(
    args: Namespace, dialogue: Dialogue, options: Options
) -> AsyncGenerator[list[Event], None]:
    """Return the conversation: over the bus of a stack of this user, else over a WebSocket."""
    found = _stack(args)
    if found is not None:
        return converse_over_bus(found, dialogue.inputs(), options)
    key = read_key(args.api_key_file)
    with Server(args.url, key) as server:
        names = [options.model] if options.model else server.models()
        if not names:
            raise Unavailable(f"{args.url} serves no model yet; it may still be loading")
        options = replace(
            options,
            model=names[0],
            transcribes=bool(server.models("transcription")),
            hears=server.hears(names[0]),
        )
    return converse_over_socket(args.url, key, dialogue.inputs(), options)


def _stack(args: Namespace) -> NatsAccess | None:
    """Return the stack of `--nats`, or that of this user which serves `--url`; None without one.

    With a key, a caller is served as its tenant, which only the gateway can do.
    """
    if args.nats is not None:
        return connection.find(args.url, args.nats)
    if args.api_key_file is not None:
        return None
    try:
        return connection.find(args.url, None)
    except ConfigError:
        return None


async def _talk(
    dialogue: Dialogue,
    sound: AsyncGenerator[bytes, None],
    batches: AsyncGenerator[list[Event], None],
    sink: Sink,
) -> bool:
    """Run a dialogue to its end, or until Ctrl-C; return True for Ctrl-C.

    Raises what its sound or conversation raises, except after Ctrl-C.
    """
    following = asyncio.create_task(dialogue.follow(batches), name="conversation")
    hearing = asyncio.create_task(dialogue.hear(sound), name="sound")
    stopped = False

    def stop() -> None:
        """Cancel the conversation once: a second Ctrl-C does not cut its clean-up short."""
        nonlocal stopped
        if not stopped:
            stopped = True
            following.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await asyncio.wait([following])
        if not stopped:
            await following
            await hearing
        return stopped
    finally:
        hearing.cancel()
        await asyncio.gather(following, hearing, return_exceptions=True)
        await sink.close()
        dialogue.finish()
