"""`python -m motet_llm --model FOLDER`: one worker, of role decode or, with `--role prefill`, prefill."""

import os

from motet_shared.starts import importing

# torch's profiler reads it when torch is loaded; it would greet every recording among the lines of our log.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
with importing():
    from motet_shared.actor import Actor, run
    from motet_shared.config import load
    from motet_shared.errors import ConfigError

    from .prefill import PrefillWorker
    from .worker import Decode, DecodeConfig


def main() -> None:
    worker: type[Actor] = Decode
    try:
        if load(DecodeConfig, prog="motet-llm").role == "prefill":
            worker = PrefillWorker
    except ConfigError:
        pass  # `run` says it
    run(worker, DecodeConfig)


if __name__ == "__main__":
    main()
