"""What the images of the services install: together what each needs, and the large part in one layer for all."""

import re
import tomllib
from pathlib import Path

import pytest

from requirements import requirements

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = SETTINGS["project"]["optional-dependencies"]
SERVICES = sorted(path.name.removeprefix("motet_") for path in (ROOT / "services").glob("motet_*"))
WITH_TORCH = {"asr", "diffusion", "embedding", "llm", "tts", "encoder"}


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_what_its_service_needs_and_no_more(service: str) -> None:
    found = requirements(SETTINGS, service)
    needed = {*SETTINGS["project"]["dependencies"], *EXTRAS["telemetry"], *EXTRAS[service]}
    assert {*found["own"], *found["alone"]} == needed
    assert set(found["common"]) <= set(found["own"])
    assert any(line.startswith("torch") for line in found["common"]) == (service in WITH_TORCH)


def test_services_with_torch_share_one_layer() -> None:
    layers = {tuple(requirements(SETTINGS, service)["common"]) for service in WITH_TORCH}
    assert len(layers) == 1
    assert {line.split(">")[0] for line in layers.pop()} >= {
        "torch",
        "transformers",
        "numpy",
        "safetensors",
    }


def test_what_is_only_unpacked_comes_alone() -> None:
    assert [line.split(">")[0] for line in requirements(SETTINGS, "vad")["alone"]] == ["silero-vad"]


def test_a_service_without_an_extra_is_an_error() -> None:
    with pytest.raises(KeyError, match="missing"):
        requirements(SETTINGS, "missing")


def test_no_setting_of_a_service_has_the_name_of_a_variable_that_images_set() -> None:
    recipe = (ROOT / "services" / "Dockerfile").read_text()
    taken = {name.removeprefix("MOTET_").lower() for name in re.findall(r"\b(MOTET_\w+)=", recipe)}
    assert taken
    for path in (ROOT / "services").glob("motet_*/config.py"):
        settings = set(re.findall(r"^    (\w+): .*= setting\(", path.read_text(), re.MULTILINE))
        assert not settings & taken, path
