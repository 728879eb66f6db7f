"""`motet credentials hub`: what servers of one stack log in to each other with, and nats-server takes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from motet_cli.joining.certificates import make_authority, make_certificate
from motet_cli.joining.server_links import CLUSTER, HUB, LEAFNODES, write_links
from motet_cli.main import main
from motet_shared.testing import nats_binary

THREE = ("192.0.2.1", "192.0.2.2:7000", "[2001:db8::3]")


def test_nats_server_takes_the_configurations_of_hub_members_and_leaf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["credentials", "passwords", str(tmp_path)]) == 0
    assert main(["credentials", "hub", str(tmp_path), *THREE]) == 0
    assert str(tmp_path / HUB) in capsys.readouterr().out
    make_authority(tmp_path)
    cert, key = make_certificate(tmp_path, ["192.0.2.1"], "host")
    (tmp_path / "server/hub.conf").write_text((tmp_path / HUB).read_text())
    env = {
        **os.environ,
        **{"MOTET_PEER_CA": str(tmp_path / "ca.crt"), "MOTET_PEER_CERT": str(cert)},
        **{"MOTET_PEER_KEY": str(key), "MOTET_STORE_SIZE": "1GB", "MOTET_NATS_NAME": "one"},
        "MOTET_NATS_CLUSTER": "127.0.0.1:6222",
        "MOTET_NATS_LEAFNODES": "127.0.0.1:7422",
    }
    for name in ("nats-hub.conf", "nats-cluster.conf", "nats-leaf.conf"):
        argv = [str(nats_binary()), "-t", "-c", str(tmp_path / name)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_files_are_private_and_name_all_servers(tmp_path: Path) -> None:
    files = write_links(tmp_path, THREE, ["hub.example"])
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    cluster, hub = (tmp_path / CLUSTER).read_text(), (tmp_path / HUB).read_text()
    for member in ("@192.0.2.1:6222", "@192.0.2.2:7000", "@[2001:db8::3]:6222"):
        assert member in cluster
    assert "@hub.example:7422" in hub
    assert "192.0.2.1" not in hub
    password = hub.partition("leaf:")[2].partition("@")[0]
    assert password in (tmp_path / LEAFNODES).read_text()
    assert password not in cluster


def test_passwords_stay_until_they_are_rotated(tmp_path: Path) -> None:
    def read() -> list[str]:
        return [(tmp_path / name).read_text() for name in (CLUSTER, LEAFNODES, HUB)]

    write_links(tmp_path, THREE)
    first = read()
    write_links(tmp_path, THREE)
    assert read() == first
    write_links(tmp_path, THREE, rotate=True)
    assert not set(read()) & set(first)


def test_leaf_nodes_use_the_hosts_of_the_servers_and_one_server_has_no_routes(
    tmp_path: Path,
) -> None:
    write_links(tmp_path, ["[2001:db8::3]:7000"])
    assert "@[2001:db8::3]:7422" in (tmp_path / HUB).read_text()
    assert not (tmp_path / CLUSTER).exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("a", "b"), "ADDRESS: 2 servers"),
        (("a b",), "ADDRESS: 'a b'"),
        (("a:0",), "ADDRESS: 'a:0'"),
        (("a:70000",), "ADDRESS: 'a:70000'"),
        (("a", "--leafnodes", 'x"]'), "--leafnodes: 'x\"]'"),
    ],
)
def test_what_is_no_address_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    assert main(["credentials", "hub", str(tmp_path), *words]) == 2
    assert named in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.conf"))
