"""Run NATS and every service as supervised processes on this machine: `motet up`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
import traceback
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from motet_cli.checkpoints import model_folders as models
from motet_cli.engines.degrees import parse_degrees
from motet_cli.engines.options import parse_engine
from motet_cli.joining.first_host import FirstHost, prepare_folder
from motet_cli.joining.listen import Listen, parse_listen
from motet_cli.joining.messages import StackOffer
from motet_cli.joining.offer import stack_offer
from motet_cli.joining.token import Invitations
from motet_cli.placement.gpus import GpuListing, list_gpus
from motet_cli.placement.jobs import job_of
from motet_cli.placement.options import PlacementOptions, placement_options
from motet_cli.stack_file.arguments import stack_file_of
from motet_cli.stack_file.models import DeclaredModel, declared_models, film_model, role_flags
from motet_cli.stack_file.presets import show_presets
from motet_cli.stack_file.read import bytes_of
from motet_cli.stack_file.schema import StackFile
from motet_cli.supervision import address, nats, orders, torchaudio_fix
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import (
    NatsAccess,
    PeerNetwork,
    folder,
    given_credentials,
    private,
    private_folder,
    published,
    with_environment,
)
from motet_cli.supervision.logs import Log
from motet_cli.supervision.nursery import NotForked, Nursery
from motet_cli.supervision.readiness import Health, wait_for_port, wait_until_ready
from motet_cli.supervision.stack import (
    GATEWAY_DRAIN,
    AccessOptions,
    Stack,
    nursery_environment,
    starts_at_once,
)
from motet_cli.supervision.state_file import StateFile
from motet_cli.supervision.supervisor import EXIT_CONFIG, Slot, Supervisor
from motet_cli.survival import reload, systemd, watchdog
from motet_cli.survival.output import spawn
from motet_cli.survival.record import Base, Measured, StackRecord
from motet_cli.survival.session import Adopted, Survival, surviving
from motet_kernels.runtime import native
from motet_kernels.runtime.errors import KernelError
from motet_planner.config import DEFAULT_ROLES
from motet_planner.groups import check_local, read_groups
from motet_shared.credentials import make_passwords
from motet_shared.errors import ConfigError, MotetError
from motet_shared.process.starts import now, process_began
from motet_shared.process.vitals import count_gpus

if TYPE_CHECKING:
    from motet_cli.on_demand.loader import Loader
    from motet_cli.supervision.rolling import Rolling

EXIT_CRASH = 70  # EX_SOFTWARE
_NATS_START = 10.0  # seconds between warnings that NATS does not listen
_NATS_PAUSE = 1.0  # seconds from a failed try to connect to NATS to the next
_CHAT_FIRST = 30.0  # seconds after which other services no longer wait for chat
_PROGRESS_INTERVAL = 10.0  # seconds between progress lines without a terminal


@dataclass(frozen=True)
class UpOptions:
    """Hold the checked command line of `motet up`.

    nats_port: port of the NATS server to start; None: the user's own server is used.
    store: folder in which NATS stores responses, jobs and images; None: nothing is stored.
    nursery: fork services from one process that has imported their libraries.
    keep_connections: a process of its own keeps clients' connections if the gateway dies.
    listen: where other hosts join the stack, and `offer`: what they may run; None: none may.
    """

    stack: Stack
    nats_port: int | None
    state_file: Path | None
    store: Path | None = None
    nursery: bool = True
    keep_connections: bool = False
    listen: Listen | None = None
    offer: StackOffer | None = None

    @property
    def base(self) -> Base:
        """Return what cannot change while services go on without a supervisor."""
        return Base(
            host=self.stack.host,
            port=self.stack.port,
            nats=self.stack.nats_url if self.nats_port is None else None,
            store=None if self.store is None else str(self.store),
        )


def parse_options(args: Namespace, left: StackRecord | None = None) -> UpOptions:
    """Check the command line before any process is started. Raises ConfigError.

    left: processes of an earlier run to take over: with their ports, and with the memory that was
    free before they began.
    """
    access = _access_options(args)
    _check_exposure(
        args.host, access.has_keys or bool(os.environ.get("MOTET_API_KEY")), args.insecure
    )
    if args.store and args.no_store:
        raise ConfigError("--no-store: contradicts --store; give one of them", param="--no-store")
    if args.store and args.nats:
        raise ConfigError(
            "--store: excludes --nats; start that server with --jetstream instead",
            param="--store",
        )
    listen = _listen(args)
    nats_port = None if args.nats else _nats_port(left) if listen is None else listen.nats_port
    nats_url = args.nats or f"nats://127.0.0.1:{nats_port}"
    stack = replace(
        stack_of(args, measured=None if left is None else left.measured),
        nats_url=nats_url if listen is None else listen.nats_url,
        credentials=given_credentials() if args.nats else None,
        port=address.free_port(args.host, args.port) if left is None else args.port,
        access=access,
    )
    if nats_port is not None:
        nats.find_server(), nats.find_configs()
    state_file = Path(args.state_file) if args.state_file else None
    if args.keep_connections and access.tls is not None:
        raise ConfigError(
            "--keep-connections: excludes --tls-cert, whose keys die with the gateway;"
            " terminate TLS in a proxy",
            param="--keep-connections",
        )
    return UpOptions(
        stack,
        nats_port,
        state_file,
        _store(args, stack.port),
        nursery=args.nursery,
        keep_connections=args.keep_connections,
        listen=listen,
        offer=None if listen is None else stack_offer(args, stack),
    )


def _listen(args: Namespace) -> Listen | None:
    """Return where other hosts join; None if they may not. Raises ConfigError."""
    if args.listen is None:
        return None
    for given, flag in ((args.nats, "--nats"), (args.survive, "--survive")):
        if given:
            raise ConfigError(
                f"--listen: excludes {flag}; other hosts join the NATS server of this `motet up`",
                param="--listen",
            )
    return parse_listen(args.listen)


def _nats_port(left: StackRecord | None) -> int:
    """Return the port of the NATS server that an earlier run has left, else a free one."""
    if left is not None and left.base.nats is None:
        return urlsplit(left.nats_url).port or 0
    return address.free_port("127.0.0.1")


def stack_of(
    args: Namespace, listing: GpuListing | None = None, measured: Measured | None = None
) -> Stack:
    """Return the stack of a command line, without addresses and keys. Raises ConfigError.

    listing: GPUs to place it on; None: those of this machine. measured: free memory, in place of what
    is free now. `motet plan --stack` calls it too: what is planned is what would be started.
    """
    _check_counts(args)
    file = stack_file_of(args)
    own = declared_models(file)
    declared = (*own, *film_model(file, args.film))
    has_llm = any(model.role == "decode" for model in declared)
    llms = models.resolve_all(args.llm) if args.llm or not has_llm else []
    _check_names(llms, declared)
    stack = Stack(
        models=tuple(llms),
        nats_url="",
        host=args.host,
        engine=parse_engine(args),
        decode=args.decode,
        prefill=args.prefill,
        speculate=_speculation(args.speculate),
        parallel=parse_degrees(args),
        adapters=tuple(models.resolve_adapters(args.adapter, len(args.llm))),
        adapter_folder=models.resolve_adapter_folder(args.adapter_folder),
        chat_templates=tuple(models.resolve_templates(args.chat_template, llms)),
        generation_config=_generation_config(args.generation_config),
        tokenizer=args.tokenizer,
        vad=args.vad,
        asr=models.resolve_optional(args.asr, "--asr", models.DEFAULT_ASR),
        turns=models.find_checkpoint("pocket-turns"),
        tts=models.resolve_optional(args.tts, "--tts", models.DEFAULT_TTS),
        speakers=models.resolve_optional(args.speakers, "--speakers", models.DEFAULT_SPEAKERS),
        draw=models.resolve_drawing(args.draw),
        embed=models.resolve_optional(args.embed, "--embed", models.DEFAULT_EMBEDDING),
        rank=models.resolve_optional(args.rank, "--rank", ""),
        declared=declared,
        role_flags=role_flags(file.roles),
        on_demand_memory=_on_demand_memory(file, own, declared),
        max_loaded=file.on_demand.max_loaded,
        # No process waits for the video model alone.
        prepared=file.on_demand.prepared if any(model.on_demand for model in own) else 0,
        planner=_planner_roles(args, len(llms) + len(own)),
        insecure=args.insecure,
        log_format=args.log_format,
        site=args.site,
    )
    return _on_devices(stack, placement_options(args, file, declared), listing, measured)


def _on_demand_memory(
    file: StackFile, own: Sequence[DeclaredModel], declared: Sequence[DeclaredModel]
) -> int:
    """Return the bytes for models that are loaded on demand; 0: a share of what is free.

    The model of --film alone gets no more than it needs, since language models get the rest.
    """
    given = bytes_of("on_demand.memory", file.on_demand.memory)
    if given or any(model.on_demand for model in own):
        return given
    return sum(model.memory for model in declared if model.on_demand)


def _on_devices(
    stack: Stack,
    options: PlacementOptions,
    listing: GpuListing | None,
    measured: Measured | None,
) -> Stack:
    """Return a stack with its processes on devices, and their memory divided.

    nvidia-smi is asked only if something may compute on a GPU.
    """
    if measured is not None:
        listing = measured.gpus
    others = [spec for spec in stack.services() if (job := job_of(spec)) and job.is_foreign]
    if options.devices.any_gpu or others:
        listing = list_gpus() if listing is None else listing
        stack = stack.with_placement(options.devices, listing, options.share, options.shares)
    return stack.with_memory(options.share, None if measured is None else measured.memory)


def _check_counts(args: Namespace) -> None:
    for name, least in (("decode", 1), ("prefill", 0), ("tokenizer", 1), ("vad", 0)):
        if getattr(args, name) < least:
            raise ConfigError(
                f"--{name}: {getattr(args, name)} is too few; give at least {least}",
                param=f"--{name}",
            )


def _store(args: Namespace, port: int) -> Path | None:
    """Return the folder in which the stack on an HTTP port stores; None: it stores nothing.

    A port that is chosen anew for each start has no folder to come back to.
    """
    if args.store:
        return Path(args.store).expanduser().resolve()
    return None if args.nats or args.no_store or not args.port else nats.default_store(port)


def _speculation(how: str | None) -> str | None:
    """Return decode's --speculate, with the absolute path of a draft model."""
    if how in (None, "off", "ngram"):
        return how
    _, path = models.locate(how, "--speculate")
    return str(path)


