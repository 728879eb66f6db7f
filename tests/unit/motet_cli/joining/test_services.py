"""What the first host offers becomes the same services on a machine that joins, with its own files and addresses."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from e2e import markov
from motet_cli.joining.choice import wanted_services
from motet_cli.joining.errors import ModelMismatch
from motet_cli.joining.messages import StackOffer
from motet_cli.joining.offer import files_digest, stack_offer
from motet_cli.joining.services import joined_services, joined_stack
from motet_cli.main import parser, up_arguments
from motet_cli.placement.jobs import option_of
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import PeerNetwork
from motet_cli.supervision.up import stack_of
from motet_shared.errors import ConfigError
from support.running.refusals import refuses

NOT_NEEDED = ("--film=none", "--tts=none", "--draw=none", "--embed=none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return markov.save(tmp_path_factory.mktemp("models") / "markov")


def offered(*flags: str, config: str = "none") -> StackOffer:
    """Return the offer of `motet up` with these flags, as it comes over the wire."""
    args = up_arguments([f"--config={config}", *NOT_NEEDED, *flags])
    return msgspec.json.decode(
        msgspec.json.encode(stack_offer(args, stack_of(args))), type=StackOffer
    )


def joined(
    offer: StackOffer, folder: Path, services: dict[str, int], flags: Sequence[str] = ()
) -> list[ChildSpec]:
    """Return the processes of `motet join --services …`."""
    args = parser().parse_args(["join", "192.0.2.1", *flags])
    chosen = wanted_services(offer, services)
    stack = joined_stack(offer, chosen, services, args)
    network = PeerNetwork("192.0.2.2", folder)
    return joined_services(stack, chosen, network, "tls://192.0.2.1:4222")


def test_the_first_host_keeps_what_clients_and_operators_reach(model: Path) -> None:
    offer = offered(f"--llm={model}", "--asr=pocket-asr", "--vad=1", "--planner")
    roles = [service.role for service in offer.services]
    assert roles == ["tokenizer", "decode", "vad", "asr"]
    assert set(offer.models) == {"decode/markov", "asr/pocket-asr"}
    assert offer.models["decode/markov"].source == str(model)
    assert offer.models["asr/pocket-asr"].source == "pocket-asr"
    assert all(service.memory > 1 << 20 for service in offer.services)


def test_services_are_those_of_the_first_host_with_own_addresses(
    model: Path, tmp_path: Path
) -> None:
    offer = offered(f"--llm=chat={model}", "--asr=none", "--speculate=ngram")
    flags = ("--site=there", "--memory-share=0.5")
    specs = joined(offer, tmp_path, {"decode": 2, "tokenizer": 1}, flags)
    assert [spec.name for spec in specs] == ["tokenizer", "decode-1", "decode-2"]
    for spec in specs:
        assert option_of(spec.argv, "--nats-url") == "tls://192.0.2.1:4222"
        assert option_of(spec.argv, "--site") == "there"
        assert spec.env["MOTET_NATS_CREDENTIALS"] == str(tmp_path / spec.role)
        assert spec.env["MOTET_BLOB_HOST"] == "192.0.2.2"
        assert spec.env["MOTET_PEER_KEY"] == str(tmp_path / "host.key")
        assert spec.drain is not None
    assert option_of(specs[0].argv, "--model") == f"chat={model}"
    for engine in specs[1:]:
        assert option_of(engine.argv, "--name") == "chat"
        assert option_of(engine.argv, "--model") == str(model)
        assert option_of(engine.argv, "--speculate") == "ngram"
        assert int(option_of(engine.argv, "--memory")) > 0


def test_a_model_is_found_by_its_name_where_the_path_is_another(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "first" / "markov"
    shutil.copytree(model, elsewhere)
    offer = offered(f"--llm={elsewhere}", "--asr=none")
    shutil.rmtree(elsewhere)
    with refuses(ConfigError, "--model"):
        joined(offer, tmp_path, {"decode": 1})
    given = (f"--model=markov={model}",)
    assert option_of(joined(offer, tmp_path, {"decode": 1}, given)[0].argv, "--model") == str(model)
    monkeypatch.setenv("MOTET_MODELS", str(model.parent))
    assert option_of(joined(offer, tmp_path, {"decode": 1})[0].argv, "--model") == str(model)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_of_other_files_is_refused(model: Path, tmp_path: Path, file: str) -> None:
    other = tmp_path / "markov"
    shutil.copytree(model, other)
    assert files_digest(other) == files_digest(model)
    data = (other / file).read_bytes()
    changed = data.replace(b"_", b"-", 1) if file != "config.json" else data + b"\n"
    (other / file).write_bytes(changed)
    offer = offered(f"--llm={model}", "--asr=none")
    if file == "tokenizer.json":
        (other / file).write_bytes(data + b"\n")
    with refuses(ModelMismatch, "--model") as caught:
        joined(offer, tmp_path, {"decode": 1}, (f"--model=markov={other}",))
    assert caught.value.code == "model_mismatch"


def test_models_and_roles_of_a_stack_file_are_offered(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text(
        f'[roles.decode]\nsettings = {{ max_running = 7 }}\n[models.mine]\nsource = "{model}"\n'
        f'instances = 2\nsettings = {{ block_size = 32 }}\n[models.later]\nsource = "{model}"\n'
        f'load = "on demand"\n[models.elsewhere]\nsource = "{model}"\nengine = "openai"\n'
        'engine_url = "http://192.0.2.9/v1"\n'
    )
    offer = offered("--asr=none", "--vad=0", config=str(file))
    assert [one.model for one in offer.services if one.role == "decode"] == ["decode/mine"]
    specs = joined(offer, tmp_path, {"decode": 1})
    assert [spec.model for spec in specs] == ["mine", "mine"]
    for spec in specs:
        assert option_of(spec.argv, "--max-running") == "7"
        assert option_of(spec.argv, "--block-size") == "32"


def test_tokenizers_with_files_of_the_first_host_are_not_offered(
    model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    offer = offered(f"--llm={model}", "--asr=none", "--vad=0", f"--chat-template={template}")
    assert [service.role for service in offer.services] == ["decode"]
