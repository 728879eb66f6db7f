"""Define the tables of motet.toml: [settings], [on_demand], [roles.NAME] and [models.NAME].

Each table is a struct; `read.py` converts into them and explains what does not fit. A setting that
`motet up` has a flag for belongs into `UpSettings`; what one model needs, into `ModelTable`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from motet_shared.wire import sites

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Setting = str | int | float | bool | list[str]
Role = Literal["llm", "asr", "tts", "embed", "rank", "draw", "speakers"]
Engine = Literal["motet", "vllm", "llama.cpp", "openai"]
Load = Literal["at start", "on demand"]
FOREVER = "forever"  # a `keep_alive` without an end


class Table(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, frozen=True):
    """Reject unknown fields; base of every table."""


class UpSettings(Table, frozen=True):
    """[settings]: flags of `motet up` without dashes, as underscores; the command line overrides."""

    host: str | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    adapter_folder: str | None = None
    engine: Engine | None = None
    engine_url: str | None = None
    engine_python: str | None = None
    engine_args: str | None = None
    engine_key_file: str | None = None
    engine_model: str | None = None
    decode: Positive | None = None
    prefill: Natural | None = None
    speculate: str | None = None
    tensor_parallel: Positive | None = None
    pipeline_parallel: Positive | None = None
    expert_parallel: Positive | None = None
    generation_config: str | None = None
    device: str | list[str] | None = None
    memory_share: Share | None = None
    tokenizer: Positive | None = None
    vad: Natural | None = None
    asr: str | None = None
    tts: str | None = None
    speakers: str | None = None
    draw: str | None = None
    film: str | None = None
    embed: str | None = None
    rank: str | None = None
    planner: str | None = None
    nursery: bool | None = None
    listen: str | None = None
    nats: str | None = None
    store: str | None = None
    no_store: bool | None = None
    keep_connections: bool | None = None
    survive: bool | None = None
    orphan_timeout: Annotated[float, Meta(ge=0)] | None = None
    api_key_file: str | None = None
    tenants_file: str | None = None
    allowed_origins: list[str] | None = None
    allowed_hosts: list[str] | None = None
    trusted_proxies: list[str] | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    insecure: bool | None = None
    log_format: Literal["text", "json"] | None = None
    site: Annotated[str, Meta(pattern=sites.PATTERN)] | None = None
    state_file: str | None = None


class OnDemandTable(Table, frozen=True):
    """[on_demand]: what all models share that are loaded on demand.

    memory: bytes for those that are loaded; by default what models loaded at start leave of
        `memory_share`.
    max_loaded: most models at a time; 0: as many as fit.
    prepared: most models that are not loaded whose processes are started in advance, and wait.
    keep_alive: time without requests after which a model is unloaded.
    """

    memory: str | int = 0
    max_loaded: Natural = 0
    prepared: Natural = 8
    keep_alive: str | float = "5m"


class RoleTable(Table, frozen=True):
    """[roles.NAME]: settings of all processes of a role, as their flags (`--help` lists them).

    device: where they compute, as --device. memory_share: share of each GPU's memory that those of
    the role have together on it.
    """

    device: str | None = None
    memory_share: Share | None = None
    settings: dict[str, Setting] = {}


class EngineTable(Table, frozen=True):
    """Where an engine other than Motet's own is: at a URL, or in a Python environment."""

    engine: Engine = "motet"
    engine_url: str = ""
    engine_key_file: str = ""
    engine_model: str = ""
    engine_python: str = ""
    engine_args: str = ""


class TargetTable(EngineTable, frozen=True):
    """[[models.NAME.targets]]: an engine that serves the model, tried in the order of the file.

    name: shown in the header `motet-served-by`; by default the engine.
    instances: decode processes.
    keep_warm: time without requests after which a reply of one token is requested.
    settings: of its processes, as their flags.
    """

    name: str = ""
    instances: Positive = 1
    keep_warm: str | float = 0
    settings: dict[str, Setting] = {}


class ModelTable(EngineTable, frozen=True):
    """[models.NAME]: one model, served under the name of its table.

    source: a folder, a local model, org/name on a hub or a GGUF file; by default NAME.
    role: what it serves.
    load: at start, or when a request needs it.
    keep_alive: as in [on_demand], of this model; "forever": others may still need its memory.
    memory: bytes that it may use; by default of the size of its weights.
    instances: decode processes of a language model.
    device: where it computes, as --device.
    engine: the program that computes a language model.
    targets: several engines of a language model, of which the first that can serves a request.
    settings: of its processes, as their flags; they override those of its role.
    """

    source: str = ""
    role: Role = "llm"
    load: Load = "at start"
    keep_alive: str | float | None = None
    memory: str | int = 0
    instances: Positive = 1
    chat_template: str | None = None
    device: str | None = None
    targets: list[TargetTable] = []
    settings: dict[str, Setting] = {}


class StackFile(Table, frozen=True):
    """Define the tables of motet.toml."""

    settings: UpSettings = UpSettings()
    on_demand: OnDemandTable = OnDemandTable()
    roles: dict[str, RoleTable] = {}
    models: dict[str, ModelTable] = {}