def _generation_config(given: str | None) -> str | None:
    """Return the tokenizers' --generation-config, with the absolute path of a file."""
    if given in (None, "auto", "none"):
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--generation-config: {given!r} is no file; give auto, none, or a generation_config.json",
            param="--generation-config",
        )
    return str(path.resolve())


def _check_names(llms: list[models.ModelFolder], declared: tuple[DeclaredModel, ...]) -> None:
    for model in declared:
        if any(model.name == other.name for other in llms):
            raise ConfigError(
                f"--llm: {model.name!r} is the name of a model of motet.toml; give NAME=MODEL",
                param="--llm",
            )


def _planner_roles(args: Namespace, num_models: int) -> Path | None:
    """Return the file of --planner or the planner's default; None without --planner.

    Raises ConfigError if the planner cannot scale this stack.
    """
    if args.planner is None:
        return None
    if num_models > 1:
        raise ConfigError(
            "--planner: scales one model, but several are served; give one --llm",
            param="--planner",
        )
    path = Path(args.planner).expanduser().resolve() if args.planner else DEFAULT_ROLES
    check_local(read_groups(path))
    return path


def _access_options(args: Namespace) -> AccessOptions:
    """Return the gateway's access options from flags, or else from the environment."""

    def file(name: str, remedy: str) -> Path | None:
        given = getattr(args, name) or os.environ.get(f"MOTET_{name.upper()}")
        if given and not Path(given).expanduser().is_file():
            raise ConfigError(
                f"--{name.replace('_', '-')}: {given!r} is not a file; {remedy}",
                param=f"--{name.replace('_', '-')}",
            )
        return Path(given).expanduser().resolve() if given else None

    cert, key = file("tls_cert", "give a PEM file"), file("tls_key", "give a PEM file")
    if (cert is None) != (key is None):
        missing = "--tls-cert" if cert is None else "--tls-key"
        raise ConfigError(f"{missing}: is not given; give both or neither", param=missing)
    return AccessOptions(
        api_key_file=file("api_key_file", "write the key into one"),
        tenants_file=file("tenants_file", "create one with `motet keys new TENANT`"),
        allowed_origins=tuple(args.allowed_origins),
        allowed_hosts=tuple(args.allowed_hosts),
        trusted_proxies=tuple(args.trusted_proxies),
        tls=None if cert is None or key is None else (cert, key),
    )


