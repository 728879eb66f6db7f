"""Start a llama-server of another Python environment as a child of the host."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import socket
from pathlib import Path
from typing import Any

from motet_engines.config import EnginesConfig
from motet_models.context import trained_context
from motet_shared.errors import ConfigError

from ..card import read_text_config

log = logging.getLogger(__name__)

_MAIN = Path(__file__).with_name("server_main.py")
_CONFIG = 78  # exit status of a server whose settings are wrong
_CLOSE = 3.0  # seconds to end in
_CONTEXT = 4096  # tokens per slot, where neither the setting nor the model says


class LlamaServer:
    """Run a llama-server as a child process; `url` is the base of its API."""

    def __init__(self, config: EnginesConfig):
        self._config = config
        self._port = _free_port()
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"http://127.0.0.1:{self._port}/v1"

    async def start(self) -> None:
        """Start the server, and wait until its model is loaded. Raises ConfigError."""
        config = self._config
        self._process = process = await asyncio.create_subprocess_exec(
            config.engine_python,
            str(_MAIN),
            json.dumps(self._argument()),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path("/"),
        )
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"listening"):
                log.info("llama-server listens", extra={"port": self._port})
                return
        status = await process.wait()
        raise ConfigError(
            f"engine_python={config.engine_python!r}: llama-server ended with status {status}"
            " before it listened; its output is above",
            param="engine_args" if status == _CONFIG else "engine_python",
        )

    def _argument(self) -> dict[str, Any]:
        config = self._config
        options = _options(config.engine_args)
        trained = trained_context(read_text_config(Path(config.model))) or _CONTEXT
        return {
            "model": str(_model_file(config, options)),
            "port": self._port,
            "context": config.context or min(trained, _CONTEXT),
            "slots": int(options.pop("n_parallel", 4)),
            "threads": int(os.environ.get("OMP_NUM_THREADS") or 0),
            "options": options,
        }

    async def ended(self) -> int:
        """Wait for the end of the process; return its exit status."""
        if self._process is None:
            raise RuntimeError("llama-server has not started")
        return await self._process.wait()

    async def close(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_CLOSE):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _options(text: str) -> dict[str, str]:
    """Return `NAME=VALUE …` as a dictionary. Raises ConfigError."""
    found = {}
    for word in shlex.split(text):
        name, sign, value = word.removeprefix("--").partition("=")
        if not sign:
            raise ConfigError(
                f"engine_args: {word!r}: give NAME=VALUE, such as n_parallel=8", param="engine_args"
            )
        found[name.replace("-", "_")] = value
    return found


def _model_file(config: EnginesConfig, options: dict[str, str]) -> Path:
    """Return the GGUF file: `gguf=FILE` of `engine_args`, or the only one of the model's folder."""
    given = options.pop("gguf", None)
    found = [Path(given)] if given else sorted(Path(config.model).glob("*.gguf"))
    if len(found) != 1 or not found[0].is_file():
        raise ConfigError(
            f"engine_args: llama.cpp needs a GGUF file, {given or config.model!r} has"
            f" {'none' if not found else 'several'}; give gguf=FILE",
            param="engine_args",
        )
    return found[0].resolve()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
