"""Define the command line of `motet`; commands are imported when they run, so that help is fast."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from motet_cli.bench.arguments import add_bench
from motet_cli.engines.degrees import add_degrees
from motet_cli.engines.options import KINDS
from motet_cli.planning.arguments import add_traffic
from motet_shared import __version__
from motet_shared.errors import MotetError

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code: 0 success, 1 failure, 2 wrong command line, 130 interrupted."""
    args = parser().parse_args(argv)
    try:
        if args.command == "up":
            args = _with_stack_file(args, argv)
        command = importlib.import_module(f"motet_cli.{args.module}")
        return int(command.run(args))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("motet_"):
            raise
        print(
            f"motet {args.command}: the package {error.name!r} is not installed;"
            " pip install 'motet[all]' installs everything that `motet` needs",
            file=sys.stderr,
        )
        return 1
    except MotetError as error:
        print(f"motet {args.command}: {error.message}", file=sys.stderr)
        return 2 if error.code == "config" else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stderr.close()
        return 0


def up_arguments(flags: Sequence[str]) -> argparse.Namespace:
    """Return the command line of `motet up` with these flags, and with motet.toml."""
    argv = ["up", *flags]
    return _with_stack_file(parser().parse_args(argv), argv)


def _with_stack_file(args: argparse.Namespace, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line of `motet up` with motet.toml and its preset.

    Flags override the file, which overrides the preset. Raises ConfigError for a wrong file, or an
    unknown preset.
    """
    from motet_cli.stack_file.arguments import flag_defaults, read_given
    from motet_cli.stack_file.presets import preset_of

    file = read_given(args.config)
    preset = preset_of(args.preset or None)
    defaults = {} if preset is None else preset.flags
    args = parser(defaults | flag_defaults(file)).parse_args(argv)
    if preset is not None and not args.llm:
        args.llm = [preset.llm]
    args.stack_file = file
    return args


def parser(up_defaults: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line with all commands.

    up_defaults: defaults of flags of `motet up`, in place of its own.
    """
    top = argparse.ArgumentParser(
        prog="motet",
        description="Multimodal streaming inference as actor-based microservices over NATS.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"motet {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands).set_defaults(**(up_defaults or {}))
    _add_down(commands)
    _add_hosts(commands)
    _add_restart(commands)
    _add_scale(commands)
    _add_services(commands)
    _add_chat(commands)
    _add_say(commands)
    _add_listen(commands)
    _add_talk(commands)
    _add_draw(commands)
    _add_film(commands)
    _add_models(commands)
    _add_adapter(commands)
    _add_pull(commands)
    _add_remove(commands)
    _add_keys(commands)
    _add_connect(commands)
    _add_credentials(commands)
    _add_deploy(commands)
    bench = _command(
        commands, "bench", "bench.command", "Measure a server that speaks OpenAI's API under load."
    )
    add_bench(bench, DEFAULT_URL)
    _add_profile(commands)
    _add_role(commands)
    _add_top(commands)
    _add_trace(commands)
    _add_doctor(commands)
    _add_plan(commands)
    _add_eval(commands)
    return top


_HUB_NAME = "org/name, org/name@revision or org/name:FILE.gguf"


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, module: str, help: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=help, allow_abbrev=False
    )
    command.set_defaults(module=module)
    return command


def _add_up(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    up = _command(
        commands,
        "up",
        "supervision.up",
        "Run NATS and all services on this machine until Ctrl-C.",
    )
    up.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file of models, roles and settings (default: motet.toml, if the current folder"
        " has one; none: no file)",
    )
    up.add_argument(
        "--preset",
        metavar="NAME",
        nargs="?",
        const="",
        help="small permissive models by their hub names, such as assistant; other flags override them"
        " (without NAME: list the presets)",
    )
    up.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    up.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0: any free port (default: %(default)s)",
    )
    up.add_argument(
        "--llm",
        metavar="MODEL",
        action="append",
        default=[],
        help="language model: org/name[@revision] on a hub (downloaded once), a checkpoint folder, or"
        " a local model's name; NAME=MODEL serves it under NAME; repeatable (default: pocket-chat)",
    )
    _add_engine_arguments(up)
    up.add_argument(
        "--adapter",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="LoRA adapter of the language model, a folder or org/name, served as NAME by Motet's own"
        " engine and by vLLM; repeatable",
    )
    up.add_argument(
        "--adapter-folder",
        metavar="FOLDER",
        help="serve the adapters in this folder, and load and unload adapters while running"
        " (`motet adapter`, POST /v1/load_lora_adapter)",
    )
    up.add_argument(
        "--decode", metavar="N", type=int, default=1, help="decode processes per model (default: 1)"
    )
    up.add_argument(
        "--prefill",
        metavar="N",
        type=int,
        default=0,
        help="prefill processes per model, for disaggregation (default: 0)",
    )
    up.add_argument(
        "--speculate",
        metavar="HOW",
        help="speculative decoding by prompt lookup (ngram) or a draft model, given like --llm"
        " (default: off)",
    )
    add_degrees(up)
    up.add_argument(
        "--chat-template",
        metavar="FILE",
        action="append",
        default=[],
        help="Jinja template in place of the model's own; NAME=FILE for one of several models; may be repeated",
    )
    up.add_argument(
        "--generation-config",
        metavar="HOW",
        help="recommended sampling: auto (the model's generation_config.json), none, or a file"
        " (default: auto)",
    )
    up.add_argument(
        "--device",
        metavar="[ROLE=]DEVICE",
        action="append",
        default=[],
        help="where models compute: cpu; cuda (any GPU, one per process while there are enough); auto"
        " (a GPU if there is one); some GPUs, such as cuda:0,cuda:1; repeatable for roles, such as"
        " asr=cpu (default: MOTET_DEVICE or cpu)",
    )
    share = os.environ.get("MOTET_MEMORY_SHARE")
    up.add_argument(
        "--memory-share",
        metavar="[ROLE=]SHARE",
        action="append",
        default=[share] if share else [],
        help="share of the free memory, of the machine and of each GPU, that models may use"
        " (default: 0.85); repeatable for what a role has of a GPU, such as decode=0.6",
    )
    up.add_argument(
        "--tokenizer", metavar="N", type=int, default=1, help="tokenizer processes (default: 1)"
    )
    up.add_argument(
        "--asr",
        metavar="MODEL",
        help="speech recognition model: folder, name, org/name or none (default: pocket-asr)",
    )
    up.add_argument(
        "--vad",
        metavar="N",
        type=int,
        default=1,
        help="voice activity detection processes (default: 1)",
    )
    up.add_argument(
        "--tts",
        metavar="MODEL",
        help="speech synthesis model: folder, name, org/name or none (default: pocket-tts)",
    )
    up.add_argument(
        "--speakers",
        metavar="PATH",
        nargs="?",
        const="pocket-speakers",
        default="none",
        help="speaker embedding model for diarization (default: none; without PATH: pocket-speakers)",
    )
    up.add_argument(
        "--draw",
        metavar="MODEL",
        help="image or video model of diffusers: folder, name, org/name or none (default: pocket-draw)",
    )
    up.add_argument(
        "--film",
        metavar="MODEL",
        help="video model of diffusers, loaded on demand on the CPU: folder, name, org/name or none"
        " (default: pocket-film)",
    )
    up.add_argument(
        "--embed",
        metavar="MODEL",
        help="embedding model: folder, name, org/name or none (default: pocket-embed)",
    )
    up.add_argument(
        "--rank",
        metavar="MODEL",
        default="none",
        help="ranking model (cross-encoder, Qwen3-Reranker, ColBERT, embedding model): folder, name,"
        " org/name or none (default: none)",
    )
    up.add_argument(
        "--planner",
        metavar="FILE",
        nargs="?",
        const="",
        help="scale processes with the load; FILE: TOML with a table per role (default: decode and tokenizer)",
    )
    up.add_argument(
        "--nursery",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fork services from one process that has imported their libraries (default: yes)",
    )
    up.add_argument(
        "--listen",
        metavar="ADDRESS[:PORT]",
        help="address of this machine at which others join the stack, with TLS; NATS has the port"
        " after PORT (default: 4221; see `motet invite`)",
    )
    up.add_argument("--nats", metavar="URL", help="use this NATS server instead of starting one")
    up.add_argument(
        "--store",
        metavar="FOLDER",
        help="store responses, jobs, and images that are returned as URLs, in this folder "
        "(default: $XDG_STATE_HOME/motet/PORT, or else ~/.local/state/motet/PORT)",
    )
    up.add_argument("--no-store", action="store_true", help="store nothing on disk")
    up.add_argument(
        "--keep-connections",
        action="store_true",
        help="clients' connections outlive the death of the gateway (docs/front.md)",
    )
    up.add_argument(
        "--survive",
        action="store_true",
        help="services outlive this process, and the next `motet up --survive` on the port adopts them;"
        " Ctrl-C ends all (docs/survive.md)",
    )
    up.add_argument(
        "--orphan-timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="with --survive: seconds that services serve without this process (default: 60)",
    )
    up.add_argument(
        "--api-key-file", metavar="PATH", help="file with the key that clients must send"
    )
    up.add_argument(
        "--tenants-file",
        metavar="PATH",
        help="TOML file of tenants with their keys and limits (see `motet keys`)",
    )
    up.add_argument(
        "--allowed-origins",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="origin whose pages may send requests; repeatable",
    )
    up.add_argument(
        "--allowed-hosts",
        metavar="NAME",
        action="append",
        default=[],
        help="accepted Host besides IP addresses, localhost and the machine's name; *: any; repeatable",
    )
    up.add_argument(
        "--trusted-proxies",
        metavar="NETWORK",
        action="append",
        default=[],
        help="network of proxies whose X-Forwarded-For is trusted, such as 10.0.0.0/8; repeatable",
    )
    up.add_argument(
        "--tls-cert", metavar="PATH", help="PEM file of the certificate chain; serves https and wss"
    )
    up.add_argument("--tls-key", metavar="PATH", help="PEM file of the certificate's key")
    up.add_argument(
        "--insecure", action="store_true", help="accept other machines' requests without a key"
    )
    up.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of log lines (default: text)",
    )
    up.add_argument(
        "--site",
        metavar="NAME",
        help="name of this place, such as a data centre; work stays there while it can (MOTET_SITE)",
    )
    up.add_argument(
        "--state-file", metavar="PATH", help="write process and instance ids to this JSON file"
    )
    return up


