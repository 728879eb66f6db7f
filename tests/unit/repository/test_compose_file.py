"""compose.yaml, as far as it can be checked without a Docker engine: what it promises, and NATS as it starts it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from motet_gateway.images.store import ImageStore
from motet_gateway.storage.jetstream import connect
from motet_gateway.storage.quota import Stored
from motet_llm.config import DecodeConfig, EngineConfig
from motet_shared.credentials import USERS
from motet_shared.errors import Unavailable
from motet_shared.process.config import load
from motet_shared.testing import NatsServer

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "services" / "nats-store.conf"
COMPOSED: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSED["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"][0] == "/tmp"
    if set(service.get("profiles", ())) & {
        "observability"
    }:  # images of others, with users of their own
        assert service.get("user", "nobody") not in ("0", "root")
        return
    assert service["tmpfs"] == ["/tmp"]
    if name == "store":  # it gives a folder away and ends
        assert (service["user"], service["cap_add"], service["restart"]) == ("0", ["CHOWN"], "no")
    elif name == "credentials":  # it gives files away, finds again what it has given, and ends
        assert (service["user"], service["restart"]) == ("0", "no")
        assert service["cap_add"] == ["CHOWN", "DAC_READ_SEARCH"]
    else:
        assert service["user"] == "${MOTET_USER:-10001}"
        assert "cap_add" not in service


def test_files_that_are_mounted_are_there() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), f"{name}: {source}"
            elif not source.startswith("$"):
                assert source in COMPOSED["volumes"], f"{name}: {source}"


def test_profiles() -> None:
    profiles = {
        name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service
    }
    assert profiles == {
        **{f"{name}-gpu": ["gpu"] for name in ("decode", "encoder", "asr", "tts")},
        **{"embedding-gpu": ["gpu-embedding"], "diffusion-gpu": ["gpu-images"]},
        "ranking-gpu": ["gpu-ranking"],
        **{name: ["observability"] for name in ("prometheus", "grafana", "otel")},
        "speakers": ["speakers"],
        "embedding": ["embedding"],
        "ranking": ["ranking"],
        "diffusion": ["images"],
        "planner": ["planner"],
    }


# What the Compose specification says of `deploy.resources.reservations.devices`.
DEVICES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["capabilities"],
        "additionalProperties": False,
        "properties": {
            "capabilities": {"type": "array", "items": {"type": "string"}},
            "driver": {"type": "string"},
            "count": {"type": ["string", "integer"]},
            "device_ids": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "options": {"type": ["object", "array"]},
        },
        "not": {"required": ["count", "device_ids"]},
    },
}
ON_GPU = {name: one for name, one in SERVICES.items() if name.endswith("-gpu")}


@pytest.mark.parametrize("name", ON_GPU)
def test_a_service_on_a_gpu_is_the_one_on_a_cpu_with_a_gpu(name: str) -> None:
    here, there = ON_GPU[name], SERVICES[name.removesuffix("-gpu")]
    devices = here["deploy"]["resources"]["reservations"]["devices"]
    assert jsonschema_rs.is_valid(DEVICES, devices)
    assert not jsonschema_rs.is_valid(DEVICES, [{**devices[0], "count": 1}])
    assert devices[0]["capabilities"] == ["gpu"]
    own = {"profiles", "environment", "deploy"}
    assert {key: value for key, value in here.items() if key not in own} == {
        key: value for key, value in there.items() if key not in own
    }
    added = dict(set(here["environment"].items()) - set(there["environment"].items()))
    assert added.pop("MOTET_DEVICE") == "cuda"
    assert set(added) <= {"MOTET_MEMORY_SHARE"}


def test_gpus_are_chosen_by_variables() -> None:
    """`docker compose config` takes the file, where Compose is installed."""
    chosen = {"MOTET_DECODE_GPU": "GPU-1234", "MOTET_ASR_GPU": "1", "MOTET_DECODE_GPU_SHARE": "0.5"}
    text = (ROOT / "compose.yaml").read_text()
    if shutil.which("docker-compose"):
        profiles = [part for one in ON_GPU.values() for part in ("--profile", one["profiles"][0])]
        text = subprocess.run(
            ["docker-compose", "-f", str(ROOT / "compose.yaml"), *profiles, "config"],
            env={**os.environ, **chosen},
            capture_output=True,
            check=True,
            text=True,
            cwd=ROOT,
        ).stdout
    else:
        text = re.sub(r"\$\{(\w+):-([^}$]*)\}", lambda one: chosen.get(one[1], one[2]), text)
    services = yaml.safe_load(text)["services"]
    ids = {
        name: services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ON_GPU
    }
    assert (ids.pop("decode-gpu"), ids.pop("asr-gpu")) == (["GPU-1234"], ["1"])
    assert set(map(tuple, ids.values())) == {("0",)}
    assert services["decode-gpu"]["environment"]["MOTET_MEMORY_SHARE"] == "0.5"


@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"MOTET_LONG_CONTEXT": "true", "MOTET_HOST_CACHE": "4GiB"},
        {"MOTET_ATTENTION_BUDGET": "1024"},
    ],
)
def test_settings_of_the_language_model_are_its_own_where_nothing_is_said(
    name: str, given: dict[str, str]
) -> None:
    def filled(value: object) -> str:
        return re.sub(
            r"\$\{(\w+):-([^}]*)\}", lambda found: given.get(found[1], found[2]), str(value)
        )

    env = {key: filled(value) for key, value in SERVICES[name]["environment"].items()}
    env["MOTET_MODEL"] = str(ROOT) + env["MOTET_MODEL"]  # ./models is mounted at /models
    loaded = load(DecodeConfig, [], env)
    loaded.engine()  # it refuses what does not go together
    plain = load(DecodeConfig, [], {"MOTET_MODEL": env["MOTET_MODEL"]} | given)
    others = {key.removeprefix("MOTET_").lower() for key in env if key.startswith("MOTET_")} - {
        "role"
    }
    for field in others & {field.name for field in fields(EngineConfig)}:
        assert getattr(loaded, field) == getattr(plain, field), field


def test_the_store_is_given_to_the_user_of_nats(tmp_path: Path) -> None:
    _, *argv = SERVICES["store"]["entrypoint"]
    folder = tmp_path / "store"
    folder.mkdir()
    code = argv[-1].replace("/store", str(folder))
    assert code != argv[-1]
    subprocess.run(
        [sys.executable, argv[0], code], env={**os.environ, "OWNER": str(os.getuid())}, check=True
    )
    assert folder.stat().st_uid == os.getuid()
    ended = {"condition": "service_completed_successfully"}
    assert SERVICES["nats"]["depends_on"] == {"store": ended, "credentials": ended}


def test_each_role_mounts_its_own_password_alone() -> None:
    mounted = {
        name: [volume for volume in service.get("volumes", []) if volume.startswith("nats-")]
        for name, service in SERVICES.items()
    }
    assert mounted.pop("credentials") == [
        f"nats-{one}:/credentials/{one}" for one in ("server", *USERS)
    ]
    assert mounted.pop("nats") == ["nats-server:/etc/nats/server:ro"]
    for name, found in mounted.items():
        role = name.removesuffix("-gpu")
        assert found == ([f"nats-{role}:/run/nats:ro"] if role in USERS else []), name
    assert {volume[0].split(":")[0] for volume in mounted.values() if volume} == {
        f"nats-{user}" for user in USERS if user != "operator"
    }
    assert not [
        name
        for name, one in SERVICES.items()
        if "MOTET_NATS_PASSWORD" in one.get("environment", {})
    ]


async def test_nats_keeps_pictures_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the flags of compose.yaml, except for where it listens."""
    command = SERVICES["nats"]["command"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["nats"]["volumes"]}
    assert (ROOT / mounted[command[1]]).resolve() == CONFIG
    assert mounted[command[3]] == "store"
    assert command == [
        "--config",
        "/etc/nats/nats-store.conf",
        "--store_dir",
        "/store",
        "--addr",
        "0.0.0.0",
    ]
    monkeypatch.setenv("MOTET_STORE_SIZE", "1MB")
    async with NatsServer(CONFIG, tmp_path / "store") as nats:
        bus = await nats.bus("gateway")
        try:
            client = await connect(bus)
            assert client is not None
            keep = await ImageStore.open(client, Stored(lambda owner: None), 60, 60, 6)
            name = await keep.put_image(b"small", "png")
            assert await keep.image(name) == b"small"
            with pytest.raises(Unavailable):
                await keep.put_image(bytes(2 << 20), "png")
            assert await keep.image(name) == b"small"
        finally:
            await bus.close()
