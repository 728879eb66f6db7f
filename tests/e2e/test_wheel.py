"""The wheel: built from this tree, installed into an empty environment, started in an empty folder.

Dependencies come from the environment that runs the tests, by a .pth file: nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.stack import START_SECONDS, WAIT_SECONDS, fetch, running, until
from motet_kernels.runtime.build import cache_folder
from motet_shared import __version__
from motet_shared.testing import free_port

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
POCKET = {path.name for path in (ROOT / "models").glob("pocket-*")}
# Of the machine that runs the tests; all others would let the wheel find this tree or its settings.
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "MOTET_CACHE", "MOTET_NATIVE", "XDG_STATE_HOME")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", str(ROOT)]
    run(sys.executable, "-m", "pip", "wheel", "--quiet", *options)
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment that holds the wheel, and finds its dependencies elsewhere."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    options = ["--no-deps", "--ignore-installed", "--no-index", "--no-compile", str(wheel)]
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *options)
    [packages] = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(here))
    return folder / "bin"


@pytest.fixture(scope="module")
def url(bin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`motet up` in an empty folder, once it can chat."""
    folder = tmp_path_factory.mktemp("empty")
    address = f"http://127.0.0.1:{free_port()}"
    log = tmp_path_factory.mktemp("log") / "motet.log"
    with log.open("wb") as file:
        command = [str(bin_folder / "motet"), "up", "--port", address.rpartition(":")[2]]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        until(lambda: can_chat(address) or not running(process.pid), "it can chat", START_SECONDS)
        assert running(process.pid)
        yield address
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0
        assert list(folder.iterdir()) == []
    except BaseException as error:
        error.add_note(log.read_text()[-8000:])
        raise
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in KEPT if name in os.environ}


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def can_chat(address: str) -> bool:
    try:
        health = f"{address}/health/ready?model=pocket-chat"
        return fetch(health).status_code == 200
    except httpx.HTTPError:
        return False


def test_it_is_pure_python_and_holds_what_a_start_needs(wheel: Path) -> None:
    assert wheel.name == f"motet-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    models = {name.split("/")[2] for name in names if name.startswith("motet_cli/models/")}
    assert models == POCKET
    assert {
        "motet_cli/nats.conf",
        "motet_cli/compose.yaml",
        "motet_kernels/csrc/attention.cpp",
    } <= names
    packages = {name.partition("/")[0] for name in names if not name.startswith("motet-")}
    assert {name for name in packages if f"{name}/py.typed" not in names} == set()


def test_the_command_runs_from_the_wheel(bin_folder: Path, tmp_path: Path) -> None:
    assert run(str(bin_folder / "motet"), "--version").split() == ["motet", __version__]
    code = "import motet_llm, motet_cli; print(motet_llm.__file__); print(motet_cli.__file__)"
    found = run(str(bin_folder / "python"), "-c", code, cwd=tmp_path).splitlines()
    assert all(Path(path).is_relative_to(bin_folder.parent) for path in found)


def test_it_answers_a_chat_in_an_empty_folder(bin_folder: Path, url: str, tmp_path: Path) -> None:
    question = "There is a red circle, a blue square and a green star. What do you see?"
    answer = run(str(bin_folder / "motet"), "chat", "--url", url, question, cwd=tmp_path)
    assert answer.strip() == "A red circle, a blue square and a green star."
    version = fetch(f"{url}/version").json()
    assert version == {"version": __version__}
    document = fetch(f"{url}/openapi.json").json()
    assert document["info"]["version"] == __version__


def test_the_kernels_of_the_wheel_are_these_and_a_missing_compiler_is_named(
    bin_folder: Path, tmp_path: Path
) -> None:
    """What is compiled for this tree is found by the wheel: the hash of all sources is the same."""
    python, code = str(bin_folder / "python"), "from motet_kernels.runtime import build, native; "
    found = run(python, "-c", code + "print(build.cache_folder())", cwd=tmp_path)
    assert Path(found.strip()).name == cache_folder().name
    bare = {"MOTET_CACHE": str(tmp_path / "none"), "PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-c", code + "print(native.why_not_native())"],
        cwd=tmp_path,
        env=bare,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "compiler" in done.stdout, done.stderr
