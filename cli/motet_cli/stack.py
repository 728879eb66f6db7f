"""What `motet up` starts: which processes, with which arguments, and how many threads each may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from motet_cli import address
from motet_cli.child import ChildSpec
from motet_cli.logs import LogFormat
from motet_cli.models import ModelFolder

# Stop order: the door closes first and its requests end, then those who serve them, and NATS last of all.
_GATEWAY_STAGE, _SERVICE_STAGE = 0, 1
# What a first chat token needs. Where there are fewer cores than processes, the others let it go first.
CHAT_PATH = frozenset({"gateway", "tokenizer", "decode", "prefill"})
# These import torch, which takes seconds; forked from a process that has, they begin at once.
_WITH_TORCH = frozenset({"decode", "prefill", "vision", "asr", "tts", "diffusion", "embedding"})
_QUIET = {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}  # progress bars of libraries are no log
_DRAIN = 10.0  # seconds that replies in flight have to end
_LONGEST_DRAIN = 3600  # of a gateway that has been replaced: whoever stops it says when that is enough
_GATEWAY_GRACE, _SERVICE_GRACE = 5.0, 8.0


@dataclass(frozen=True, kw_only=True)
class Door:
    """Who may ask, and how."""

    api_key_file: Path | None = None
    tenants_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    tls: tuple[Path, Path] | None = None  # certificate and key

    @property
    def has_keys(self) -> bool:
        return self.api_key_file is not None or self.tenants_file is not None

    def arguments(self) -> list[str]:
        """Of the gateway."""
        cert, key = self.tls or (None, None)
        files = {
            "api-key-file": self.api_key_file,
            "tenants-file": self.tenants_file,
            "tls-cert": cert,
            "tls-key": key,
        }
        argv = [part for name, path in files.items() if path is not None for part in (f"--{name}", str(path))]
        return argv + [part for origin in self.allowed_origins for part in ("--allowed-origins", origin)]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Everything that `motet up` was asked for, already checked."""

    models: tuple[ModelFolder, ...]
    nats_url: str
    nats_password: str | None = field(repr=False)  # None: the children read what the environment says, if anything
    host: str = "127.0.0.1"
    port: int = 8000
    decode: int = 1  # instances per model
    prefill: int = 0  # instances per model, that compute prompts for decode
    speculate: str | None = None  # who guesses tokens ahead for decode; None: whom the environment says, if anybody
    adapters: tuple[str, ...] = ()  # of the model, NAME=FOLDER each
    tokenizer: int = 1
    vad: int = 1
    asr: ModelFolder | None = None  # what listens; None: nothing does
    turns: Path | None = None  # the model that tells the end of a turn
    tts: ModelFolder | None = None  # what speaks; None: nothing does
    speakers: ModelFolder | None = None  # what tells speakers apart; None: nothing does
    draw: ModelFolder | None = None  # what draws; None: nothing does
    embed: ModelFolder | None = None  # what embeds texts; None: nothing does
    planner: Path | None = None  # the roles that are scaled by load, as motet-planner reads them; None: none
    door: Door = field(default_factory=Door)
    listen_fd: int | None = None  # a socket that has host and port; None: the gateway opens one
    insecure: bool = False
    log_format: LogFormat = "text"

    def services(self) -> list[ChildSpec]:
        """One spec per process, in the order of the log."""
        return [
            self._gateway(),
            *self._tokenizers(),
            *self._engines("decode", self.decode),
            *self._engines("prefill", self.prefill),
            *self._eyes(),
            *self._vads(),
            *self._listeners(),
            *self._voices(),
            *self._speakers(),
            *self._painters(),
            *self._embedders(),
            *self._planners(),
        ]

    def _gateway(self) -> ChildSpec:
        argv = ["--host", self.host, "--port", str(self.port), "--drain-timeout", str(_LONGEST_DRAIN)]
        if self.listen_fd is not None:
            argv += ["--listen-fd", str(self.listen_fd)]
        argv += self.door.arguments()
        if self.insecure:
            argv.append("--insecure")
        spec = self._spec("gateway", "gateway", "motet_gateway", argv, stage=_GATEWAY_STAGE, grace=_GATEWAY_GRACE)
        return replace(spec, drain=_DRAIN, fds=() if self.listen_fd is None else (self.listen_fd,))

    def _tokenizers(self) -> Iterator[ChildSpec]:
        argv = [part for model in self.models for part in ("--model", f"{model.name}={model.path}")]
        for name in _numbered("tokenizer", self.tokenizer):
            yield self._spec(name, "tokenizer", "motet_tokenizer", argv)

    def _engines(self, role: str, count: int) -> Iterator[ChildSpec]:
        """So many of a role for each model. Those of both roles share the cores."""
        names = iter(_numbered(role, count * len(self.models)))
        threads = max(1, compute_cores() // ((self.decode + self.prefill) * len(self.models)))
        for model in self.models:
            argv = ["--role", role, "--model", str(model.path), "--name", model.name]
            if role == "decode" and self.speculate is not None:
                argv += ["--speculate", self.speculate]
            argv += [part for adapter in self.adapters for part in ("--adapters", adapter)]
            for _ in range(count):
                yield self._spec(next(names), role, "motet_llm", argv, threads=threads, model=model.name)

    def _eyes(self) -> Iterator[ChildSpec]:
        seeing = [model for model in self.models if model.sees]
        for name, model in zip(_numbered("vision", len(seeing)), seeing, strict=True):
            argv = ["--model", str(model.path), "--name", model.name]
            yield self._spec(name, "vision", "motet_vision", argv, threads=compute_cores(), model=model.name)

    def _listeners(self) -> Iterator[ChildSpec]:
        if self.asr is not None:
            argv = ["--model", str(self.asr.path), "--name", self.asr.name]
            threads = compute_cores()
            yield self._spec("asr", "asr", "motet_asr", argv, threads=threads, model=self.asr.name)

    def _vads(self) -> Iterator[ChildSpec]:
        argv = [] if self.turns is None else ["--turns", str(self.turns)]
        for name in _numbered("vad", self.vad):
            yield self._spec(name, "vad", "motet_vad", argv)

    def _speakers(self) -> Iterator[ChildSpec]:
        if self.speakers is not None:
            argv = ["--model", str(self.speakers.path), "--name", self.speakers.name]
            yield self._spec("speakers", "speakers", "motet_speakers", argv, model=self.speakers.name)

    def _painters(self) -> Iterator[ChildSpec]:
        if self.draw is not None:
            argv = ["--model", str(self.draw.path), "--name", self.draw.name]
            threads = compute_cores()
            yield self._spec("diffusion", "diffusion", "motet_diffusion", argv, threads=threads, model=self.draw.name)

    def _embedders(self) -> Iterator[ChildSpec]:
        if self.embed is not None:
            argv = ["--model", str(self.embed.path), "--name", self.embed.name]
            threads = compute_cores()
            yield self._spec("embedding", "embedding", "motet_embedding", argv, threads=threads, model=self.embed.name)

    def _planners(self) -> Iterator[ChildSpec]:
        if self.planner is not None:
            url = address.url(address.local_view(self.host), self.port, tls=self.door.tls is not None)
            argv = ["--actuator", "local", "--url", url, "--roles", str(self.planner)]
            yield self._spec("planner", "planner", "motet_planner", argv)

    def _voices(self) -> Iterator[ChildSpec]:
        if self.tts is not None:
            argv = ["--model", str(self.tts.path), "--name", self.tts.name]
            threads = compute_cores()
            yield self._spec("tts", "tts", "motet_tts", argv, threads=threads, model=self.tts.name)

    def _spec(
        self,
        name: str,
        role: str,
        module: str,
        argv: list[str],
        *,
        threads: int = 1,
        stage: int = _SERVICE_STAGE,
        grace: float = _SERVICE_GRACE,
        model: str | None = None,
    ) -> ChildSpec:
        common = ["--nats-url", self.nats_url, "--log-format", self.log_format]
        return ChildSpec(
            name=name,
            role=role,
            argv=(sys.executable, "-m", module, *argv, *common),
            env=self._secrets() | thread_limits(threads) | _QUIET,
            stage=stage,
            grace=grace,
            model=model,
            forks=role in _WITH_TORCH,
        )

    def _secrets(self) -> dict[str, str]:
        return {} if self.nats_password is None else {"MOTET_NATS_PASSWORD": self.nats_password}


def goes_first(spec: ChildSpec, services: int, cores: int = 0) -> bool:
    """Whether one of so many services starts at once, on so many cores (0: those that this process may use)."""
    return spec.role in CHAT_PATH or services <= (cores or len(os.sched_getaffinity(0)))


def compute_cores(cores: int = 0) -> int:
    """How many of this machine's cores compute (0: those this process may use). Beyond four, Python has its own."""
    cores = cores or len(os.sched_getaffinity(0))
    return cores if cores <= 4 else cores - max(2, cores // 8)


def nursery_environment() -> dict[str, str]:
    """What the libraries of services read when they are loaded, which a nursery does for them."""
    return thread_limits(compute_cores()) | _QUIET | {"KINETO_LOG_LEVEL": "99"}  # torch's profiler greets nobody


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that keeps a process to `threads` in its numeric libraries; what the user set himself wins.

    Idle OpenMP threads spin by default for a millisecond or more, which on a shared machine takes the cores from the
    other services; put to sleep at once, they cost a decode step a third to wake again for each of its kernels. Some
    ten microseconds bridge the gap from one kernel to the next.
    """
    limits = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "3000",
        "KMP_BLOCKTIME": "0",
    }
    return {name: value for name, value in limits.items() if name not in os.environ}


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]
