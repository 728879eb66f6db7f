"""What a machine runs follows from its memory, cores and GPUs."""

from __future__ import annotations

import pytest

from motet_cli.joining.choice import Machine, choose, parse_services, wanted_services
from motet_cli.joining.listen import Listen, parse_host_port, parse_listen
from motet_cli.joining.messages import ModelOffer, ServiceOffer, StackOffer
from motet_cli.main import up_arguments
from motet_cli.planning.engine_memory import CPU_OVERHEAD
from motet_cli.supervision.up import parse_options
from motet_shared.errors import ConfigError
from motet_shared.testing import free_port
from support.running.refusals import refuses

GB = 10**9
OFFER = StackOffer(
    services=(
        ServiceOffer("tokenizer", memory=GB),
        ServiceOffer("decode", "decode/large", 40 * GB),
        ServiceOffer("decode", "decode/small", 4 * GB),
        ServiceOffer("vad", memory=GB),
        ServiceOffer("asr", "asr/ears", 2 * GB),
    ),
    models={
        key: ModelOffer(key.partition("/")[2], "", "")
        for key in ("decode/large", "decode/small", "asr/ears")
    },
)


def taken(machine: Machine) -> list[str]:
    return [OFFER.label(one.service) for one in choose(OFFER, machine) if one.taken]


@pytest.mark.parametrize(
    ("cores", "memory", "gpus", "expected"),
    [
        (64, 100 * GB, (), ["decode (large)", "decode (small)", "tokenizer", "asr (ears)", "vad"]),
        (2, 100 * GB, (), ["decode (large)", "decode (small)"]),
        (2, 20 * GB, (), ["decode (small)", "tokenizer"]),
        (16, 6 * GB, (), ["decode (small)", "tokenizer", "vad"]),
        (16, 3 * GB, (), ["tokenizer", "asr (ears)"]),
        (16, 8 * GB, (48 * GB,), ["decode (large)", "decode (small)", "tokenizer", "asr (ears)"]),
        (16, 8 * GB, (16 * GB,), ["decode (small)", "tokenizer", "asr (ears)", "vad"]),
    ],
)
def test_services_fit_the_machine(
    cores: int, memory: int, gpus: tuple[int, ...], expected: list[str]
) -> None:
    assert taken(Machine(cores=cores, memory=memory, gpus=gpus)) == expected


def test_a_gpu_holds_one_language_model() -> None:
    machine = Machine(cores=8, memory=2 * CPU_OVERHEAD, gpus=(48 * GB, 6 * GB))
    assert taken(machine) == ["decode (large)", "decode (small)"]


def test_a_machine_for_which_all_is_too_large_is_told() -> None:
    with refuses(ConfigError, "--services"):
        choose(OFFER, Machine(cores=4, memory=GB // 2))


def test_given_services_are_run_whatever_the_machine_has() -> None:
    counts = parse_services(["decode=2,vad", "asr"])
    assert counts == {"decode": 2, "vad": 1, "asr": 1}
    found = [OFFER.label(one.service) for one in wanted_services(OFFER, counts)]
    assert found == ["decode (large)", "decode (small)", "vad", "asr (ears)"]


@pytest.mark.parametrize("given", ["decode=0", "decode=x", "=2", "de code", "decode=-1"])
def test_a_wrong_word_is_refused(given: str) -> None:
    with refuses(ConfigError, "--services"):
        parse_services([given])


@pytest.mark.parametrize("counts", [{"gateway": 1}, {"diffusion": 1}, {"asr": 2}])
def test_what_is_not_offered_is_refused(counts: dict[str, int]) -> None:
    with refuses(ConfigError, "--services"):
        wanted_services(OFFER, counts)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("192.0.2.1", ("192.0.2.1", 4221)),
        ("192.0.2.1:7", ("192.0.2.1", 7)),
        ("node-1:0", ("node-1", 0)),
        ("[2001:db8::1]:5", ("2001:db8::1", 5)),
    ],
)
def test_addresses(given: str, expected: tuple[str, int]) -> None:
    assert parse_host_port(given, "--listen") == expected
    assert parse_host_port(Listen(*expected, 1).text, "--listen") == expected


@pytest.mark.parametrize("given", ["", ":5", "a:b", "http://a", "a/b", "u@a", "a:65535", "a:99999"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with refuses(ConfigError, "--listen"):
        parse_host_port(given, "--listen")


@pytest.mark.parametrize("given", ["0.0.0.0", "[::]", "192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_of_this_machine_alone_is_refused(given: str) -> None:
    with refuses(ConfigError, "--listen"):
        parse_listen(given)


def test_nats_has_the_next_port() -> None:
    port = free_port()
    assert parse_listen(f"127.0.0.1:{port}") == Listen("127.0.0.1", port, port + 1)
    chosen = parse_listen("127.0.0.1:0")
    assert 0 not in (chosen.port, chosen.nats_port)
    assert chosen.nats_url == f"tls://127.0.0.1:{chosen.nats_port}"


@pytest.mark.parametrize("flag", ["--survive", "--nats=nats://127.0.0.1:4222"])
def test_what_excludes_other_hosts_is_named(flag: str) -> None:
    with refuses(ConfigError, "--listen"):
        parse_options(up_arguments(["--config=none", "--listen=127.0.0.1:0", flag]))
