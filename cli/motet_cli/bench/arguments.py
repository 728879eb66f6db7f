"""Define the command line of `motet bench`. `config` explains and checks the options."""

from __future__ import annotations

import argparse


def add_bench(bench: argparse.ArgumentParser, default_url: str) -> None:
    bench.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=default_url,
        help="the server (default: %(default)s)",
    )
    bench.add_argument("--model", metavar="NAME", help="the model (default: the server's first)")
    bench.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="default: chat"
    )
    bench.add_argument(
        "--api-key-file", metavar="PATH", help="file with the server's key [MOTET_API_KEY_FILE]"
    )
    _add_load(bench.add_argument_group("load"))
    _add_requests(
        bench.add_argument_group(
            "requests", "DIST: 128, uniform:64,256 or lognormal:200,0.5 (in tokens)"
        )
    )
    _add_judgement(bench.add_argument_group("judgement"))
    _add_output(bench.add_argument_group("output"))


def _add_load(load: argparse._ArgumentGroup) -> None:
    how = load.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency", metavar="N", type=int, help="N requests at a time (the default, with 8)"
    )
    how.add_argument(
        "--rate", metavar="R", type=float, help="R requests per second, whatever the server does"
    )
    how.add_argument(
        "--trace", metavar="FILE", help="requests and times from a JSONL file, ours or Mooncake's"
    )
    load.add_argument(
        "--arrivals", choices=("poisson", "constant"), default="poisson", help="of --rate (poisson)"
    )
    load.add_argument(
        "--speed",
        metavar="X",
        type=float,
        default=1.0,
        help="run a trace X times as fast (default: 1)",
    )
    load.add_argument(
        "--requests",
        metavar="N",
        type=int,
        help="send N (default: 100, a whole trace, or by --duration)",
    )
    load.add_argument(
        "--duration", metavar="TIME", help="send for so long, as in 60s; then wait for the replies"
    )
    load.add_argument(
        "--warmup", metavar="N", type=int, default=2, help="requests before it counts (default: 2)"
    )
    load.add_argument(
        "--timeout", metavar="TIME", default="5m", help="give a request up after this (default: 5m)"
    )


def _add_requests(requests: argparse._ArgumentGroup) -> None:
    requests.add_argument(
        "--input", metavar="DIST", default="128", help="length of prompts (default: 128)"
    )
    requests.add_argument("--output", metavar="DIST", default="64", help="max_tokens (default: 64)")
    requests.add_argument(
        "--prefix-share",
        metavar="F",
        type=float,
        default=0.0,
        help="share of requests with a shared beginning, 0 to 1",
    )
    requests.add_argument(
        "--prefix-length", metavar="DIST", default="512", help="its length, besides --input (512)"
    )
    requests.add_argument(
        "--prefixes", metavar="N", type=int, default=1, help="different beginnings (default: 1)"
    )
    requests.add_argument(
        "--seed", type=int, default=0, help="the same seed, the same requests (default: 0)"
    )
    requests.add_argument(
        "--tokens-per-word",
        metavar="X",
        type=float,
        help="of the server's tokenizer (default: measured first)",
    )
    requests.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    requests.add_argument(
        "--ignore-eos", action="store_true", help="have every reply be as long as it may"
    )
    requests.add_argument(
        "--extra", metavar="JSON", default="{}", help="object with further fields of each request"
    )


def _add_judgement(judgement: argparse._ArgumentGroup) -> None:
    judgement.add_argument(
        "--ttft", metavar="TIME", help="goodput: longest time to first token, as in 2s"
    )
    judgement.add_argument(
        "--itl", metavar="TIME", help="goodput: largest p95 gap between tokens, as in 150ms"
    )
    judgement.add_argument("--e2e", metavar="TIME", help="goodput: longest time to the last token")
    judgement.add_argument(
        "--price-per-hour", metavar="X", type=float, help="of the server; gives cost per token"
    )


def _add_output(output: argparse._ArgumentGroup) -> None:
    output.add_argument("--json", metavar="FILE", help="all figures, with configuration and seed")
    output.add_argument(
        "--records", action="store_true", help="and every request, in the JSON file"
    )
    output.add_argument(
        "--plot", metavar="FILE", help="a picture, .png or .svg (needs motet[bench])"
    )
