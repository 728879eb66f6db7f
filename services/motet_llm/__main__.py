"""Start one worker of role decode or prefill: `python -m motet_llm --model FOLDER`."""

import os

from motet_shared.process.starts import importing

# torch's profiler reads this when torch is imported; by default it logs a line per recording.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# numpy would start threads, and ranks of a group are forked from a process without any.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
with importing():
    from motet_kernels.runtime import native
    from motet_llm.parallel.degrees import Degrees
    from motet_llm.parallel.processes import prepare_forks
    from motet_llm.serving.prefill_service import Prefill
    from motet_llm.weights.checkpoint import prepare_renaming
    from motet_llm.weights.packed_cache import code_digest
    from motet_shared.errors import ConfigError
    from motet_shared.process.actor import Actor, run
    from motet_shared.process.config import load

    from .config import DecodeConfig
    from .service import Decode

    prepare_renaming()


def prepare() -> None:
    """Do what needs no settings, in a process that waits for its model."""
    native.load()
    code_digest()


def main() -> None:
    worker: type[Actor] = Decode
    try:
        config = load(DecodeConfig, prog="motet-llm")
        if config.role == "prefill":
            worker = Prefill
        if Degrees.of(config).ranks > 1:
            prepare_forks()
    except ConfigError:
        pass  # `run` reports it
    run(worker, DecodeConfig)


if __name__ == "__main__":
    main()