def _check_exposure(host: str, has_key: bool, insecure: bool) -> None:
    if not (address.is_loopback(host) or has_key or insecure):
        raise ConfigError(
            f"--host: {host!r} can be reached from other machines; give --api-key-file PATH (or"
            " MOTET_API_KEY_FILE) or --tenants-file PATH (or MOTET_TENANTS_FILE), or --insecure",
            param="--host",
        )


def run(args: Namespace) -> int:
    """Run until Ctrl-C or SIGTERM, or until no language model can be served.

    Exit code: 0 all processes ended, 1 some were killed, 78 the settings of all models are wrong.
    `--preset` without a name lists the presets instead.
    """
    if args.preset == "":
        show_presets()
        return 0
    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR")
    log = Log(sys.stdout, fmt=args.log_format, colour=colour, live=terminal)
    try:
        if not args.survive:
            return _run(parse_options(args), log)
        with surviving(args.port, args.orphan_timeout) as survival:
            return _run(parse_options(args, survival.left), log, survival)
    finally:
        log.close()


def _run(options: UpOptions, log: Log, survival: Survival | None = None) -> int:
    """Run a stack to its end; return the exit code."""
    stack = options.stack
    _prepare(log)
    # All gateways of a run accept from one socket, so that no client is refused during a restart.
    with (
        _listener(options, log, survival) as listener,
        _with_credentials(options, keep=survival is not None and survival.left is not None) as kept,
        published(stack.port, _connection(stack := _reachable(stack, options.listen, kept))),
    ):
        store = folder() / f"{stack.port}.front.sock" if options.keep_connections else None
        stack = replace(stack, listen_fd=listener.fileno(), descriptor_store=store)
        if survival is not None:
            survival.begin(stack, options.base, log)
        return asyncio.run(Up(replace(options, stack=stack), log, listener, survival).run())


