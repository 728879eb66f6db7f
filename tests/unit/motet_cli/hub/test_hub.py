"""Test models from a hub, here a server on loopback: selection, downloads, and errors."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motet_cli.hub.reference import HubReference, parse_reference
from motet_cli.hub.selection import select_files
from motet_shared.errors import ConfigError
from support.peers.model_hub import COMMIT, ModelHub, Repository, model_hub

_WEIGHTS = bytes(range(256)) * 64
_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" + b" " * 2000,
    "model.safetensors": _WEIGHTS,
    "pytorch_model.bin": _WEIGHTS,
    "README.md": b"# A model",
    "onnx/model.onnx": _WEIGHTS,
}
_PROGRAM = """
import json, resource, sys
from motet_cli.hub import download
from motet_cli.hub.reference import parse_reference
from motet_shared.errors import ConfigError
if sys.argv[3] != "0":
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    found = getattr(download, sys.argv[1])(parse_reference(sys.argv[2]))
except ConfigError as error:
    found = {"error": error.message}
print(json.dumps(found if isinstance(found, dict | int) else found and str(found)))
"""


def _call(function: str, reference: str, hub: ModelHub, home: Path, **options: Any) -> Any:
    """Call a function of `download` in a new process, because huggingface_hub reads its settings
    once.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env |= {key: value for key, value in options.items() if key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, function, reference, str(options.get("file_bytes", 0))],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_download_reports_its_bytes(tmp_path: Path) -> None:
    with model_hub(org__name=Repository(_FILES)) as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "motet_cli", "pull", "--json", "--", "org/name"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
    first, *progress, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, first) == (0, {"status": "pulling manifest"})
    assert last == {"status": "success"}
    assert progress
    assert all(0 <= one["completed"] <= one["total"] for one in progress)
    assert {one["digest"] for one in progress} == {"org/name"}


# ------------------------------------------------------------------------------ references
@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("Qwen/Qwen3-0.6B", HubReference(repository="Qwen/Qwen3-0.6B")),
        ("a/b@v1.0", HubReference(repository="a/b", revision="v1.0")),
        ("a/b@refs/pr/3", HubReference(repository="a/b", revision="refs/pr/3")),
        ("a/b:c-Q4_K_M.gguf", HubReference(repository="a/b", file="c-Q4_K_M.gguf")),
        ("a/b@main:q/c.gguf", HubReference(repository="a/b", revision="main", file="q/c.gguf")),
    ],
)
def test_references_are_parsed_and_formatted(text: str, reference: HubReference) -> None:
    assert parse_reference(text) == reference
    assert str(reference) == text


@pytest.mark.parametrize(
    "text",
    [
        "model",
        "./a/b",
        "/a/b",
        "a/b/c",
        "../b",
        "a/..",
        "a/b@",
        "a/b:c.bin",
        "a/b:../c.gguf",
        "~/b",
        "",
    ],
)
def test_other_texts_are_not_references(text: str) -> None:
    assert parse_reference(text) is None


# ------------------------------------------------------------------------------ selection
def test_weights_are_chosen_in_one_format() -> None:
    paths = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "original/model.safetensors",
        "pytorch_model.bin.index.json",
        "chat_template.jinja",
        "1_Pooling/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        ".gitattributes",
        "modeling_own.py",
        "../model.safetensors",
        "/etc/model.safetensors",
    ]
    assert select_files(HubReference(repository="a/b"), paths) == [
        "1_Pooling/config.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "unet/diffusion_pytorch_model.safetensors",
    ]


@pytest.mark.parametrize("paths", [["pytorch_model.bin"], ["a.Q4_0.gguf"], ["README.md"], []])
def test_a_repository_without_safetensors_is_refused(paths: list[str]) -> None:
    with pytest.raises(ConfigError):
        select_files(HubReference(repository="a/b"), ["config.json", *paths])


def test_only_the_named_gguf_file_is_chosen() -> None:
    reference = HubReference(repository="a/b", file="q4.gguf")
    assert select_files(reference, ["q4.gguf", "q8.gguf", "config.json"]) == ["q4.gguf"]
    with pytest.raises(ConfigError):
        select_files(replace(reference, file="q5.gguf"), ["q4.gguf"])


