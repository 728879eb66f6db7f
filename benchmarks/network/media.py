"""Measure the cost of decoding a picture in a child process: `python benchmarks/run.py media`.

A child and this process decode the same PNG of 512 pixels in interleaved pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from io import BytesIO

import numpy as np
from PIL import Image

from benchmarks.support.measures import median_interval, processor
from motet_media import picture
from motet_media.pictures import open_picture


def file(size: int) -> bytes:
    """Return a PNG of smooth colours with some noise, which compresses like a photograph's."""
    rng = np.random.default_rng(0)
    slope = np.linspace(0, 200, size)[:, None, None] + np.linspace(0, 40, size)[None, :, None]
    pixels = (slope + rng.integers(0, 12, (size, size, 3))).astype(np.uint8)
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(data: bytes, pairs: int) -> tuple[list[float], list[float]]:
    """Return the times in a child and here, in seconds, `pairs` of each."""
    limit = 1 << 26
    ways = (
        lambda: open_picture(data, max_pixels=limit),
        lambda: picture.open_picture(data, limit, "image"),
    )
    for _ in range(5):
        for way in ways:
            way()
    times = [[seconds(way) for way in ways] for _ in range(pairs)]
    return [pair[0] for pair in times], [pair[1] for pair in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512, help="pixels of the picture's side")
    parser.add_argument("--pairs", type=int, default=300)
    args = parser.parse_args()
    data = file(args.size)
    child, here = measure(data, args.pairs)
    more = [1e3 * (a - b) for a, b in zip(child, here, strict=True)]
    print(
        f"{processor()}; PNG {args.size}x{args.size}, {len(data)} bytes, {args.pairs} pairs in turn"
    )
    print(
        f"in a child {1e3 * statistics.median(child):.2f} ms, here {1e3 * statistics.median(here):.2f} ms (medians)"
    )
    low, high = median_interval(more)
    print(f"more: median {statistics.median(more):.2f} ms ({low:.2f} to {high:.2f} with 95 %)")


if __name__ == "__main__":
    main()
