"""The file of tenants: what it says, and what is said about one that is wrong."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from motet_shared.errors import ConfigError
from motet_shared.tenants import PREFIX, TenantLimits, digest, load_tenants, new_key, parse_tenants

KEY = digest("x")
GOOD = f"""# who may ask
[tenants.acme]
requests_per_minute = 600  # a lot
tokens_per_minute = 100_000
service_tier = "default"

[tenants.zeta-2]

[[keys]]
tenant = "acme"
sha256 = "{KEY}"
created = 2026-11-22
note = "build farm"
"""


def test_what_a_file_says() -> None:
    tenants = parse_tenants(GOOD, "t.toml")
    limits = TenantLimits(
        requests_per_minute=600, tokens_per_minute=100_000, service_tier="default"
    )
    assert tenants.limits == {"acme": limits, "zeta-2": TenantLimits()}
    (key,) = tenants.keys
    assert (key.tenant, key.sha256, key.note) == ("acme", KEY, "build farm")
    assert key.created == datetime.date(2026, 11, 22)
    assert KEY.startswith(key.id)


def test_an_empty_file_has_nobody_in_it() -> None:
    assert parse_tenants("", "t.toml").keys == ()


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("[tenants.acme]", "[tenants.acme", 2, ["is no TOML"]),
        ("[tenants.acme]", "[tenants.ACME]", 2, ["'ACME' is no name", "a-z"]),
        ("[tenants.zeta-2]", "[tenants.default]", 7, ["'default'", "--api-key-file"]),
        (
            "requests_per_minute = 600",
            'requests_per_minute = "many"',
            3,
            ["requests_per_minute", "`int", "`str`"],
        ),
        (
            "requests_per_minute = 600",
            "requests_per_minute = 0",
            3,
            ["requests_per_minute", ">= 1"],
        ),
        (
            "tokens_per_minute",
            "tokens_per_hour",
            4,
            ["tokens_per_hour", "unknown", "tokens_per_minute"],
        ),
        ('"default"', '"gold"', 5, ["service_tier", "gold"]),
        ('tenant = "acme"', 'tenant = "acne"', 10, ["[tenants.acne]", "add it"]),
        (KEY, "sesame", 11, ["sha256", "0-9a-f"]),
        ("[[keys]]", "[keys]", 9, ["[[keys]]"]),
        ("[[keys]]", "[[clefs]]", 9, ["`clefs` is unknown"]),
        ("created = 2026-11-22", "created = 5", 12, ["created", "date"]),
        (f'sha256 = "{KEY}"\n', "", 9, ["sha256"]),
        (
            'note = "build farm"',
            f'[[keys]]\ntenant = "acme"\nsha256 = "{KEY}"',
            15,
            ["twice", "remove one"],
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    old: str, new: str, line: int, words: list[str]
) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        parse_tenants(GOOD.replace(old, new), "t.toml")
    assert f"t.toml, line {line}:" in caught.value.message
    assert caught.value.param == "tenants_file"
    assert [word for word in words if word not in caught.value.message] == []


def test_a_file_that_is_not_there_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_tenants(tmp_path / "none.toml")


def test_keys_are_long_and_known_by_their_beginning() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) >= len(PREFIX) + 43 for key in keys)