def _add_engine_arguments(up: argparse.ArgumentParser) -> None:
    up.add_argument(
        "--engine",
        choices=KINDS,
        default="motet",
        help="what computes the models of --llm: motet; vllm or llama.cpp in --engine-python's"
        " environment; llama-server or a server with OpenAI's API at --engine-url"
        " (default: %(default)s)",
    )
    up.add_argument(
        "--engine-url",
        metavar="URL",
        help="base URL of that server, with /v1; --llm is a folder with the model's config.json and"
        " tokenizer.json",
    )
    up.add_argument(
        "--engine-python",
        metavar="PATH",
        help="Python of the environment in which vllm, or xllamacpp for llama.cpp, is installed",
    )
    up.add_argument(
        "--engine-args",
        metavar="ARGS",
        help="arguments of that engine: those of `vllm serve`, or NAME=VALUE of llama.cpp",
    )
    up.add_argument(
        "--engine-key-file", metavar="FILE", help="file with the key that the server asks for"
    )
    up.add_argument(
        "--engine-model",
        metavar="NAME",
        help="what the server calls the model (default: its name here, or the only one there)",
    )


def _add_down(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    down = _command(
        commands,
        "down",
        "survival.down",
        "End a running stack of this machine, also one whose supervisor has died.",
    )
    down.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="URL of a `motet up` on this machine (default: %(default)s)",
    )


