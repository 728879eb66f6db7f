"""Define the options of `motet bench`; `motet_cli.bench.config` checks them."""

from __future__ import annotations

import argparse


def add_bench(bench: argparse.ArgumentParser, default_url: str) -> None:
    """Add the options of `motet bench` to its parser."""
    bench.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=default_url,
        help="base URL of the server (default: %(default)s)",
    )
    bench.add_argument(
        "--model",
        metavar="NAME",
        help="model to measure (default: the first that the server lists)",
    )
    bench.add_argument(
        "--endpoint",
        choices=("chat", "completions", "speech"),
        default="chat",
        help="API to call (default: chat); of speech, --input is in words",
    )
    bench.add_argument(
        "--api-key-file", metavar="PATH", help="file with the server's key [MOTET_API_KEY_FILE]"
    )
    _add_load(bench.add_argument_group("load"))
    _add_requests(
        bench.add_argument_group(
            "requests", "DIST, in tokens: 128, uniform:64,256 or lognormal:200,0.5"
        )
    )
    _add_goodput(bench.add_argument_group("goodput and cost"))
    _add_output(bench.add_argument_group("output"))


def _add_load(load: argparse._ArgumentGroup) -> None:
    mode = load.add_mutually_exclusive_group()
    mode.add_argument(
        "--concurrency",
        metavar="N",
        type=int,
        help="keep N requests in flight (the default, with 8)",
    )
    mode.add_argument(
        "--rate",
        metavar="R",
        type=float,
        help="send R requests per second, however slow the server is",
    )
    mode.add_argument(
        "--trace",
        metavar="FILE",
        help="replay a JSONL file of requests, in Motet's or Mooncake's format",
    )
    load.add_argument(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="arrival process of --rate (default: poisson)",
    )
    load.add_argument(
        "--speed",
        metavar="X",
        type=float,
        default=1.0,
        help="replay a trace X times as fast (default: 1)",
    )
    load.add_argument(
        "--requests",
        metavar="N",
        type=int,
        help="requests to send (default: 100, the whole trace, or as --duration allows)",
    )
    load.add_argument(
        "--duration",
        metavar="TIME",
        help="send for this long, such as 60s, then wait for the replies",
    )
    load.add_argument(
        "--warmup",
        metavar="N",
        type=int,
        default=2,
        help="requests sent before the measurement (default: 2)",
    )
    load.add_argument(
        "--timeout",
        metavar="TIME",
        default="5m",
        help="abort a request after this time (default: 5m)",
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
        help="share of requests that begin with a shared prefix, 0 to 1 (default: 0)",
    )
    requests.add_argument(
        "--prefix-length",
        metavar="DIST",
        default="512",
        help="tokens of a shared prefix, added to --input (default: 512)",
    )
    requests.add_argument(
        "--prefixes",
        metavar="N",
        type=int,
        default=1,
        help="number of different shared prefixes (default: 1)",
    )
    requests.add_argument(
        "--seed", type=int, default=0, help="seed of the generated requests (default: 0)"
    )
    requests.add_argument(
        "--tokens-per-word",
        metavar="X",
        type=float,
        help="mean of the server's tokenizer (default: measured before the run)",
    )
    requests.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature (default: 0)"
    )
    requests.add_argument(
        "--ignore-eos", action="store_true", help="generate --output tokens in every reply"
    )
    requests.add_argument(
        "--extra", metavar="JSON", default="{}", help="object of further fields for every request"
    )


def _add_goodput(goodput: argparse._ArgumentGroup) -> None:
    goodput.add_argument(
        "--ttft", metavar="TIME", help="goodput: longest time to first token, as in 2s"
    )
    goodput.add_argument(
        "--ttfa", metavar="TIME", help="goodput: longest time to first audio, as in 500ms"
    )
    goodput.add_argument(
        "--itl", metavar="TIME", help="goodput: largest p95 gap between tokens, as in 150ms"
    )
    goodput.add_argument("--e2e", metavar="TIME", help="goodput: longest time to the last token")
    goodput.add_argument(
        "--price-per-hour",
        metavar="X",
        type=float,
        help="price of the server; adds the cost per token to the report",
    )


def _add_output(output: argparse._ArgumentGroup) -> None:
    output.add_argument(
        "--json", metavar="FILE", help="write all figures, the configuration and the seed to FILE"
    )
    output.add_argument(
        "--records", action="store_true", help="add a record of every request to the JSON file"
    )
    output.add_argument(
        "--plot", metavar="FILE", help="write a plot to FILE, .png or .svg (needs motet[bench])"
    )
