"""Define the processes of `motet up`: their arguments, environment and numbers of threads."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from motet_cli.checkpoints.model_folders import ModelFolder
from motet_cli.engines.options import EngineOptions
from motet_cli.placement.devices import CPU, Devices
from motet_cli.placement.gpus import GpuListing
from motet_cli.placement.jobs import job_of, placed
from motet_cli.placement.placement import ENGINES, Job, Placement, place
from motet_cli.stack_file.models import DeclaredModel
from motet_cli.supervision import address
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import PeerNetwork
from motet_cli.supervision.logs import LogFormat
from motet_cli.supervision.memory import MemoryDivision
from motet_models.omni import talker_name
from motet_shared.errors import ConfigError

# Stop order: the gateway first, with its requests, then the services, then NATS.
_GATEWAY_STAGE, _SERVICE_STAGE = 0, 1
# Roles that chat needs. With fewer cores than processes, the others start later.
CHAT_PATH = frozenset({"gateway", "tokenizer", "decode", "prefill"})
# These import torch, which takes seconds unless they are forked from the nursery.
_WITH_TORCH = frozenset(
    {"decode", "prefill", "encoder", "asr", "tts", "diffusion", "embedding", "ranking"}
)
DESCRIPTOR_STORE = "fdstore"  # role
# Never replaced: all messages pass through NATS, connections depend on the descriptor store, and the
# listening socket on the watchdog.
FIXED = ("nats", DESCRIPTOR_STORE, "watchdog")
MODULES = {  # else motet_ROLE
    "decode": "motet_llm",
    "prefill": "motet_llm",
    "ranking": "motet_embedding",
}
_VAD_MODEL, _VAD_PACKAGE = "silero-vad", "silero_vad"  # optional: `pip install motet[vad]`
_NO_PROGRESS_BARS = {
    "PYTHONUNBUFFERED": "1",
    "TQDM_DISABLE": "1",
}  # no progress bars of libraries in the log
_DRAIN = 10.0  # seconds that replies in flight have to end
GATEWAY_DRAIN = 600.0  # seconds that replies of a gateway which is replaced have to end
_MAX_DRAIN = 3600  # seconds; the order that replaces a gateway sets the actual limit
_GATEWAY_GRACE, _SERVICE_GRACE = 5.0, 8.0


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Hold the gateway's access options: keys, tenants, origins, hosts, proxies, TLS."""

    api_key_file: Path | None = None
    tenants_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    tls: tuple[Path, Path] | None = None  # certificate and key

    @property
    def has_keys(self) -> bool:
        return self.api_key_file is not None or self.tenants_file is not None

    def arguments(self) -> list[str]:
        """Return the gateway's command line arguments."""
        cert, key = self.tls or (None, None)
        files = {
            "api-key-file": self.api_key_file,
            "tenants-file": self.tenants_file,
            "tls-cert": cert,
            "tls-key": key,
        }
        argv = [
            part
            for name, path in files.items()
            if path is not None
            for part in (f"--{name}", str(path))
        ]
        lists = {
            "allowed-origins": self.allowed_origins,
            "allowed-hosts": self.allowed_hosts,
            "trusted-proxies": self.trusted_proxies,
        }
        return argv + [
            part for name, given in lists.items() for one in given for part in (f"--{name}", one)
        ]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Hold the checked options of `motet up`.

    credentials: folder of passwords; None: processes read the environment.
    engine: the engine of `models`; None: Motet's own.
    decode, prefill: instances per model.
    speculate: decode's --speculate; None: its environment or default.
    parallel: degrees of the group that computes each model, by their flags; empty: one process.
    adapters: LoRA adapters, NAME=FOLDER each.
    adapter_folder: watched by decode workers for adapters; None: adapters are fixed.
    turns: folder of the model that predicts the end of a turn; None: not used.
    asr, tts, speakers, draw, embed, rank: models; None: not served.
    memory: division of the memory among language models; None: each engine measures it.
    placement: GPUs of the processes; None: all compute on the CPU.
    declared: models of motet.toml, loaded at start or on demand.
    role_flags: flags of all processes of a role, of motet.toml.
    on_demand_memory: bytes for models that are loaded on demand.
    max_loaded: most of them at a time; 0: as many as fit.
    prepared: most of the others whose processes wait, prepared.
    planner: TOML file of the roles to scale; None: no planner.
    listen_fd: socket bound to host and port; None: the gateway opens one.
    descriptor_store: Unix socket of the process that accepts connections and keeps them if the
        gateway dies; None: the gateway accepts them itself. Needs `listen_fd`.
    network: how other hosts reach the processes, under TLS; None: only this host does.
    """

    models: tuple[ModelFolder, ...]
    nats_url: str
    credentials: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    engine: EngineOptions | None = None
    decode: int = 1
    prefill: int = 0
    speculate: str | None = None
    parallel: Mapping[str, int] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    adapter_folder: Path | None = None
    memory: MemoryDivision | None = None
    placement: Placement | None = None
    chat_templates: tuple[str, ...] = ()  # NAME=FILE each
    generation_config: str | None = None  # the tokenizers'; None: as the environment says
    tokenizer: int = 1
    vad: int = 1
    asr: ModelFolder | None = None
    turns: Path | None = None
    tts: ModelFolder | None = None
    speakers: ModelFolder | None = None
    draw: ModelFolder | None = None
    embed: ModelFolder | None = None
    rank: ModelFolder | None = None
    declared: tuple[DeclaredModel, ...] = ()
    role_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    on_demand_memory: int = 0
    max_loaded: int = 0
    prepared: int = 0
    planner: Path | None = None
    access: AccessOptions = field(default_factory=AccessOptions)
    listen_fd: int | None = None
    descriptor_store: Path | None = None
    insecure: bool = False
    log_format: LogFormat = "text"
    site: str | None = None
    network: PeerNetwork | None = None

    def services(self) -> list[ChildSpec]:
        """Return one spec per process, in the order in which they are listed."""
        return [placed(spec, self.placement, os.environ) for spec in self._services()]

    def _services(self) -> list[ChildSpec]:
        return [
            *self._descriptor_store(),
            self._gateway(),
            *self._tokenizers(),
            *self._language_models(),
            *self._encoder(),
            *self._omni(),
            *self._vads(),
            *self._asr(),
            *self._tts(),
            *self._speakers(),
            *self._diffusion(),
            *self._embedding(),
            *self._ranking(),
            *(spec for model in self.at_start for spec in self._declared(model)),
            *self._planners(),
        ]

    @property
    def at_start(self) -> list[DeclaredModel]:
        """Return the models of motet.toml that are loaded at start."""
        return [model for model in self.declared if not model.on_demand]

    def on_demand(self) -> list[tuple[DeclaredModel, tuple[ChildSpec, ...]]]:
        """Return the models that are loaded on demand, with their processes."""
        return [
            (
                model,
                tuple(placed(spec, self.placement, os.environ) for spec in self._declared(model)),
            )
            for model in self.declared
            if model.on_demand
        ]

    def _declared(self, model: DeclaredModel) -> Iterator[ChildSpec]:
        """Yield the processes of a model of motet.toml; those loaded on demand end slowly."""
        name, folder = model.name, model.folder
        argv = ["--model", str(folder.path), "--name", name]
        own = [*(["--drain-timeout", "3600"] if model.on_demand else []), *model.settings]
        if model.role == "decode":
            yield from self._targets(model, argv, own)
            if folder.has_encoder and model.own_instances:
                yield self._spec(
                    f"encoder:{name}",
                    "encoder",
                    "motet_encoder",
                    [*argv, *(own[:2] if model.on_demand else [])],
                    threads=compute_cores(),
                    model=name,
                )
            return
        threads = max(1, compute_cores() // model.instances)
        for label in _numbered(f"{model.role}:{name}", model.instances):
            module = MODULES.get(model.role, f"motet_{model.role}")
            extra = ["--role", model.role] if model.role == "ranking" else []
            every = [*argv, *extra, *own]
            yield self._spec(label, model.role, module, every, threads=threads, model=name)

    def _targets(
        self, model: DeclaredModel, argv: list[str], own: list[str]
    ) -> Iterator[ChildSpec]:
        """Yield the decode processes of all targets of a language model."""
        placed = sum(one.instances for one in model.targets if not one.engine or one.engine.python)
        threads = max(1, compute_cores() // max(1, placed))
        for target in model.targets:
            label = f"decode:{model.name}" + (f"@{target.name}" if target.name else "")
            for name in _numbered(label, target.instances):
                every = [*argv, *target.arguments()]
                if target.engine is None:
                    every += [*self._decode_arguments(name, model), *own]
                every += target.settings
                if target.engine is not None:
                    yield self._host(name, model.name, target.engine, every, threads)
                    continue
                yield self._spec(
                    name, "decode", "motet_llm", every, threads=threads, model=model.name
                )

    def _decode_arguments(self, name: str, model: DeclaredModel) -> list[str]:
        if model.on_demand or model.is_bounded:
            memory = ["--memory", str(model.memory)]
        else:
            memory = self._main_memory(name, model.folder.path)
        return ["--role", "decode", *memory, *self._adapter_folder()]

    def _descriptor_store(self) -> Iterator[ChildSpec]:
        if self.descriptor_store is None or self.listen_fd is None:
            return
        argv = ["--path", str(self.descriptor_store), "--listen-fd", str(self.listen_fd)]
        yield ChildSpec(
            name=DESCRIPTOR_STORE,
            role=DESCRIPTOR_STORE,
            argv=(sys.executable, "-m", "motet_fdstore", *argv),
            stage=_SERVICE_STAGE,
            fds=(self.listen_fd,),
        )

    def _gateway(self) -> ChildSpec:
        argv = [
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--drain-timeout",
            str(_MAX_DRAIN),
        ]
        listen_fd = self.listen_fd if self.descriptor_store is None else None
        if self.descriptor_store is not None:
            argv += ["--descriptor-store", str(self.descriptor_store)]
        if listen_fd is not None:
            argv += ["--listen-fd", str(listen_fd)]
        argv += self.access.arguments() + self._adapter_folder()
        argv += [part for pair in self.expected() for part in ("--expect", pair)]
        if self.insecure:
            argv.append("--insecure")
        spec = self._spec(
            "gateway", "gateway", "motet_gateway", argv, stage=_GATEWAY_STAGE, grace=_GATEWAY_GRACE
        )
        return replace(
            spec,
            drain=_DRAIN,
            fds=() if listen_fd is None else (listen_fd,),
            returns=self.descriptor_store is not None,
        )

    def expected(self) -> list[str]:
        """Return the models that the gateway needs to be ready, as ROLE=MODEL, chat models first."""
        others = self._other_models()
        order = ("tts", "asr", "speakers", "embedding", "ranking", "diffusion")  # in this order
        has_vad = self.vad > 0 and find_spec(_VAD_PACKAGE) is not None
        llms = [model for model in self.declared if model.role == "decode"]
        return [
            *(f"decode={model.name}" for model in self.models),
            *(f"{model.role}={model.name}" for model in self.at_start),
            *(f"tokenizer={model.name}" for model in llms if model.on_demand),
            *(f"{role}={others[role].name}" for role in order if role in others),
            *(f"encoder={model.name}" for model in self._with_encoder),
            *([f"vad={_VAD_MODEL}"] if has_vad else []),
        ]

    def with_placement(
        self, devices: Devices, listing: GpuListing, share: float, shares: Mapping[str, float]
    ) -> Stack:
        """Return the stack with its processes on the GPUs of `listing`.

        share: of each GPU's free memory. shares: those of roles. Raises ConfigError.
        """
        jobs = [job for spec in self._services() if (job := job_of(spec)) is not None]
        later = self._on_demand_job(devices)
        found = place([*jobs, *later], devices, listing, share, shares)
        if later and (together := found.of(later[0].name)) is not None:
            places = {
                spec.name: replace(together, job=replace(together.job, name=spec.name))
                for model in self.declared
                if model.on_demand
                for spec in self._declared(model)
            }
            kept = {name: one for name, one in found.places.items() if name != later[0].name}
            found = replace(found, places={**kept, **places})
        return replace(self, placement=found)

    def _on_demand_job(self, devices: Devices) -> list[Job]:
        """Return a job for all models that are loaded on demand; none if they are on the CPU."""
        models = [model for model in self.declared if model.on_demand]
        wanted = {devices.wanted(model.role, model.name) for model in models}
        if wanted <= {CPU}:
            return []
        first = models[0]
        if len(wanted) > 1:
            raise ConfigError(
                f"models.{first.name}.device: models on demand share one memory, so they are all"
                f" on one device, not on {' and '.join(sorted(wanted))}; give each the same",
                param=f"models.{first.name}.device",
            )
        if not self.on_demand_memory:
            raise ConfigError(
                "on_demand.memory: is not given; models on demand on a GPU need a size of its"
                " memory, such as 12GiB",
                param="on_demand.memory",
            )
        bound = self.on_demand_memory
        return [Job(name="on demand", role=first.role, model=first.name, bound=bound)]

    def with_memory(self, share: float, free: int | None = None) -> Stack:
        """Return the stack with `share` of the free main memory divided among its language models.

        free: bytes of it; None: those that are free now. Models that are loaded on demand get what
        they are given, else a half of it; all of it if no language model is loaded at start. What
        computes on GPUs is left out.
        """
        here = [spec for spec in self.services() if not spec.gpus]
        own = {model.name: model.path for model in self.models} if self.engine is None else {}
        own |= {talker_name(model.name): model.path for model in self._speaking}
        engines = [own[str(one.model)] for one in here if one.role in ENGINES and one.model in own]
        bounded = 0
        for model in self.at_start:
            count = sum((one.role, one.model) == (model.role, model.name) for one in here)
            count = min(count, model.own_instances)
            if model.role == "decode" and not model.is_bounded:
                engines += [model.folder.path] * count
            else:
                bounded += model.memory * count
        names = {spec.name for spec in here}
        others = [model.path for role, model in self._other_models().items() if role in names]
        memory = MemoryDivision.measure(share, engines, others, free)
        left = max(0, memory.total - bounded)
        pool, later = self.on_demand_memory, [one for _, found in self.on_demand() for one in found]
        if not pool and later:
            pool = left // 2 if engines else left
        total = max(0, left - (0 if any(spec.gpus for spec in later) else pool))
        return replace(self, memory=replace(memory, total=total), on_demand_memory=pool)

    def _other_models(self) -> dict[str, ModelFolder]:
        """Return the models that are not language models, by the name of their process."""
        found = {
            "asr": self.asr,
            "tts": self.tts,
            "speakers": self.speakers,
            "diffusion": self.draw,
            "embedding": self.embed,
            "ranking": self.rank,
        }
        return {role: model for role, model in found.items() if model is not None}

    def _tokenizers(self) -> Iterator[ChildSpec]:
        argv = [part for model in self.models for part in ("--model", f"{model.name}={model.path}")]
        llms = [model for model in self.declared if model.role == "decode"]
        argv += [part for m in llms for part in ("--model", f"{m.name}={m.folder.path}")]
        own = [f"{m.name}={m.chat_template}" for m in llms if m.chat_template is not None]
        templates = (*self.chat_templates, *own)
        argv += [part for one in templates for part in ("--chat-template", one)]
        if self.generation_config is not None:
            argv += ["--generation-config", self.generation_config]
        for name in _numbered("tokenizer", self.tokenizer):
            yield self._spec(name, "tokenizer", "motet_tokenizer", argv)

    def _language_models(self) -> Iterator[ChildSpec]:
        if self.engine is not None:
            yield from self._hosts(self.engine)
            return
        yield from self._engines("decode", self.decode)
        yield from self._engines("prefill", self.prefill)

    def _engines(self, role: str, count: int) -> Iterator[ChildSpec]:
        """Yield `count` engines of a role for each model. Engines of both roles share the cores."""
        names = iter(_numbered(role, count * len(self.models)))
        engines = (self.decode + self.prefill) * len(self.models)
        threads = max(1, compute_cores() // max(1, engines))
        for model in self.models:
            argv = ["--role", role, "--model", str(model.path), "--name", model.name]
            if role == "decode" and self.speculate is not None:
                argv += ["--speculate", self.speculate]
            argv += [part for flag, n in self.parallel.items() for part in (flag, str(n))]
            argv += [*self._adapters(), *self._adapter_folder()]
            for name in itertools.islice(names, count):
                every = [*argv, *self._main_memory(name, model.path)]
                yield self._spec(name, role, "motet_llm", every, threads=threads, model=model.name)

    def _main_memory(self, name: str, model: Path) -> list[str]:
        """Return the arguments that bound the main memory of an engine; none for one on a GPU."""
        if self.memory is None or (self.placement is not None and self.placement.of(name)):
            return []
        return self.memory.arguments(model)

    def _hosts(self, engine: EngineOptions) -> Iterator[ChildSpec]:
        """Yield `decode` processes for each model, in front of another engine's server."""
        count = self.decode * len(self.models)
        names = iter(_numbered("decode", count))
        for model in self.models:
            argv = ["--model", str(model.path), "--name", model.name, *engine.arguments()]
            argv += self._adapters()
            for _ in range(self.decode):
                yield self._host(next(names), model.name, engine, argv, compute_cores() // count)

    def _host(
        self, name: str, model: str, engine: EngineOptions, argv: list[str], threads: int
    ) -> ChildSpec:
        """Return a process in front of another engine, in that engine's environment if need be."""
        threads = max(1, threads) if engine.python else 1
        spec = self._spec(name, "decode", "motet_engines", argv, threads=threads, model=model)
        command = engine.command()
        return replace(
            spec,
            argv=(*command, *spec.argv[3:]) if command else spec.argv,
            env={**spec.env, **engine.variables()},
            forks=False,
        )

    def _adapters(self) -> list[str]:
        return [part for adapter in self.adapters for part in ("--adapters", adapter)]

    def _adapter_folder(self) -> list[str]:
        folder = self.adapter_folder
        return [] if folder is None else ["--adapter-folder", str(folder)]

    def _encoder(self) -> Iterator[ChildSpec]:
        with_encoder = self._with_encoder
        for name, model in zip(_numbered("encoder", len(with_encoder)), with_encoder, strict=True):
            argv = ["--model", str(model.path), "--name", model.name]
            yield self._spec(
                name, "encoder", "motet_encoder", argv, threads=compute_cores(), model=model.name
            )

    def _omni(self) -> Iterator[ChildSpec]:
        """Yield talker and code2wav of each omni model; its thinker is a language model."""
        speaking = self._speaking
        numbered = [_numbered(name, len(speaking)) for name in ("talker", "code2wav")]
        threads = max(1, compute_cores() // 2)
        for model, talker, code2wav in zip(speaking, *numbered, strict=True):
            argv = ["--model", str(model.path), "--name", name := talker_name(model.name)]
            every = ["--role", "decode", "--stage", "talker", *argv]
            every += self._main_memory(talker, model.path)
            yield self._spec(talker, "decode", "motet_llm", every, threads=threads, model=name)
            argv = ["--model", str(model.path), "--name", model.name]
            argv += ["--language-model", name]
            yield self._spec(code2wav, "tts", "motet_tts", argv, threads=threads, model=model.name)

    @property
    def _speaking(self) -> list[ModelFolder]:
        """Return the omni models that run here in stages."""
        own = self.models if self.engine is None else ()
        return [model for model in own if model.speaks]

    @property
    def _with_encoder(self) -> list[ModelFolder]:
        """Return the models that get an encoder process; other engines are sent no embeddings."""
        own = self.models if self.engine is None else ()
        return [model for model in own if model.has_encoder]

    def _asr(self) -> Iterator[ChildSpec]:
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
            yield self._spec(
                "speakers", "speakers", "motet_speakers", argv, model=self.speakers.name
            )

    def _diffusion(self) -> Iterator[ChildSpec]:
        if self.draw is not None:
            argv = ["--model", str(self.draw.path), "--name", self.draw.name]
            threads = compute_cores()
            yield self._spec(
                "diffusion",
                "diffusion",
                "motet_diffusion",
                argv,
                threads=threads,
                model=self.draw.name,
            )

    def _embedding(self) -> Iterator[ChildSpec]:
        if self.embed is not None:
            argv = ["--model", str(self.embed.path), "--name", self.embed.name]
            threads = compute_cores()
            yield self._spec(
                "embedding",
                "embedding",
                "motet_embedding",
                argv,
                threads=threads,
                model=self.embed.name,
            )

    def _ranking(self) -> Iterator[ChildSpec]:
        if self.rank is not None:
            argv = ["--role", "ranking", "--model", str(self.rank.path), "--name", self.rank.name]
            threads = compute_cores()
            yield self._spec(
                "ranking",
                "ranking",
                MODULES["ranking"],
                argv,
                threads=threads,
                model=self.rank.name,
            )

    def _planners(self) -> Iterator[ChildSpec]:
        if self.planner is not None:
            url = address.url(
                address.local_view(self.host), self.port, tls=self.access.tls is not None
            )
            argv = ["--actuator", "local", "--url", url, "--roles", str(self.planner)]
            yield self._spec("planner", "planner", "motet_planner", argv)

    def _tts(self) -> Iterator[ChildSpec]:
        if self.tts is not None:
            argv = ["--model", str(self.tts.path), "--name", self.tts.name]
            own = [model.name for model in self.models if model.path == self.tts.path]
            if own:  # decode generates what it speaks
                argv += ["--language-model", own[0]]
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
        if self.site is not None:
            common += ["--site", self.site]
        return ChildSpec(
            name=name,
            role=role,
            argv=(sys.executable, "-m", module, *self.role_flags.get(role, ()), *argv, *common),
            env=self._secrets(role) | self._peers() | thread_limits(threads) | _NO_PROGRESS_BARS,
            stage=stage,
            grace=grace,
            model=model,
            forks=role in _WITH_TORCH,
        )

    def _peers(self) -> dict[str, str]:
        return {} if self.network is None else self.network.variables()

    def _secrets(self, role: str) -> dict[str, str]:
        """Return the environment that names the folder of this role's password.

        Clears a password of the environment, which would take precedence.
        """
        if self.credentials is None:
            return {}
        others = {"MOTET_NATS_PASSWORD": "", "MOTET_NATS_PASSWORD_FILE": ""}
        return {"MOTET_NATS_CREDENTIALS": str(self.credentials / role), **others}


def starts_at_once(spec: ChildSpec, services: int, cores: int = 0) -> bool:
    """Return True if a process starts at once rather than after chat is ready.

    services: number of processes to start.
    cores: cores of the machine; 0: those that this process may use.
    """
    return spec.role in CHAT_PATH or services <= (cores or len(os.sched_getaffinity(0)))


def compute_cores(cores: int = 0) -> int:
    """Return the number of cores for numeric threads; beyond four, some are left to Python.

    cores: cores of the machine; 0: those that this process may use.
    """
    cores = cores or len(os.sched_getaffinity(0))
    return cores if cores <= 4 else cores - max(2, cores // 8)


def nursery_environment() -> dict[str, str]:
    """Return the variables of a nursery, which the services' libraries read on import."""
    # KINETO_LOG_LEVEL disables the log of torch's profiler.
    return thread_limits(compute_cores()) | _NO_PROGRESS_BARS | {"KINETO_LOG_LEVEL": "99"}


def thread_limits(threads: int) -> dict[str, str]:
    """Return variables that limit numeric libraries to `threads`, except those the user has set.

    Idle OpenMP threads spin by default for a millisecond or more, which takes cores from other
    services. If they sleep at once, waking them for each kernel costs a decode step a third of its
    time. Spinning for about ten microseconds bridges the gap between two kernels.
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