def _add_hosts(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_invite(commands)
    _add_join(commands)
    leave = _command(
        commands,
        "leave",
        "joining.leave",
        "Take this machine out of a stack: running work ends, or goes on at other machines.",
    )
    leave.add_argument(
        "stack",
        metavar="HOST:PORT",
        nargs="?",
        help="the stack, as `motet join` was given it (default: the only one)",
    )
    leave.add_argument(
        "--drain",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="seconds that running work has to end here (default: 30)",
    )


def _add_invite(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    invite = _command(
        commands,
        "invite",
        "joining.invite",
        "Print the command with which another machine joins a `motet up --listen`.",
    )
    invite.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="URL of a `motet up` on this machine (default: %(default)s)",
    )
    invite.add_argument(
        "--expires",
        metavar="TIME",
        default="1h",
        help="time after which the token expires, such as 15m or 2d (default: 1h)",
    )
    invite.add_argument(
        "--uses", metavar="N", type=int, default=1, help="machines that may use it (default: 1)"
    )
    invite.add_argument(
        "--services",
        metavar="ROLE",
        action="append",
        default=[],
        help="roles that they may run, separated by commas (default: all but the gateway)",
    )


def _add_join(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    join = _command(
        commands,
        "join",
        "joining.join",
        "Make this machine a part of a stack, until `motet leave` or Ctrl-C.",
    )
    join.add_argument("stack", metavar="HOST:PORT", help="as `motet invite` printed it")
    join.add_argument(
        "--token",
        metavar="TOKEN",
        help="token of `motet invite`; not needed by a machine that has joined before",
    )
    join.add_argument(
        "--services",
        metavar="ROLE[=N]",
        action="append",
        default=[],
        help="what to run here, separated by commas (default: by memory, cores and GPUs)",
    )
    join.add_argument(
        "--model",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="folder of a model of the stack on this machine; repeatable (default: found by its name)",
    )
    join.add_argument(
        "--device",
        metavar="[ROLE=]DEVICE",
        action="append",
        default=[],
        help="as of `motet up` (default: auto if there is a GPU, else cpu)",
    )
    join.add_argument(
        "--memory-share",
        metavar="[ROLE=]SHARE",
        action="append",
        default=[],
        help="as of `motet up` (default: 0.85)",
    )
    join.add_argument(
        "--site",
        metavar="NAME",
        help="name of this place, such as a data centre; work stays there while it can",
    )
    join.add_argument(
        "--nursery",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fork services from one process that has imported their libraries (default: yes)",
    )
    join.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of log lines (default: text)",
    )
    join.add_argument(
        "--state-file", metavar="PATH", help="write process and instance ids to this JSON file"
    )


def _add_services(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    install = _command(
        commands,
        "install-service",
        "survival.service_unit",
        "Write a systemd unit that runs `motet up --survive` in the current folder.",
    )
    uninstall = _command(
        commands, "uninstall-service", "survival.service_unit", "Stop and remove such a unit."
    )
    for command in (install, uninstall):
        command.add_argument(
            "--user", action="store_true", help="unit of this user (default: of the system)"
        )
        command.add_argument(
            "--name", default="motet", help="name of the unit (default: %(default)s)"
        )
    install.add_argument(
        "--print", action="store_true", help="print the unit instead of writing it"
    )
    install.add_argument(
        "flags",
        metavar="-- FLAG",
        nargs="*",
        help="flags of `motet up`, such as -- --port 8001 --llm pocket-chat",
    )


def _add_restart(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    restart = _command(
        commands,
        "restart",
        "commands.restart",
        "Replace the processes of a running stack one by one without failing requests.",
    )
    restart.add_argument(
        "roles",
        metavar="ROLE",
        nargs="*",
        help="roles such as decode or gateway (default: all but nats)",
    )
    _add_order(restart)


def _add_scale(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    scale = _command(
        commands,
        "scale",
        "commands.scale",
        "Change the number of processes of roles in a running stack.",
    )
    scale.add_argument(
        "counts",
        metavar="ROLE=N",
        nargs="+",
        help="role and number, such as decode=3; for each model, if the role has models",
    )
    _add_order(scale)


def _add_order(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="URL of a `motet up` on this machine (default: %(default)s)",
    )
    command.add_argument(
        "--drain",
        metavar="S",
        type=float,
        default=600.0,
        help="seconds that a gateway's replies have to end (default: 600)",
    )


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default=DEFAULT_URL, help="base URL of the server (default: %(default)s)"
    )
    command.add_argument(
        "--api-key-file", metavar="PATH", help="file with the server's key [MOTET_API_KEY_FILE]"
    )


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = _command(
        commands,
        "chat",
        "commands.chat",
        "Chat with a model: one reply to PROMPT or standard input, else a dialogue.",
    )
    _add_server(chat)
    chat.add_argument("--model", help="chat model (default: the server's first)")
    chat.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="sampling temperature; 0: greedy (default: 0)",
    )
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("prompt", metavar="PROMPT", nargs="*", help="message to send")


def _add_say(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    say = _command(
        commands,
        "say",
        "commands.say",
        "Synthesize speech from TEXT or standard input; play it or write it to a file.",
    )
    _add_server(say)
    say.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="file to write: .mp3 .opus .aac .flac .wav .pcm; -: standard output (default: play)",
    )
    say.add_argument("--model", help="speech model (default: the server's first)")
    say.add_argument("--voice", help="voice of the model (default: its first)")
    say.add_argument(
        "--speed", type=float, default=1.0, help="speed factor, 0.25 to 4 (default: 1)"
    )
    say.add_argument(
        "--follow",
        action="store_true",
        help="speak standard input while it is written, sentence by sentence",
    )
    say.add_argument("text", metavar="TEXT", nargs="*", help="text to speak")


def _add_listen(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listen = _command(
        commands,
        "listen",
        "commands.listen",
        "Transcribe a sound file or the microphone, printing text as it is recognized.",
    )
    _add_server(listen)
    listen.add_argument("--model", help="transcription model (default: the server's first)")
    listen.add_argument(
        "--language", default="", help="language code such as en (default: detected)"
    )
    listen.add_argument(
        "--prompt", default="", help="preceding text, as a hint for names and spelling"
    )
    listen.add_argument(
        "--translate", action="store_true", help="translate a file to English; printed at the end"
    )
    listen.add_argument(
        "--speakers",
        action="store_true",
        help="print a line per turn of a file with its speaker: A, B, …",
    )
    listen.add_argument(
        "--mic", action="store_true", help="transcribe the microphone until Ctrl-C, a line per turn"
    )
    listen.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="sound file: wav, mp3, flac, ogg, m4a, webm or another format that FFmpeg reads",
    )


def _add_talk(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    talk = _command(
        commands,
        "talk",
        "talk.command",
        "Hold a spoken conversation, which speech interrupts: with the microphone or a recording.",
    )
    _add_server(talk)
    talk.add_argument(
        "--nats",
        metavar="URL",
        help="the NATS server of a stack, instead of --url [MOTET_NATS_CREDENTIALS]",
    )
    talk.add_argument("--model", help="the model to talk to (default: the server's first)")
    talk.add_argument("--voice", help="one of the speech model's voices (default: its first)")
    talk.add_argument("--language", default="", help="code such as en (default: found out)")
    talk.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 always says the likeliest; higher is freer (default: 0.8)",
    )
    talk.add_argument(
        "--system", metavar="TEXT", help="instructions that come before the conversation"
    )
    talk.add_argument(
        "--input",
        metavar="FILE",
        help="hear this WAV file at its own speed instead of the microphone, until it is answered",
    )
    talk.add_argument(
        "--output",
        metavar="FILE",
        help="write a WAV file of what would be heard, in time with the input, instead of playing it",
    )


def _add_draw(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    draw = _command(
        commands, "draw", "drawing.draw", "Generate an image from TEXT and write it to a file."
    )
    _add_server(draw)
    draw.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="drawing.png",
        help="file to write: .png .jpg .webp (default: %(default)s)",
    )
    draw.add_argument("--model", help="image model (default: the server's first)")
    draw.add_argument(
        "--size", metavar="WxH", help="size in pixels, such as 512x512 (default: the model's)"
    )
    draw.add_argument("--steps", type=int, help="denoising steps (default: the model's)")
    draw.add_argument("--guidance", type=float, help="guidance scale (default: the model's)")
    draw.add_argument("--negative", metavar="TEXT", default="", help="negative prompt")
    draw.add_argument(
        "--seed",
        type=int,
        help="seed of the noise; equal seeds give equal images (default: random)",
    )
    draw.add_argument(
        "--lora",
        metavar="NAME[:SCALE]",
        action="append",
        default=[],
        help="LoRA adapter of the server and its scale (default: 1); repeatable",
    )
    draw.add_argument("--scheduler", metavar="NAME", help="scheduler (default: the model's)")
    draw.add_argument(
        "--controlnet",
        metavar="NAME=FILE[:SCALE[:START:END]]",
        action="append",
        default=[],
        help="ControlNet of the server, the image that it follows, its scale (default: 1), and the "
        "part of the steps, such as 0:0.5 (default: all); repeatable",
    )
    draw.add_argument(
        "--ip-adapter",
        metavar="NAME=FILE[:SCALE]",
        action="append",
        default=[],
        help="IP-Adapter of the server, the image that it reads as a prompt, and its scale "
        "(default: 1); repeatable",
    )
    draw.add_argument("--image", metavar="FILE", help="image to edit")
    draw.add_argument(
        "--mask",
        metavar="FILE",
        help="mask of the image: transparent or white pixels are generated anew",
    )
    draw.add_argument(
        "--strength",
        type=float,
        help="how much to change the image, above 0 up to 1 (default: the model's)",
    )
    draw.add_argument("text", metavar="TEXT", nargs="+", help="prompt of the image")


def _add_film(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    film = _command(
        commands, "film", "drawing.film", "Make a video from TEXT and write it to a file."
    )
    _add_server(film)
    film.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="film.mp4",
        help="MP4 or WebM file to write, by its ending (default: %(default)s)",
    )
    film.add_argument("--model", help="video model (default: the server's first)")
    film.add_argument("--seconds", type=float, help="length (default: the model's)")
    film.add_argument(
        "--size", metavar="WxH", help="size in pixels, such as 832x480 (default: the model's)"
    )
    film.add_argument("--steps", type=int, help="denoising steps (default: the model's)")
    film.add_argument("--guidance", type=float, help="guidance scale (default: the model's)")
    film.add_argument("--negative", metavar="TEXT", default="", help="negative prompt")
    film.add_argument(
        "--seed",
        type=int,
        help="seed of the noise; equal seeds give equal videos (default: random)",
    )
    film.add_argument("--image", metavar="FILE", help="image that the video begins with")
    film.add_argument("text", metavar="TEXT", nargs="+", help="prompt of the video")


def _add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_server(
        _command(
            commands,
            "models",
            "commands.models",
            "List served models, local model folders, and models downloaded from a hub.",
        )
    )


def _add_adapter(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    adapter = _command(
        commands,
        "adapter",
        "commands.adapter",
        "Load or unload LoRA adapters of a server that runs with --adapter-folder.",
    )
    actions = adapter.add_subparsers(dest="action", required=True, metavar="load|unload")
    load = actions.add_parser("load", help="serve an adapter", allow_abbrev=False)
    load.add_argument("name", metavar="NAME", help="name under which it is served")
    load.add_argument("source", metavar="FOLDER", help="folder saved by PEFT, or org/name on a hub")
    unload = actions.add_parser("unload", help="serve an adapter no longer", allow_abbrev=False)
    unload.add_argument("name", metavar="NAME", help="name under which it is served")
    for action in (load, unload):
        _add_server(action)


def _add_pull(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    pull = _command(
        commands,
        "pull",
        "hub.pull",
        "Download models from a hub, or the files of them that changed.",
    )
    pull.add_argument("models", metavar="MODEL", nargs="+", help=_HUB_NAME)
    pull.add_argument("--json", action="store_true", help="print the progress as lines of JSON")


def _add_remove(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    remove = _command(commands, "remove", "hub.remove", "Delete downloaded models.")
    remove.add_argument("models", metavar="MODEL", nargs="+", help=_HUB_NAME)


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = _command(commands, "keys", "commands.keys", "Create, list and revoke keys of tenants.")
    actions = keys.add_subparsers(dest="action", required=True, metavar="new|list|revoke")
    new = actions.add_parser("new", help="create a key and print it once", allow_abbrev=False)
    new.add_argument("tenant", metavar="TENANT", help="tenant of the key; added if it is new")
    new.add_argument("--note", metavar="TEXT", help="comment that `list` shows")
    listed = actions.add_parser(
        "list", help="list ids, tenants, dates and notes", allow_abbrev=False
    )
    listed.add_argument("tenant", metavar="TENANT", nargs="?", help="only this tenant's keys")
    revoke = actions.add_parser(
        "revoke", help="revoke a key; takes effect within a second", allow_abbrev=False
    )
    revoke.add_argument("id", metavar="ID", help="id of the key, or its first digits")
    for action in (new, listed, revoke):
        action.add_argument(
            "--tenants-file", metavar="PATH", help="file of tenants [MOTET_TENANTS_FILE]"
        )


def _add_connect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    connect = _command(
        commands,
        "connect",
        "commands.connect",
        "Print or write the configuration with which a client uses a server.",
    )
    clients = ("claude-code", "codex", "opencode", "openai-agents", "continue")
    connect.add_argument("client", metavar="CLIENT", choices=clients, help=", ".join(clients))
    connect.add_argument("--model", metavar="NAME", help="chat model (default: the first served)")
    connect.add_argument(
        "--tenant", metavar="TENANT", help="make a key of this tenant for the client"
    )
    connect.add_argument(
        "--tenants-file", metavar="PATH", help="file of tenants [MOTET_TENANTS_FILE]"
    )
    connect.add_argument(
        "--write", action="store_true", help="write the client's file; JSON is merged into it"
    )
    _add_server(connect)


def _add_credentials(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "Create the passwords and certificates with which processes of a stack authenticate."
    credentials = _command(commands, "credentials", "commands.credentials", about)
    actions = credentials.add_subparsers(
        dest="action", required=True, metavar="passwords|hub|ca|certificate|environment"
    )
    passwords = actions.add_parser(
        "passwords",
        help="create a password per NATS user, and the server's configuration",
        allow_abbrev=False,
    )
    hub = actions.add_parser(
        "hub",
        help="create what NATS servers log in to each other with: a cluster's and leaf nodes'",
        allow_abbrev=False,
    )
    for action in (passwords, hub):
        action.add_argument("--rotate", action="store_true", help="replace existing passwords")
    authority = actions.add_parser("ca", help="create a certificate authority", allow_abbrev=False)
    certificate = actions.add_parser(
        "certificate",
        help="create a host's certificate, signed by the authority",
        allow_abbrev=False,
    )
    for action in (passwords, hub, authority, certificate):
        action.add_argument(
            "folder", metavar="FOLDER", help="folder of the files, readable only by its owner"
        )
    hub.add_argument(
        "addresses",
        metavar="ADDRESS",
        nargs="+",
        help="address of each server, one or three, for the others of the cluster (port 6222)",
    )
    hub.add_argument(
        "--leafnodes",
        metavar="ADDRESS,…",
        help="addresses that leaf nodes connect to (default: the same, port 7422)",
    )
    certificate.add_argument(
        "names", metavar="NAME", nargs="+", help="host names and addresses of the host"
    )
    environment = actions.add_parser(
        "environment",
        help="print the variables with which a program finds a `motet up` on this machine",
        allow_abbrev=False,
    )
    environment.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="URL of a `motet up` on this machine (default: %(default)s)",
    )
    environment.add_argument(
        "--role",
        default="gateway",
        help="NATS user of the program, see services/nats.conf (default: %(default)s)",
    )
    for action, days in ((authority, 3650), (certificate, 365)):
        action.add_argument(
            "--days", type=int, default=days, help="days of validity (default: %(default)s)"
        )


def _add_deploy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    deploy = _command(
        commands,
        "deploy",
        "deploy.command",
        "Write the files that run a stack on Kubernetes or Docker Swarm, from compose.yaml.",
    )
    platforms = deploy.add_subparsers(dest="platform", required=True, metavar="kubernetes|swarm")
    kubernetes = platforms.add_parser(
        "kubernetes", help="write manifests and a kustomization", allow_abbrev=False
    )
    swarm = platforms.add_parser("swarm", help="write a stack file", allow_abbrev=False)
    for platform in (kubernetes, swarm):
        platform.add_argument("folder", metavar="FOLDER", help="folder of the files")
        platform.add_argument(
            "--nats-servers",
            type=int,
            choices=(1, 3),
            default=1,
            help="NATS servers; of three, any one may die (default: %(default)s)",
        )
        platform.add_argument(
            "--leafnodes", action="store_true", help="let NATS accept leaf nodes, on port 7422"
        )
        platform.add_argument(
            "--leaf",
            metavar="NAME",
            help="make NATS a leaf node of this name, of a stack elsewhere; it stores nothing",
        )
    kubernetes.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="variable of compose.yaml, such as MOTET_LLM=my-model; may be repeated",
    )


def _add_role(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    role = _command(
        commands,
        "role",
        "commands.role",
        "Change the role of a running LLM engine: decode or prefill.",
    )
    role.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="URL of a `motet up` on this machine (default: %(default)s)",
    )
    role.add_argument(
        "--nats",
        metavar="URL",
        help="NATS server of a stack on another machine [MOTET_NATS_CREDENTIALS]",
    )
    role.add_argument(
        "instance", metavar="INSTANCE", help="instance id of the worker, such as decode-1f2e3d4c"
    )
    role.add_argument("role", choices=("decode", "prefill"), help="new role")


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = _command(
        commands,
        "profile",
        "commands.profile",
        "Record a torch trace of a decode worker while it serves.",
    )
    profile.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="URL of a `motet up` on this machine (default: %(default)s)",
    )
    profile.add_argument(
        "--nats",
        metavar="URL",
        help="NATS server of a stack on another machine [MOTET_NATS_CREDENTIALS]",
    )
    profile.add_argument(
        "--model", metavar="NAME", help="model of the worker (default: the only one)"
    )
    profile.add_argument(
        "--instance", metavar="ID", help="instance id of the worker (default: the model's busiest)"
    )
    profile.add_argument(
        "--steps",
        type=int,
        default=20,
        help="engine steps to record; 0: until --seconds (default: 20)",
    )
    profile.add_argument(
        "--seconds", type=float, default=60.0, help="longest recording (default: 60)"
    )
    profile.add_argument(
        "--shapes", action="store_true", help="record the shapes of each operator's inputs"
    )
    profile.add_argument(
        "--stacks", action="store_true", help="record Python's stack, which slows the steps"
    )
    profile.add_argument(
        "--memory", action="store_true", help="record what each operator allocates"
    )
    profile.add_argument(
        "--output",
        metavar="FILE",
        default="trace.json.gz",
        help="file to write, gzipped if named .gz (default: %(default)s)",
    )


def _add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    top = _command(
        commands,
        "top",
        "commands.top",
        "Show all instances and the latency of replies, live, until Ctrl-C.",
    )
    _add_server(top)
    top.add_argument(
        "--every",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="interval of measurements (default: 1)",
    )
    top.add_argument(
        "--window",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="period of the replies that count (default: 60)",
    )
    top.add_argument(
        "--first",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="goodput: limit of the time to first token (default: 1)",
    )
    top.add_argument(
        "--between",
        metavar="SECONDS",
        type=float,
        default=0.1,
        help="goodput: limit of the time between tokens (default: 0.1)",
    )
    top.add_argument(
        "--price",
        metavar="PER_HOUR",
        type=float,
        help="price of all machines; shows the cost per million tokens",
    )
    top.add_argument("--once", action="store_true", help="measure twice, print, and exit")
    top.add_argument("--json", action="store_true", help="with --once: print JSON")


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = _command(commands, "trace", "commands.trace", "Show the time of one reply by stage.")
    _add_server(trace)
    trace.add_argument(
        "--slowest",
        action="store_true",
        help="the slowest of the last 200 replies (default: the last reply)",
    )
    trace.add_argument(
        "request", metavar="REQUEST", nargs="?", default="", help="x-request-id of the reply"
    )


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = _command(
        commands,
        "doctor",
        "commands.doctor",
        "Report resources that are short and the remedies. Exit code: 0 healthy, 1 findings, 2 no answer.",
    )
    _add_server(doctor)
    doctor.add_argument(
        "--window",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="period to diagnose (default: 10)",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = _command(
        commands,
        "plan",
        "planning.plan",
        "Compute the memory that a model needs and the speed limits of a machine.",
    )
    plan.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="checkpoint folder (config.json is enough), a local model's name, or org/name on a hub",
    )
    plan.add_argument(
        "--memory",
        metavar="BYTES",
        help="memory such as 24GB (default: the GPU's, or the available memory)",
    )
    plan.add_argument(
        "--context",
        metavar="TOKENS",
        help="tokens per sequence, such as 8k (default: 4k, or the model's limit)",
    )
    where = plan.add_mutually_exclusive_group()
    where.add_argument(
        "--gpu", metavar="NAME", help="upper bounds of tokens/s on this GPU, such as H100"
    )
    where.add_argument(
        "--cpu", action="store_true", help="upper bounds of tokens/s on this machine's processor"
    )
    plan.add_argument(
        "--stack",
        metavar="FLAG",
        nargs=argparse.REMAINDER,
        help="show on which devices `motet up FLAG …` places its processes, and their memory; last",
    )
    plan.add_argument(
        "--preset",
        metavar="NAME",
        nargs="?",
        const="",
        help="the same as --stack --preset NAME (without NAME: list the presets)",
    )
    plan.add_argument(
        "--gpus",
        metavar="N",
        type=int,
        help="place --stack on so many GPUs of --gpu (default: on those of this machine)",
    )
    weights = ("auto", "float32", "bf16", "bfloat16", "int8", "int4", "float8")
    plan.add_argument(
        "--weights",
        choices=weights,
        default="auto",
        help="format of the weights that the checkpoint has not quantized (default: its own)",
    )
    kv_dtypes = ("auto", "float32", "bf16", "bfloat16", "int8", "float8", "float8_e4m3fn")
    plan.add_argument(
        "--kv-dtype",
        choices=kv_dtypes,
        default="auto",
        help="format of the KV cache (default: the checkpoint's)",
    )
    add_degrees(plan)
    plan.add_argument(
        "--block-size", type=int, default=16, help="tokens per KV block (default: 16)"
    )
    plan.add_argument(
        "--token-budget", type=int, default=512, help="tokens computed per step (default: 512)"
    )
    plan.add_argument(
        "--max-running", type=int, default=64, help="most concurrent sequences (default: 64)"
    )
    plan.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="omit memory for snapshots of recurrent states",
    )
    plan.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="add memory for decode steps as CUDA graphs, on a GPU",
    )
    plan.add_argument(
        "--overhead",
        metavar="BYTES",
        help="memory of the process besides the model (default: measured)",
    )
    plan.add_argument(
        "--threads", type=int, default=0, help="threads of --cpu; 0: all (default: 0)"
    )
    plan.add_argument(
        "--bandwidth",
        metavar="BYTES",
        help="memory bandwidth of --cpu per second, such as 50GB (default: measured)",
    )
    plan.add_argument(
        "--gflops",
        type=float,
        help="float32 GFLOP/s of --cpu (default: from clock and vector width)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_traffic(
        plan.add_argument_group(
            "traffic", "number of instances that a traffic needs, and cost per million tokens"
        )
    )


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    found = _command(
        commands,
        "eval",
        "commands.eval",
        "Measure the effect of engine settings on a model's quality and memory.",
    )
    found.add_argument(
        "model", metavar="MODEL", help="checkpoint folder, a local model's name, or org/name"
    )
    found.add_argument(
        "--setting",
        metavar="NAME=VALUE,…",
        action="append",
        help="engine settings, such as weights=int8,kv_dtype=int8, or model=FOLDER; repeatable (default: each format)",
    )
    found.add_argument(
        "--text",
        metavar="FILE",
        action="append",
        default=[],
        help="text for perplexity; repeatable",
    )
    found.add_argument(
        "--tasks",
        metavar="FILE",
        help="JSON lines of questions and answers, for accuracy (pocket-chat has its own)",
    )
    found.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=0,
        help="most tasks of each category; 0: all (default: 0)",
    )
    found.add_argument(
        "--window",
        metavar="N",
        type=int,
        default=1024,
        help="tokens per window of a text (default: 1024)",
    )
    found.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=3600,
        help="most seconds per setting (default: 3600)",
    )
    found.add_argument("--json", action="store_true", help="print JSON instead of a table")