def _listener(options: UpOptions, log: Log, survival: Survival | None) -> socket.socket:
    """Return the socket of the stack's address: that of an earlier run, if its processes can go on.

    Otherwise they are ended first. Raises ConfigError.
    """
    if survival is not None and survival.left is not None:
        if (listener := survival.fetch_listener(options.base)) is not None:
            return listener
        log.note("the services of an earlier run cannot go on with this one: ending them")
        asyncio.run(survival.end_left(log))
    return address.bound(options.stack.host, options.stack.port)


def _prepare(log: Log) -> None:
    """Complete an installation by pip, and log that the first start compiles kernels."""
    if note := kernels_note():
        log.note(note)
    site_packages = torchaudio_fix.find_site_packages()
    if site_packages is None:
        return
    try:
        if torchaudio_fix.fix(site_packages):
            log.note("torchaudio: extension files moved to lib.disabled, torch here is CPU-only")
    except OSError as error:
        log.note(
            f"torchaudio cannot be imported beside a CPU-only torch: {error}; run"
            " `python -m motet_cli.supervision.torchaudio_fix` as the owner of that folder",
            "warning",
        )


@contextlib.contextmanager
def _with_credentials(options: UpOptions, *, keep: bool) -> Iterator[Path | None]:
    """Yield the folder of NATS passwords, new ones if this run starts its own server.

    keep: those of an earlier run, whose server goes on. Where other hosts may join, they are kept
    from run to run, so that hosts that have joined find the stack again.
    """
    if options.nats_port is None:
        yield options.stack.credentials
        return
    if options.listen is not None:
        folder = private(nats.default_store(options.stack.port).with_suffix(".hosts"))
        make_passwords(folder)
        nats.stage(folder)
        prepare_folder(folder, options.listen.host)
        yield folder
        return
    with private_folder(f"{options.stack.port}-nats", keep=keep) as folder:
        if not keep:
            make_passwords(folder)
            nats.stage(folder)
        yield folder


def _reachable(stack: Stack, listen: Listen | None, credentials: Path | None) -> Stack:
    """Return the stack with its credentials, and with the address at which other hosts reach it."""
    network = None
    if listen is not None and credentials is not None:
        network = PeerNetwork(listen.host, credentials)
    return replace(stack, credentials=credentials, network=network)


