"""Define the options of `motet plan --traffic`. `demand` and `traffic` explain them."""

from __future__ import annotations

import argparse

SHAPES = ("steady", "ramp", "bursts", "daily")


def add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--traffic",
        metavar="RATE|FILE",
        help="requests per second; or a file of them (docs/plan.md)",
    )
    group.add_argument(
        "--prices", metavar="FILE", help="TOML: what an instance costs per hour, by what it runs on"
    )
    group.add_argument(
        "--ttft", metavar="TIME", help="SLO: longest time to the first token, as in 1s"
    )
    group.add_argument(
        "--itl", metavar="TIME", help="SLO: longest mean time between a reply's tokens, as in 50ms"
    )
    group.add_argument(
        "--share",
        type=float,
        default=0.99,
        help="of the requests that keep the SLO (default: 0.99)",
    )
    group.add_argument(
        "--input",
        metavar="DIST",
        default="lognormal:500,0.8",
        help="tokens of prompts (%(default)s)",
    )
    group.add_argument(
        "--output", metavar="DIST", default="lognormal:200,0.8", help="of replies (%(default)s)"
    )
    group.add_argument(
        "--shape", choices=SHAPES, default="steady", help="of a RATE over time (default: steady)"
    )
    group.add_argument(
        "--duration", metavar="TIME", help="of a RATE (default: 10m; of daily: a day)"
    )
    group.add_argument(
        "--speed", dest="traffic_speed", type=float, default=1.0, help="X: a FILE X times as fast"
    )
    group.add_argument(
        "--cached", type=float, default=0.0, help="share of prompts in a prefix cache (default: 0)"
    )
    group.add_argument(
        "--efficiency",
        type=float,
        default=0.5,
        help="of the roofline, where nothing was measured (0.5)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="the same seed, the same requests (default: 0)"
    )
