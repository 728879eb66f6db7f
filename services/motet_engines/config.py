"""Define the settings of a process that serves another engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, Duration, ProcessConfig, setting

Kind = Literal["vllm", "llama.cpp", "openai"]
Dialect = Literal["auto", "vllm", "motet", "llama.cpp", "sglang", "openai"]
RouteName = Literal["auto", "ids", "text", "chat"]


@dataclass(frozen=True, kw_only=True)
class EnginesConfig(ProcessConfig):
    """Serve one model of another engine as a decode worker."""

    engine: Kind = setting(
        "vllm: in this process; llama.cpp: llama-server; openai: a server with OpenAI's API"
    )
    model: str = setting("folder with the model's config.json and tokenizer.json")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    engine_url: str = setting("base URL of the running server, with /v1", default="")
    engine_python: str = setting(
        "Python of the environment whose llama-server the host starts", default=""
    )
    engine_args: str = setting(
        "arguments of the engine: those of `vllm serve`, or NAME=VALUE of llama.cpp", default=""
    )
    engine_key: str | None = setting("key that the server asks for", default=None, secret=True)
    adapters: tuple[str, ...] = setting(
        "LoRA adapters as PEFT saves them, name=folder, of engine=vllm", default=()
    )
    engine_model: str = setting(
        "what the server calls the model (default: its name here, or the only one there)",
        default="",
    )
    engine_dialect: Dialect = setting(
        "whose parameters the server knows beyond OpenAI's; auto: as its list of models says",
        default="auto",
    )
    engine_route: RouteName = setting(
        "how prompts are sent: ids (token ids both ways), text (token ids there, text back), chat "
        "(messages); auto: the first of them that the server answers",
        default="auto",
    )
    engine_timeout: Duration = setting(
        "how long a server may send nothing before its replies move elsewhere",
        default=120.0,
        min=1,
    )
    engine_probe: Duration = setting(
        "how often the server is probed, and its load read", default=1.0, min=0.1
    )
    target: str = setting(
        "name of this target in the chain of its model (default: the engine)", default=""
    )
    rank: int = setting("place of the target in that chain, from 0", default=0, min=0)
    keep_warm: Duration = setting(
        "time without requests after which a reply of one token is requested; 0: never",
        default=0.0,
        min=0,
    )
    breaker_failures: int = setting(
        "failed requests in a row after which no more are sent, until one of the host's own"
        " succeeds; 0: any number",
        default=5,
        min=0,
    )
    breaker_pause: Duration = setting(
        "time until that request, doubled each time it fails", default=2.0, min=0.01
    )
    context: int = setting(
        "longest prompt plus output, tokens; 0: the model's own limit", default=0, min=0
    )
    image_memory: Bytes = setting(
        "memory for the files of pictures in running requests; further ones are refused",
        default=128 << 20,
        min=1024,
    )
    max_picture: int = setting(
        "largest picture that is decoded for vllm, pixels", default=50_000_000, min=1
    )
    max_running: int = setting(
        "requests at a time; further ones are refused", default=256, min=1, max=4096
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(
                f"model={self.model!r}: no config.json there; give the model's folder",
                param="model",
            )
        if self.adapters and self.engine != "vllm":
            raise ConfigError(
                f"adapters={self.adapters[0]!r}: engine={self.engine!r} is given none here; start its"
                " server with them",
                param="adapters",
            )
        self._check_place()

    def _check_place(self) -> None:
        """Raise ConfigError unless exactly the fields are given that say where the engine is."""
        if self.engine == "vllm":
            if self.engine_url:
                raise ConfigError(
                    f"engine_url={self.engine_url!r}: vllm runs in this process; give"
                    " engine=openai for a server",
                    param="engine_url",
                )
            return
        if self.engine == "llama.cpp" and bool(self.engine_python) != bool(self.engine_url):
            if self.engine_url:
                self._check_url()
            return
        if self.engine_python:
            raise ConfigError(
                f"engine_python={self.engine_python!r}: engine={self.engine!r} is at engine_url;"
                " leave one of them out",
                param="engine_python",
            )
        self._check_url()

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.engine_url)
            parts.port  # noqa: B018  (reading it raises ValueError for a wrong one)
        except ValueError as error:
            raise ConfigError(
                f"engine_url: {error}; give such as http://127.0.0.1:8001/v1", param="engine_url"
            ) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"engine_url={self.engine_url!r}: give http:// or https:// with a host, and /v1",
                param="engine_url",
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                "engine_url: has a user, a query or a fragment; give the base URL alone, and the key"
                " as engine_key",
                param="engine_url",
            )

    @property
    def model_name(self) -> str:
        """Return the name that clients use for the model."""
        return self.name or Path(self.model).resolve().name
