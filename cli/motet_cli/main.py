"""Define the command line of `motet`. Commands are imported when they run, so help is quick."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from motet_cli.bench.arguments import add_bench
from motet_cli.planning.arguments import add_traffic
from motet_shared import __version__
from motet_shared.errors import MotetError

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code: 0 done, 1 failed, 2 wrong command line, 130 interrupted."""
    args = parser().parse_args(argv)
    try:
        command = importlib.import_module(f"motet_cli.{args.module}")
        return int(command.run(args))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("motet_"):
            raise
        print(
            f"motet {args.command}: the package {error.name!r} is not installed;"
            " pip install 'motet[all]' brings everything that `motet` needs",
            file=sys.stderr,
        )
        return 1
    except MotetError as error:
        print(f"motet {args.command}: {error.message}", file=sys.stderr)
        return 2 if error.code == "config" else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the pipe has closed it
        sys.stderr.close()
        return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="motet",
        description="Streaming inference from small services behind NATS.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"motet {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_restart(commands)
    _add_scale(commands)
    _add_chat(commands)
    _add_say(commands)
    _add_listen(commands)
    _add_draw(commands)
    _add_models(commands)
    _add_pull(commands)
    _add_remove(commands)
    _add_keys(commands)
    _add_credentials(commands)
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


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = _command(
        commands,
        "up",
        "supervision.up",
        "Start NATS and every service on this machine, until Ctrl-C.",
    )
    up.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    up.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0: any free one (default: %(default)s)",
    )
    up.add_argument(
        "--llm",
        metavar="MODEL",
        action="append",
        default=[],
        help="language model: org/name[@revision] on a hub (downloaded once), a checkpoint folder, or"
        " a local model's name; NAME=MODEL serves it under NAME; may be repeated (default: pocket-chat)",
    )
    up.add_argument(
        "--adapter",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="LoRA adapter of the language model, a folder or org/name, served under NAME; may be repeated",
    )
    up.add_argument(
        "--decode", metavar="N", type=int, default=1, help="decode processes per model (default: 1)"
    )
    up.add_argument(
        "--prefill",
        metavar="N",
        type=int,
        default=0,
        help="processes per model that prefill for decode (default: 0)",
    )
    up.add_argument(
        "--speculate",
        metavar="HOW",
        help="draft tokens for decode by prompt lookup (ngram) or by a draft model, given like --llm"
        " (default: no speculation)",
    )
    up.add_argument(
        "--memory-share",
        metavar="SHARE",
        type=float,
        default=os.environ.get("MOTET_MEMORY_SHARE") or "0.85",
        help="share of the free memory that language models may use: weights, caches and steps (default: 0.85)",
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
        "--vad", metavar="N", type=int, default=1, help="voice activity processes (default: 1)"
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
        help="tell speakers apart, with this model (default: none; without PATH: pocket-speakers)",
    )
    up.add_argument(
        "--draw",
        metavar="MODEL",
        help="image generation model of diffusers: folder, name, org/name or none (default: pocket-draw)",
    )
    up.add_argument(
        "--embed",
        metavar="MODEL",
        help="embedding model: folder, name, org/name or none (default: pocket-embed)",
    )
    up.add_argument(
        "--planner",
        metavar="FILE",
        nargs="?",
        const="",
        help="have as many processes as the load needs; FILE: TOML, a table per role (default: decode and tokenizer)",
    )
    up.add_argument(
        "--nursery",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fork services from one process that imports for all; without it each imports by itself (default: yes)",
    )
    up.add_argument("--nats", metavar="URL", help="use this NATS server instead of starting one")
    up.add_argument(
        "--store",
        metavar="FOLDER",
        help="keep responses, jobs, and pictures that have a URL in this folder "
        "(default: $XDG_STATE_HOME/motet/PORT, or else ~/.local/state/motet/PORT)",
    )
    up.add_argument("--no-store", action="store_true", help="keep nothing on disk")
    up.add_argument(
        "--api-key-file", metavar="PATH", help="file with the key that clients must show"
    )
    up.add_argument(
        "--tenants-file",
        metavar="PATH",
        help="file of tenants, their keys and limits (see `motet keys`)",
    )
    up.add_argument(
        "--allowed-origins",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="site whose pages may ask; repeatable",
    )
    up.add_argument(
        "--allowed-hosts",
        metavar="NAME",
        action="append",
        default=[],
        help="name of this server besides addresses, localhost and the machine's; *: any; repeatable",
    )
    up.add_argument(
        "--trusted-proxies",
        metavar="NETWORK",
        action="append",
        default=[],
        help="proxies whose X-Forwarded-For is read, such as 10.0.0.0/8; repeatable",
    )
    up.add_argument(
        "--tls-cert", metavar="PATH", help="certificate chain in PEM: serve https and wss"
    )
    up.add_argument("--tls-key", metavar="PATH", help="key of the certificate, in PEM")
    up.add_argument("--insecure", action="store_true", help="let other machines in without a key")
    up.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="text for people, json for machines",
    )
    up.add_argument(
        "--state-file", metavar="PATH", help="keep the process ids and instances in this JSON file"
    )


