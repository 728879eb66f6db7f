"""Define the options of `motet plan --traffic`; `planning.demand` checks them."""

from __future__ import annotations

import argparse

SHAPES = ("steady", "ramp", "bursts", "daily")


def add_traffic(group: argparse._ArgumentGroup) -> None:
    """Add the options of `motet plan --traffic` to a group of its parser."""
    group.add_argument(
        "--traffic",
        metavar="RATE|FILE",
        help="requests per second, or a trace file of requests (docs/plan.md)",
    )
    group.add_argument(
        "--prices", metavar="FILE", help="TOML file of prices per hour of an instance, by hardware"
    )
    group.add_argument(
        "--ttft", metavar="TIME", help="SLO: limit of the time to the first token, such as 1s"
    )
    group.add_argument(
        "--itl",
        metavar="TIME",
        help="SLO: limit of the mean time between tokens of a reply, such as 50ms",
    )
    group.add_argument(
        "--share",
        type=float,
        default=0.99,
        help="share of requests that must meet the SLO (default: 0.99)",
    )
    group.add_argument(
        "--input",
        metavar="DIST",
        default="lognormal:500,0.8",
        help="tokens of prompts (default: %(default)s)",
    )
    group.add_argument(
        "--output",
        metavar="DIST",
        default="lognormal:200,0.8",
        help="tokens of replies (default: %(default)s)",
    )
    group.add_argument(
        "--shape",
        choices=SHAPES,
        default="steady",
        help="course of a RATE over time (default: steady)",
    )
    group.add_argument(
        "--duration", metavar="TIME", help="duration of a RATE (default: 10m, for daily a day)"
    )
    group.add_argument(
        "--speed",
        dest="traffic_speed",
        type=float,
        default=1.0,
        help="replay a FILE this many times as fast (default: 1)",
    )
    group.add_argument(
        "--cached",
        type=float,
        default=0.0,
        help="share of prompt tokens in a prefix cache (default: 0)",
    )
    group.add_argument(
        "--efficiency",
        type=float,
        default=0.5,
        help="reached share of the roofline for hardware without measured speeds (default: 0.5)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="seed of the generated requests (default: 0)"
    )
