"""Be rank 1 of many pairs of ranks, and stop.

`python -m support.engine.stopping_rank STORE NAMES MEMORY PAIRS SECONDS`: a pair over gloo for each
name, and PAIRS in the shared memory of a descriptor. Prints a line and stops itself once all pairs
have met.
"""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

from motet_kernels.rank_memory import RankMemory
from motet_llm.parallel.collectives import Collectives, GlooCollectives, SharedCollectives


def main() -> None:
    path, names, memory, groups, seconds = sys.argv[1:]
    store, limit = dist.FileStore(path, 2), float(seconds)
    pairs: list[Collectives] = [
        GlooCollectives(store, 1, 2, limit, name) for name in names.split(",")
    ]
    for group in range(int(groups)):
        pairs.append(SharedCollectives(RankMemory(int(memory), 1, 2, limit, group), limit))
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    del pairs


if __name__ == "__main__":
    main()