def _add_restart(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    restart = _command(
        commands,
        "restart",
        "commands.restart",
        "Replace the processes of a running stack, one by one; no request fails.",
    )
    restart.add_argument(
        "roles", metavar="ROLE", nargs="*", help="such as decode or gateway (default: all but nats)"
    )
    _add_order(restart)


def _add_scale(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    scale = _command(
        commands,
        "scale",
        "commands.scale",
        "Run more or fewer processes of a role in a running stack.",
    )
    scale.add_argument(
        "counts",
        metavar="ROLE=N",
        nargs="+",
        help="such as decode=3: for each model, if it has one",
    )
    _add_order(scale)


def _add_order(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default=DEFAULT_URL, help="the server of a `motet up` here (default: %(default)s)"
    )
    command.add_argument(
        "--drain",
        metavar="S",
        type=float,
        default=600.0,
        help="seconds that a gateway's replies have (default: 600)",
    )


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default=DEFAULT_URL, help="where the server is (default: %(default)s)"
    )
    command.add_argument(
        "--api-key-file", metavar="PATH", help="file with the server's key [MOTET_API_KEY_FILE]"
    )


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = _command(
        commands,
        "chat",
        "commands.chat",
        "Talk to a model: one answer to PROMPT or standard input, else a dialogue.",
    )
    _add_server(chat)
    chat.add_argument("--model", help="the model to talk to (default: the server's first)")
    chat.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 always says the likeliest; higher is freer (default: 0)",
    )
    chat.add_argument(
        "--system", metavar="TEXT", help="instructions that come before the conversation"
    )
    chat.add_argument("prompt", metavar="PROMPT", nargs="*", help="what to say")


def _add_say(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    say = _command(
        commands,
        "say",
        "commands.say",
        "Speak TEXT or standard input, through the speakers or into a file.",
    )
    _add_server(say)
    say.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write it: .mp3 .opus .aac .flac .wav .pcm; - is stdout",
    )
    say.add_argument("--model", help="the speech model (default: the server's first)")
    say.add_argument("--voice", help="one of the model's voices (default: its first)")
    say.add_argument("--speed", type=float, default=1.0, help="0.25 to 4 (default: 1)")
    say.add_argument("text", metavar="TEXT", nargs="*", help="what to say")