def _connection(stack: Stack) -> NatsAccess:
    """Return what commands and programs of this user need to reach NATS."""
    return NatsAccess(
        stack.nats_url,
        nats_credentials=None if stack.credentials is None else str(stack.credentials),
        peer_folder=None if stack.network is None else str(stack.network.folder),
    )


class Up:
    """Run a stack from the first process to the last."""

    def __init__(
        self,
        options: UpOptions,
        log: Log,
        listener: socket.socket,
        survival: Survival | None = None,
    ) -> None:
        """Configure the run without starting a process.

        survival: what lets services outlive this process; None: they end with it.
        """
        self._options, self._log, self._listener = options, log, listener
        self._survival = survival
        self._nursery = (
            Nursery(
                nursery_environment(),
                log.note,
                log.printed_by("nursery", "nursery"),
                outlived=survival is not None,
            )
            if options.nursery
            else None
        )
        self._supervisor = Supervisor(
            log,
            on_change=self._on_change,
            nursery=self._nursery,
            spawn=None if survival is None else spawn,
        )
        file = options.state_file
        self._state_file = None if file is None else StateFile(file, log.note)
        self._stop = asyncio.Event()
        self._reload = asyncio.Event()
        self._ending = False
        self._loader: Loader | None = None
        self._order = asyncio.Lock()  # held while processes are replaced or scaled
        self._kill = asyncio.Event()
        self._unready = asyncio.Event()
        self._refused = asyncio.Event()
        self._llms: list[Slot] = []  # those that start with the stack, until it is ready
        self._reported = 0.0
        self._first_host: FirstHost | None = None
        self._invitations: Invitations | None = None

    @property
    def url(self) -> str:
        stack = self._options.stack
        return address.url(
            address.local_view(stack.host), stack.port, tls=stack.access.tls is not None
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._survival is not None:
            loop.add_signal_handler(signal.SIGUSR1, self._reload.set)
        waits = (self._start(), self._stop.wait(), self._refused.wait())
        reloaded = asyncio.create_task(self._reloaded())
        tasks = [*(asyncio.create_task(one) for one in waits), reloaded]
        try:
            async with AsyncExitStack() as exits:
                await self._serve_orders(exits)
                await self._admit_hosts(exits)
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raise errors of starting instead of stopping silently
                if reloaded in done and not self._stop.is_set():
                    await self._begin_again()
        except MotetError:
            raise
        except Exception:
            self._leave_behind()
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._log.progress("")
            self._listener.close()  # otherwise clients would wait in a backlog without a server
            clean = await self._end()
            if self._nursery is not None:
                await self._nursery.close()
            if self._survival is not None:
                self._survival.folder.clear()
        if self._refused.is_set():
            return EXIT_CONFIG
        return 0 if clean else 1

    async def _reloaded(self) -> None:
        """Return when this process is to begin anew, with settings that it can begin with."""
        while True:
            await self._reload.wait()
            self._reload.clear()
            problem = await reload.refusal(sys.argv[2:])
            if not problem:
                return
            self._log.note(f"not reloaded: {problem}", "error")

    async def _begin_again(self) -> None:
        """Replace this program by a new one of the same command line, which adopts the services."""
        self._log.note("reloading: services go on")
        if self._nursery is not None:
            await self._nursery.close()
        self._log.close()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    def _leave_behind(self) -> None:
        """End this process at once after an unexpected error, if services can outlive it."""
        if self._survival is not None:
            self._log.note(
                f"the supervisor has failed; services go on for now\n{traceback.format_exc()}",
                "error",
            )
            self._log.close()
            os._exit(EXIT_CRASH)

    async def _serve_orders(self, exits: AsyncExitStack) -> None:
        try:
            await exits.enter_async_context(
                orders.serving_orders(orders.path_of(self._options.stack.port), self._carry_out)
            )
        except ConfigError as error:
            self._log.note(
                f"`motet restart` and `motet scale` cannot reach this run: {error.message}",
                "warning",
            )

    async def _admit_hosts(self, exits: AsyncExitStack) -> None:
        """Let other hosts join, if the stack listens for them."""
        options = self._options
        if options.listen is None or options.offer is None or options.stack.credentials is None:
            return
        self._first_host = FirstHost(
            options.listen, options.stack.credentials, options.offer, self._log.note
        )
        self._invitations = self._first_host.invitations()
        await exits.enter_async_context(self._first_host.serving(self._invitations))
        self._log.note(
            f"other hosts join at {options.listen.text}; `motet invite` prints the command"
        )

    def _invite(self, order: orders.Invite, report: orders.Report) -> None:
        if self._first_host is None or self._invitations is None:
            raise ConfigError(
                "--listen: is not given to this `motet up`; start it with --listen ADDRESS, the"
                " address that other hosts reach it by",
                param="--listen",
            )
        report(self._first_host.invite(self._invitations, order.roles, order.seconds, order.uses))

    async def _carry_out(self, order: orders.Order, report: orders.Report) -> None:
        if isinstance(order, orders.Invite):
            self._invite(order, report)
            return
        if isinstance(order, orders.Leave):
            raise ConfigError("HOST:PORT: is this host's own stack; `motet down` ends it")
        async with self._order:
            await self._rolling().carry_out(order, report)
        if self._loader is not None and isinstance(order, orders.Restart):
            await self._loader.renew()

    def _rolling(self) -> Rolling:
        # Imported here: it imports the bus, which the start does not need.
        from motet_cli.supervision.rolling import Rolling

        stack = self._options.stack
        connection = with_environment(_connection(stack))
        gpus = () if stack.placement is None else [gpu.key for gpu in stack.placement.gpus]
        return Rolling(self._supervisor, connection, self._log.note, gpus)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set() and number == signal.SIGINT:
            self._kill.set()
        if not self._stop.is_set():
            hint = "; press Ctrl-C again to kill them" if number == signal.SIGINT else ""
            self._log.note(f"stopping: waiting for requests in flight{hint}")
        self._stop.set()

    async def _start(self) -> None:
        """Start all processes, then log `ready` each time the stack becomes ready; never return."""
        stack = self._options.stack
        services, on_demand = stack.services(), stack.on_demand()
        loaded_later = [spec for _, specs in on_demand for spec in specs]
        self._log.reserve([spec.name for spec in [*services, *loaded_later]])
        first = [*self._watchdog(), *self._nats()]
        adopted = Adopted(start=[*first, *services])
        if self._survival is not None:
            wanted = [*adopted.start, *self._survival.loaded([specs for _, specs in on_demand])]
            adopted = await self._survival.adopt(self._supervisor, wanted, self._log)
            self._supervisor.changed()
        if adopted.kept or adopted.changed:
            self._log.note(
                f"took over {len(adopted.kept)} processes that serve on;"
                f" {len(adopted.changed)} are to be replaced"
            )
        self._supervisor.start(spec for spec in adopted.start if spec in first)
        await self._wait_for_nats()
        started, later = self._start_services([one for one in adopted.start if one not in first])
        self._llms += [slot for slot in adopted.kept if slot.spec.role == "decode"]
        self._note_serving(stack)
        await asyncio.gather(
            self._report_ready(later),
            self._load_on_demand(on_demand, later),
            self._import_for_returns(later, services),
            self._import_for_orders(later),
            self._complete(adopted, started),
        )

    async def _complete(self, adopted: Adopted, started: list[Slot]) -> None:
        """Replace and end what was adopted and is not to go on."""

        async def update() -> None:
            async with self._order:
                await self._rolling().update(adopted.changed, adopted.ended, started)

        work = [self._await_end(slot) for slot in adopted.leaving]
        if adopted.changed or adopted.ended:
            work.append(self._once_connected(update))
        await asyncio.gather(*work)

    async def _once_connected(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work that begins with a connection to NATS, as soon as a server answers.

        The services go on while it does not, and so must this process.
        """
        # Imported here, as what the work needs.
        from motet_shared.wire.transport import NatsUnreachable

        while True:
            try:
                await work()
            except NatsUnreachable as error:
                self._log.note(f"{error.message}; trying again", "warning")
            else:
                return
            await asyncio.sleep(_NATS_PAUSE)

    async def _await_end(self, slot: Slot) -> None:
        """Wait for a process that is ending; a second signal would cut off its replies."""
        if slot.child is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATEWAY_DRAIN):
                    await slot.child.wait()
        await self._supervisor.remove(slot, 0.0)

    async def _load_on_demand(
        self, models: list[tuple[DeclaredModel, tuple[ChildSpec, ...]]], later: asyncio.Event
    ) -> None:
        """Load and unload models as requests need them; return at once if there are none.

        Their processes are prepared once `later` is set, so that they do not delay chat.
        """
        if not models:
            return
        # Imported here: it imports the bus, which nothing else in this process needs.
        from motet_cli.on_demand.start import loader_of, model_modules

        specs = [spec for _, found in models for spec in found]
        families = sorted(
            {name for model, _ in models for name in model_modules(model.folder.path)}
        )
        importing = asyncio.create_task(self._prepare(specs, families, later), name="import")
        stack = self._options.stack
        self._loader = loader = loader_of(stack, models, self._supervisor, self._log.note)
        try:
            connection = with_environment(_connection(stack))
            await self._once_connected(lambda: loader.run(connection))
        finally:
            importing.cancel()

    async def _prepare(
        self, specs: list[ChildSpec], families: list[str], later: asyncio.Event
    ) -> None:
        """Prepare for models on demand, so that the first request does not wait for imports.

        families: modules with the code of models.
        """
        await later.wait()
        await self._import(sorted({spec.argv[2] for spec in specs if spec.forks}) + families)
        await self._supervisor.prepare(specs)
        if self._loader is not None:
            self._loader.begin_to_prepare()

    async def _import_for_returns(self, later: asyncio.Event, services: list[ChildSpec]) -> None:
        """Import what clients would wait for, once chat is ready, which it must not delay."""
        await later.wait()
        await self._import(sorted({spec.argv[2] for spec in services if spec.returns}))

    async def _import_for_orders(self, later: asyncio.Event) -> None:
        """Import what orders need before a new release is put in place, whose files do not fit this process."""
        await later.wait()
        await asyncio.to_thread(importlib.import_module, "motet_cli.supervision.rolling")

    async def _import(self, modules: list[str]) -> None:
        """Import what later starts will need, so that no request waits for it."""
        if self._nursery is None:
            return
        for module in modules:
            with contextlib.suppress(NotForked, OSError):  # told when a process is to be forked
                await self._nursery.load(module)

    def _note_serving(self, stack: Stack) -> None:
        adapters = [f"{adapter.partition('=')[0]} (adapter)" for adapter in stack.adapters]
        speech = [f"{stack.tts.name} (speech)"] if stack.tts is not None else []
        images = [f"{stack.draw.name} (images)"] if stack.draw is not None else []
        self._log.note(
            "serving "
            + ", ".join(
                [
                    *(model.name for model in stack.models),
                    *(_declared_name(model) for model in stack.declared),
                    *adapters,
                    *speech,
                    *images,
                ]
            )
        )
        if stack.memory is not None and stack.memory.engines:
            self._log.note(stack.memory.describe())
        for line in describe_gpus(stack):
            self._log.note(line)

    async def _report_ready(self, later: asyncio.Event) -> None:
        host, port = address.local_view(self._options.stack.host), self._options.stack.port
        # Set for the first wait only, which counts from the start of this process.
        began: float | None = process_began()
        while True:
            self._unready.clear()

            def progress(seconds: float, health: Health) -> None:
                self._show_progress(seconds, health)
                if health.chat:
                    later.set()

            seconds = await wait_until_ready(
                host, port, progress, tls=self._options.stack.access.tls is not None
            )
            self._log.progress("")
            self._llms = []
            later.set()
            if seconds > 0:
                self._log.note(
                    f"ready after {seconds if began is None else now() - began:.1f} s: {self.url}"
                )
            systemd.notify("READY=1")
            if began is not None:
                await self._note_fallback()
            began = None
            await self._unready.wait()

    async def _note_fallback(self) -> None:
        """Log one warning for the whole stack if its kernels run on torch."""
        if text := await asyncio.to_thread(fallback_warning):
            self._log.note(text, "warning")

    def _start_services(self, services: list[ChildSpec]) -> tuple[list[Slot], asyncio.Event]:
        """Start services; return them, and the event that starts those which wait for chat.

        The event is set after `_CHAT_FIRST` seconds in any case, and at once if nothing chats.
        """
        later = asyncio.Event()
        if not any(spec.role == "decode" for spec in services):
            later.set()
        slots = []
        for spec in services:
            gate = None if starts_at_once(spec, len(services)) else later
            slots.append(self._supervisor.add(spec, gate=gate))
        self._llms = [slot for slot in slots if slot.spec.role == "decode"]
        asyncio.get_running_loop().call_later(_CHAT_FIRST, later.set)
        return slots, later

    def _watchdog(self) -> list[ChildSpec]:
        """Return the process that ends services which have no supervisor."""
        if self._survival is None:
            return []
        return [watchdog.spec(self._options.stack.port, self._listener.fileno())]

    def _nats(self) -> list[ChildSpec]:
        port, credentials = self._options.nats_port, self._options.stack.credentials
        if port is None:
            return []
        if credentials is None:
            raise RuntimeError("credentials: are not set for the stack's own NATS server")
        return [nats.spec(port, credentials, self._made_store(), self._options.stack.network)]

    async def _wait_for_nats(self) -> None:
        port, listen = self._options.nats_port, self._options.listen
        host = "127.0.0.1" if listen is None else listen.host
        while port is not None and not await wait_for_port(host, port, _NATS_START):
            self._log.note(f"NATS does not listen on port {port} yet", "warning")

    def _made_store(self) -> Path | None:
        """Return the folder of the store, which only its user can read; None if there is none."""
        store = self._options.store
        if store is None:
            return None
        try:
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._log.note(f"nothing is stored: {error}; give --store FOLDER", "warning")
            return None
        return store

    async def _end(self) -> bool:
        """Stop all processes in order, or kill them after a second Ctrl-C; return True if none was."""
        self._ending = True
        self._supervisor.changed()
        stopping = asyncio.create_task(self._supervisor.stop())
        kill_requested = asyncio.create_task(self._kill.wait())
        await asyncio.wait([stopping, kill_requested], return_when=asyncio.FIRST_COMPLETED)
        kill_requested.cancel()
        if not stopping.done():
            stopping.cancel()
            await self._supervisor.kill()
            return False
        return stopping.result()

    def _show_progress(self, seconds: float, health: Health) -> None:
        missing = health.missing or "the gateway does not answer yet"
        self._log.progress(f"loading: {missing} ({seconds:.0f} s)")
        if seconds - self._reported >= _PROGRESS_INTERVAL or seconds < self._reported:
            self._reported = seconds
            if not self._log.live:
                self._log.note(f"loading: {missing} ({seconds:.0f} s)")

    def _on_change(self) -> None:
        self._unready.set()
        if self._llms and all(slot.refused for slot in self._llms):
            self._llms = []
            self._log.note("no language model can be served: correct the settings above", "error")
            self._refused.set()
        if self._survival is not None:
            self._survival.record(self._supervisor.slots, stopping=self._ending)
        if self._state_file is not None:
            self._state_file.write(self._state())

    def _state(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "url": self.url,
            "nats_url": self._options.stack.nats_url,
            "nats_credentials": None
            if self._options.stack.credentials is None
            else str(self._options.stack.credentials),
            "children": self._supervisor.describe(),
        }


def describe_gpus(stack: Stack) -> list[str]:
    """Return lines about the GPUs of a stack, and of the machine if the stack uses none."""
    if stack.placement is not None:
        return stack.placement.describe()
    count = count_gpus()
    if not count:
        return []
    return [f"GPUs: this machine has {count}, which are not used; --device cuda computes on them"]


def _declared_name(model: DeclaredModel) -> str:
    return f"{model.name} (on demand)" if model.on_demand else model.name


def kernels_note() -> str:
    """Return a message if services will compile the kernels at this start, else "".

    Raises ConfigError if MOTET_NATIVE names an instruction set that this processor lacks.
    """
    try:
        if native.will_build():
            return f"compiling the kernels for this processor, once: {native.preferred()}"
    except KernelError as error:
        raise ConfigError(str(error), param="MOTET_NATIVE") from None
    return ""


def fallback_warning() -> str:
    """Return a warning with a remedy if kernels have no native library, else ""."""
    reason = native.why_not_native()
    if not reason:
        return ""
    remedy = (
        "unset it" if reason.startswith("MOTET_NATIVE") else "apt-get install g++ (Debian, Ubuntu)"
    )
    return (
        f"kernels run on torch, several times slower: {reason}; remedy: {remedy}, then start again"
    )