# ------------------------------------------------------------------------------ downloads
def test_models_are_pulled_once_and_found_offline(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES)) as hub:
        assert _call("find_cached", "a/b", hub, tmp_path) is None
        folder = Path(_call("pull", "a/b", hub, tmp_path))
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert (folder / "model.safetensors").read_bytes() == _WEIGHTS
        assert Path(_call("pull", "a/b@main", hub, tmp_path)) == folder
        assert hub.downloads("model.safetensors") == 1
        hub.requests.clear()
        assert Path(_call("find_cached", "a/b", hub, tmp_path)) == folder
        assert Path(_call("pull", "a/b", hub, tmp_path, HF_HUB_OFFLINE="1")) == folder
        assert Path(_call("pull", f"a/b@{COMMIT}", hub, tmp_path, HF_HUB_OFFLINE="1")) == folder
        assert not hub.requests
        assert _call("remove", "a/b", hub, tmp_path) >= len(_WEIGHTS)
        assert _call("find_cached", "a/b", hub, tmp_path) is None


def test_interrupted_downloads_are_resumed(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES, cut_after=5000)) as hub:
        folder = Path(_call("pull", "a/b", hub, tmp_path))
        assert hub.cuts == {"model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == _WEIGHTS


def test_damaged_files_are_rejected_and_removed(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES, damaged="model.safetensors")) as hub:
        assert "model.safetensors" in _call("pull", "a/b", hub, tmp_path)["error"]
        assert _call("find_cached", "a/b", hub, tmp_path) is None
        hub.repositories["a/b"].damaged = None
        folder = Path(_call("pull", "a/b", hub, tmp_path))
    assert (folder / "model.safetensors").read_bytes() == _WEIGHTS


@pytest.mark.parametrize(
    ("repository", "reference", "remedy"),
    [
        (Repository(_FILES, token="hf_right"), "a/b", "HF_TOKEN"),
        (Repository(_FILES), "a/b@v9", "'v9'"),
        (Repository(_FILES), "a/other", "org/name"),
        (Repository({"config.json": b"{}", "q.gguf": b""}), "a/b", "a/b:q.gguf"),
    ],
)
def test_errors_name_the_remedy(
    repository: Repository, reference: str, remedy: str, tmp_path: Path
) -> None:
    with model_hub(a__b=repository) as hub:
        assert remedy in _call("pull", reference, hub, tmp_path)["error"]


def test_a_hub_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES, busy=2)) as hub:
        assert Path(_call("pull", "a/b", hub, tmp_path)).is_dir()
        assert hub.repositories["a/b"].busy == 0


def test_a_hub_that_stays_busy_is_given_up(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES, busy=1000)) as hub:
        assert "429" in _call("pull", "a/b", hub, tmp_path)["error"]


def test_progress_is_shown_on_a_terminal(tmp_path: Path) -> None:
    """huggingface_hub's bars, on standard error, and none where that is a file (as in `_call`)."""
    with model_hub(a__b=Repository(_FILES)) as hub:
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        command = [sys.executable, "-m", "motet_cli", "pull", "a/b"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=theirs) as process:
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):  # the terminal is closed
                while part := os.read(ours, 4096):
                    shown += part
            os.close(ours)
    assert process.returncode == 0
    assert b"%|" in shown


def test_a_token_grants_access(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES, token="hf_right")) as hub:
        assert Path(_call("pull", "a/b", hub, tmp_path, HF_TOKEN="hf_right")).is_dir()


def test_cached_models_stay_available_without_the_hub(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES), a__c=Repository(_FILES, status=404)) as hub:
        folder = _call("pull", "a/b", hub, tmp_path)
        assert "error" in _call("pull", "a/c", hub, tmp_path)
    assert _call("pull", "a/b", hub, tmp_path) == folder
    assert "HF_ENDPOINT" in _call("pull", "a/c", hub, tmp_path)["error"]


def test_a_full_disk_is_reported_and_the_download_resumed(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES)) as hub:
        assert "HF_HOME" in _call("pull", "a/b", hub, tmp_path, file_bytes=8192)["error"]
        folder = Path(_call("pull", "a/b", hub, tmp_path))
    assert (folder / "model.safetensors").read_bytes() == _WEIGHTS


def test_concurrent_pulls_download_once(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES)) as hub, ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: _call("pull", "a/b", hub, tmp_path), range(2)))
        assert folders[0] == folders[1]
        assert hub.downloads("model.safetensors") == 1


def test_config_json_is_fetched_alone(tmp_path: Path) -> None:
    with model_hub(a__b=Repository(_FILES)) as hub:
        folder = Path(_call("fetch_config", "a/b", hub, tmp_path))
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        assert _call("find_cached", "a/b", hub, tmp_path) is None