def _add_listen(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listen = _command(
        commands,
        "listen",
        "commands.listen",
        "Print what is said in a sound file, or into the microphone, as it is understood.",
    )
    _add_server(listen)
    listen.add_argument("--model", help="the model that listens (default: the server's first)")
    listen.add_argument("--language", default="", help="code such as en (default: found out)")
    listen.add_argument(
        "--prompt", default="", help="text that comes before, to show names and spelling"
    )
    listen.add_argument(
        "--translate", action="store_true", help="a file into English; printed at the end"
    )
    listen.add_argument(
        "--speakers",
        action="store_true",
        help="a line per turn of a file, with who speaks: A, B, …",
    )
    listen.add_argument(
        "--mic", action="store_true", help="listen to the microphone until Ctrl-C, a line per turn"
    )
    listen.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="wav, mp3, flac, ogg, m4a, webm or another that FFmpeg reads",
    )


def _add_draw(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    draw = _command(
        commands, "draw", "commands.draw", "Draw TEXT into a file, and show how it gets on."
    )
    _add_server(draw)
    draw.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="drawing.png",
        help="write it: .png .jpg .webp (default: %(default)s)",
    )
    draw.add_argument("--model", help="the model that draws (default: the server's first)")
    draw.add_argument(
        "--size", metavar="WxH", help="pixels, such as 512x512 (default: the model's own)"
    )
    draw.add_argument("--steps", type=int, help="denoising steps (default: the model's own)")
    draw.add_argument(
        "--guidance", type=float, help="how closely to follow the text (default: the model's own)"
    )
    draw.add_argument("--negative", metavar="TEXT", default="", help="what is not to be in it")
    draw.add_argument(
        "--seed", type=int, help="the same one gives the same picture (default: a new one)"
    )
    draw.add_argument(
        "--lora",
        metavar="NAME[:SCALE]",
        action="append",
        default=[],
        help="one of the server's adapters, and how strongly (default: 1); may be repeated",
    )
    draw.add_argument("--image", metavar="FILE", help="a picture to be changed")
    draw.add_argument(
        "--mask", metavar="FILE", help="where: what is transparent, or white, is drawn anew"
    )
    draw.add_argument(
        "--strength",
        type=float,
        help="how far from the picture, up to 1 (default: the model's own)",
    )
    draw.add_argument("text", metavar="TEXT", nargs="+", help="what to draw")


def _add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_server(
        _command(
            commands,
            "models",
            "commands.models",
            "List what the server serves, local model folders, and models downloaded from a hub.",
        )
    )


