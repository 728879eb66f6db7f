"""A Docker engine of the tests, which leaves no trace on the machine and does not depend on its firewall.

It has a socket of its own, sets no firewall rules and leaves no bridge.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from containers.bridges import filtered, unfiltered

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "motet"
CACHE_BYTES = 12e9
START_SECONDS = 60
STOP_SECONDS = 30


class Docker:
    """The command line of one engine. Commands raise RuntimeError, with what they printed in it."""

    def __init__(self, socket: Path) -> None:
        # The classic builder: Debian's engine comes without BuildKit's client.
        self.env = os.environ | {"DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "0"}

    def run(self, *args: str, timeout: float = 60, stdin: bytes | None = None) -> str:
        return self._call(["docker", *args], self.env, timeout, stdin)

    def compose(self, *args: str, env: dict[str, str], timeout: float = 300) -> str:
        # By default it waits for the engine for a minute, which a busy machine exceeds.
        bound = {"COMPOSE_HTTP_TIMEOUT": str(round(timeout))}
        return self._call([*compose_command(), *args], self.env | bound | env, timeout)

    def stack(self, name: str, file: Path, env: dict[str, str]) -> str:
        """Deploy a stack file into the Swarm of this engine."""
        argv = [
            "docker",
            "stack",
            "deploy",
            "--compose-file",
            str(file),
            "--resolve-image",
            "never",
            name,
        ]
        return self._call(argv, self.env | env, 120)

    def remove_containers(self) -> None:
        """Remove all containers and the networks that no container is on."""
        if containers := self.run("ps", "--all", "--quiet").split():
            self.run("rm", "--force", "--volumes", *containers, timeout=300)
        self.run("network", "prune", "--force")

    def _call(
        self, argv: Sequence[str], env: dict[str, str], timeout: float, stdin: bytes | None = None
    ) -> str:
        done = subprocess.run(
            argv,
            env=env,
            input=stdin,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        output = done.stdout.decode(errors="replace")
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(argv[:4])} … ended with {done.returncode}:\n{output[-4000:]}"
            )
        return output


def compose_command() -> list[str]:
    """The plugin where there is one, else the stand-alone program."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


def missing() -> str | None:
    """Why no engine can be started and filled here; None if it can."""
    if os.geteuid() != 0:
        return "only root can start a Docker engine"
    absent = [name for name in ("docker", "dockerd", "debootstrap") if shutil.which(name) is None]
    if compose_command() == ["docker-compose"] and shutil.which("docker-compose") is None:
        absent.append("docker-compose")
    return f"not installed: {', '.join(absent)}" if absent else None


@contextmanager
def engine() -> Iterator[Docker]:
    """A running engine. Its images stay in the cache folder, so that the next build takes seconds.

    Raises RuntimeError with the engine's log where it does not start.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (
        (CACHE / "docker.lock").open("w") as lock,
        tempfile.TemporaryDirectory(prefix="motet-docker-") as folder,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # two engines must not share a data folder
        _bound_cache(CACHE / "docker")
        run = Path(folder)
        settings = filtered()  # before the engine loads the kernel module that has them
        with (run / "log").open("wb") as log:
            process = subprocess.Popen(_command(run), stdout=log, stderr=log)
        try:
            docker = Docker(run / "socket")
            _wait(docker, process, run / "log")
            with unfiltered(settings):
                docker.remove_containers()  # of a run that was killed
                yield docker
        finally:
            _stop(process, run)


def _bound_cache(folder: Path) -> None:
    """Each change of the dependencies leaves a gigabyte behind, and to prune takes longer than to start afresh."""
    if folder.exists():
        used = subprocess.run(
            ["du", "--summarize", "--bytes", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if int(used.stdout.split()[0]) > CACHE_BYTES:
            shutil.rmtree(folder)


def _command(run: Path) -> list[str]:
    folders = ["--data-root", str(CACHE / "docker"), "--exec-root", str(run / "exec")]
    sockets = ["--host", f"unix://{run / 'socket'}", "--pidfile", str(run / "pid")]
    # Ports are published by the engine's own proxy processes, and containers of one network meet on its bridge.
    network = ["--bridge=none", "--iptables=false", "--ip-forward=false", "--ip-masq=false"]
    # Ends with this process, however that ends.
    return ["setpriv", "--pdeathsig", "TERM", "dockerd", *folders, *sockets, *network]


def _wait(docker: Docker, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            docker.run("version", timeout=10)
            return
        except (RuntimeError, subprocess.TimeoutExpired):
            time.sleep(0.2)
    raise RuntimeError(f"dockerd did not start:\n{log.read_text(errors='replace')[-4000:]}")


def _stop(process: subprocess.Popen[bytes], run: Path) -> None:
    """The engine stops its containers first; what it left mounted is in the way of removing its folder."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    unmount_below(run)


def unmount_below(folder: Path) -> None:
    """What is mounted inside `folder` must not be deleted with it."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted({path for path in mounts if path.startswith(f"{folder}/")}, reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
