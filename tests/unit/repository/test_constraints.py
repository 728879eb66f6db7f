"""constraints.txt pins everything that an install of motet[dev] brings along, transitive packages included."""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
# torch pins the libraries of its accelerators itself, exactly, and a CPU-only torch has none.
PINNED_BY_TORCH = re.compile("nvidia-|cuda-")


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    return {
        canonicalize_name(name): version for name, version in (line.split("==") for line in lines)
    }


def installed_closure(root: str, extras: set[str]) -> dict[str, Distribution]:
    """Every installed distribution that `root[extras]` reaches, by canonical name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(root), extra) for extra in {"", *extras}]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen or PINNED_BY_TORCH.match(name):
            continue
        seen.add((name, extra))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # needed on other platforms only
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [
                    (canonicalize_name(requirement.name), wanted)
                    for wanted in {"", *requirement.extras}
                ]
    return found


def test_lines_are_plain_pins() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line), line


def test_every_installed_dependency_is_pinned_at_its_version() -> None:
    closure = installed_closure("motet", {"dev"})
    assert {"torch", "transformers", "nats-py", "markupsafe", "librt"} <= closure.keys()
    # The local part of a version (+cpu) names a build, not a release.
    installed = {
        name: found.version.split("+")[0] for name, found in closure.items() if name != "motet"
    }
    assert installed == {name: version for name, version in pins().items() if name in installed}


def test_no_pin_without_use() -> None:
    assert sorted(pins().keys() - installed_closure("motet", {"dev"}).keys()) == []