def _add_pull(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    pull = _command(
        commands, "pull", "commands.pull", "Download a model from a hub, or what changed of it."
    )
    pull.add_argument("models", metavar="MODEL", nargs="+", help=_HUB_NAME)


def _add_remove(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    remove = _command(commands, "remove", "commands.remove", "Delete a downloaded model.")
    remove.add_argument("models", metavar="MODEL", nargs="+", help=_HUB_NAME)


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = _command(commands, "keys", "commands.keys", "Make, list and revoke the keys of tenants.")
    ways = keys.add_subparsers(dest="way", required=True, metavar="new|list|revoke")
    new = ways.add_parser("new", help="make a key and print it, once", allow_abbrev=False)
    new.add_argument(
        "tenant", metavar="TENANT", help="whose key it is; one that is not there yet is added"
    )
    new.add_argument("--note", metavar="TEXT", help="what it is for; `list` shows it")
    listed = ways.add_parser("list", help="ids, tenants and dates", allow_abbrev=False)
    listed.add_argument("tenant", metavar="TENANT", nargs="?", help="only of this one")
    revoke = ways.add_parser(
        "revoke", help="take a key out: it is refused a second later", allow_abbrev=False
    )
    revoke.add_argument("id", metavar="ID", help="the key's id, or how it begins")
    for way in (new, listed, revoke):
        way.add_argument(
            "--tenants-file", metavar="PATH", help="the file of tenants [MOTET_TENANTS_FILE]"
        )


def _add_credentials(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = (
        "Make the passwords and certificates with which the processes of a stack know each other."
    )
    credentials = _command(commands, "credentials", "commands.credentials", about)
    ways = credentials.add_subparsers(dest="way", required=True, metavar="passwords|ca|certificate")
    passwords = ways.add_parser(
        "passwords", help="one per NATS user, and the server's files", allow_abbrev=False
    )
    passwords.add_argument("--rotate", action="store_true", help="replace those that are there")
    authority = ways.add_parser(
        "ca", help="a certificate authority of your own", allow_abbrev=False
    )
    certificate = ways.add_parser(
        "certificate", help="of a host, signed by the authority", allow_abbrev=False
    )
    for way in (passwords, authority, certificate):
        way.add_argument("folder", metavar="FOLDER", help="where they are, readable by you alone")
    certificate.add_argument(
        "names", metavar="NAME", nargs="+", help="by which others reach it: host names, addresses"
    )
    for way, days in ((authority, 3650), (certificate, 365)):
        way.add_argument(
            "--days", type=int, default=days, help="that it is valid for (default: %(default)s)"
        )


def _add_role(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    role = _command(
        commands,
        "role",
        "commands.role",
        "Have a running engine decode, or prefill for those that do.",
    )
    role.add_argument(
        "--url", default=DEFAULT_URL, help="the server of a `motet up` here (default: %(default)s)"
    )
    role.add_argument(
        "--nats",
        metavar="URL",
        help="its NATS server, where it runs elsewhere [MOTET_NATS_CREDENTIALS]",
    )
    role.add_argument(
        "instance", metavar="INSTANCE", help="id of the worker, such as decode-1f2e3d4c"
    )
    role.add_argument("role", choices=("decode", "prefill"))


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = _command(
        commands,
        "profile",
        "commands.profile",
        "Record a torch trace of a decode worker while it serves.",
    )
    profile.add_argument(
        "--url", default=DEFAULT_URL, help="the server of a `motet up` here (default: %(default)s)"
    )
    profile.add_argument(
        "--nats",
        metavar="URL",
        help="its NATS server, where it runs elsewhere [MOTET_NATS_CREDENTIALS]",
    )
    profile.add_argument("--model", metavar="NAME", help="the model (default: the only one)")
    profile.add_argument(
        "--instance", metavar="ID", help="the worker (default: the model's busiest)"
    )
    profile.add_argument(
        "--steps", type=int, default=20, help="engine steps to record; 0: by time (default: 20)"
    )
    profile.add_argument(
        "--seconds", type=float, default=60.0, help="record at most this long (default: 60)"
    )
    profile.add_argument(
        "--shapes", action="store_true", help="with the shapes of each operator's inputs"
    )
    profile.add_argument(
        "--stacks", action="store_true", help="with Python's stack; slows the steps down"
    )
    profile.add_argument("--memory", action="store_true", help="with what each operator allocates")
    profile.add_argument(
        "--output",
        metavar="FILE",
        default="trace.json.gz",
        help="where it goes; gzipped if so named (%(default)s)",
    )


def _add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    top = _command(
        commands,
        "top",
        "commands.top",
        "Show every instance and how fast replies are, live, until Ctrl-C.",
    )
    _add_server(top)
    top.add_argument(
        "--every", metavar="SECONDS", type=float, default=1.0, help="look so often (default: 1)"
    )
    top.add_argument(
        "--window",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="replies that count (default: 60)",
    )
    top.add_argument(
        "--first",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="a good reply begins in (default: 1)",
    )
    top.add_argument(
        "--between",
        metavar="SECONDS",
        type=float,
        default=0.1,
        help="a good reply's tokens follow in (default: 0.1)",
    )
    top.add_argument(
        "--price",
        metavar="PER_HOUR",
        type=float,
        help="of all machines: tells what a million tokens cost",
    )
    top.add_argument("--once", action="store_true", help="look twice, print, and end")
    top.add_argument("--json", action="store_true", help="with --once: what was seen, as JSON")


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = _command(
        commands, "trace", "commands.trace", "Show where a reply spent its time, stage by stage."
    )
    _add_server(trace)
    trace.add_argument(
        "--slowest", action="store_true", help="of the last 200 replies (default: the last one)"
    )
    trace.add_argument("request", metavar="REQUEST", nargs="?", default="", help="its x-request-id")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = _command(
        commands,
        "doctor",
        "commands.doctor",
        "Name what is short and what to turn. Exit code: 0 healthy, 1 something is short, 2 it could not be asked.",
    )
    _add_server(doctor)
    doctor.add_argument(
        "--window",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="look back so far (default: 10)",
    )
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = _command(
        commands,
        "plan",
        "planning.plan",
        "Tell what a model needs and what a machine could do with it.",
    )
    plan.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint folder (config.json is enough), a local model's name, or org/name on a hub",
    )
    plan.add_argument(
        "--memory", metavar="BYTES", help="such as 24GB (default: the GPU's, or what is free here)"
    )
    plan.add_argument(
        "--context",
        metavar="TOKENS",
        help="per sequence, such as 8k (default: 4k, or the model's limit)",
    )
    where = plan.add_mutually_exclusive_group()
    where.add_argument(
        "--gpu", metavar="NAME", help="upper bounds of tokens/s on this GPU, such as H100"
    )
    where.add_argument(
        "--cpu", action="store_true", help="upper bounds of tokens/s on this machine's processor"
    )
    weights = ("float32", "bf16", "bfloat16", "int8", "int4", "float8")
    plan.add_argument("--weights", choices=weights, default="bf16", help="(default: bf16)")
    kv_dtypes = ("float32", "bf16", "bfloat16", "int8", "float8", "float8_e4m3fn")
    plan.add_argument("--kv-dtype", choices=kv_dtypes, default="bf16", help="(default: bf16)")
    plan.add_argument(
        "--block-size", type=int, default=16, help="tokens per KV block (default: 16)"
    )
    plan.add_argument(
        "--token-budget", type=int, default=512, help="tokens computed per step (default: 512)"
    )
    plan.add_argument(
        "--max-running", type=int, default=64, help="most sequences at a time (default: 64)"
    )
    plan.add_argument(
        "--no-prefix-cache", action="store_true", help="no snapshots of recurrent states"
    )
    plan.add_argument(
        "--overhead", metavar="BYTES", help="of the process beside the model (default: measured)"
    )
    plan.add_argument("--threads", type=int, default=0, help="of --cpu (default: all)")
    plan.add_argument(
        "--bandwidth",
        metavar="BYTES",
        help="per second, of --cpu, such as 50GB (default: measured here)",
    )
    plan.add_argument(
        "--gflops", type=float, help="float32, of --cpu (default: from clock and vector width)"
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_traffic(
        plan.add_argument_group(
            "traffic", "how many of what it needs, and what a million tokens cost"
        )
    )


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    found = _command(
        commands,
        "eval",
        "commands.eval",
        "Tell what settings of the engine cost a model in quality.",
    )
    found.add_argument(
        "model", metavar="MODEL", help="checkpoint folder, a local model's name, or org/name"
    )
    found.add_argument(
        "--setting",
        metavar="NAME=VALUE,…",
        action="append",
        help="of the engine, such as weights=int8,kv_dtype=int8, or model=FOLDER; repeatable (default: each format)",
    )
    found.add_argument(
        "--text", metavar="FILE", action="append", default=[], help="for perplexity; repeatable"
    )
    found.add_argument(
        "--tasks",
        metavar="FILE",
        help="JSON lines of question and answer (pocket-chat has its own)",
    )
    found.add_argument(
        "--limit", metavar="N", type=int, default=0, help="only N tasks of each category"
    )
    found.add_argument(
        "--window",
        metavar="N",
        type=int,
        default=1024,
        help="tokens of a text read together (1024)",
    )
    found.add_argument(
        "--timeout", metavar="S", type=float, default=3600, help="most seconds per setting (3600)"
    )
    found.add_argument("--json", action="store_true", help="print JSON instead of a table")
