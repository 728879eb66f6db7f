"""Adapters as models with names: where requests for them go, what `/v1/models` and `motet models` say, `motet up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from motet_cli.checkpoints import model_folders as models
from motet_cli.commands.models import run as list_models
from motet_cli.commands.server import Listed, Server
from motet_cli.main import parser
from motet_pipelines.chat.models import accepts_images, servable
from motet_shared.errors import ConfigError
from motet_shared.messages import PROTOCOL, Heartbeat, ModelCard
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_shared.text.prefixes import chain
from motet_tokenizer.router import PromptLoad, Router
from support.clients.gateway_client import world
from support.services.fake_services import MODEL, FakeDecode

ROOT = 12345


# --------------------------------------------------------------------------------------------------------------- router
class Directory:
    """Instances that all serve model m and its adapter a. Streams are not counted."""

    def __init__(self) -> None:
        self.beats: dict[str, Heartbeat] = {}
        self.on_gone: list[Any] = []

    def announce(self, instance: str, resident: bool, seq: int = 0, **load: float) -> None:
        base = ModelCard(name="m", context=100, block_size=4)
        adapter = replace(base, name="a", parent="m", resident=resident, hash_root=ROOT)
        speed = {"prefill_token": 1e-3, "decode_row": 0.01}
        self.beats[instance] = Heartbeat(
            v=PROTOCOL,
            role="decode",
            instance=instance,
            state="ready",
            seq=seq,
            models=[base, adapter],
            load=speed | load,
        )

    def ready(self, role: str, model: str) -> list[Heartbeat]:
        return list(self.beats.values())

    def active(self, instance: str) -> float:
        return 0.0

    def is_near(self, beat: Heartbeat) -> bool:
        return True


class Index:
    """Holds blocks by what they are called."""

    def __init__(self, **blocks: list[int]) -> None:
        self.blocks = {name.replace("_", "-"): held for name, held in blocks.items()}

    def held(self, instance: str, chain: list[int]) -> int:
        held = self.blocks.get(instance, [])
        return next((count for count, block in enumerate(chain) if block not in held), len(chain))


def test_an_adapter_is_asked_for_where_it_is_resident() -> None:
    directory: Any = Directory()
    router = Router(directory)
    directory.announce("decode-1", resident=False)
    directory.announce("decode-2", resident=True)
    prompt = PromptLoad(list(range(50)))
    assert {router.pick("a", load=prompt) for _ in range(3)} == {"decode-2"}
    assert {router.pick("m", load=PromptLoad(list(range(8)))) for _ in range(30)} == {
        "decode-1",
        "decode-2",
    }
    directory.announce(
        "decode-2", resident=True, prefill_default=150.0
    )  # shorter to wait for than to load
    assert router.pick("a", load=prompt) == "decode-2"
    directory.announce("decode-2", resident=True, seq=1, prefill_default=500.0)
    assert router.pick("a", load=prompt) == "decode-1"
    directory.announce("decode-1", resident=False, seq=1, adapter_load=2.0)  # what it takes there
    assert router.pick("a", load=prompt) == "decode-2"


def test_what_loads_it_just_now_is_asked_again() -> None:
    directory: Any = Directory()
    router = Router(directory)
    for name in ("decode-1", "decode-2"):
        directory.announce(name, resident=False)
    first = router.pick("a", load=PromptLoad(list(range(5))))
    assert {router.pick("a", load=PromptLoad(list(range(5)))) for _ in range(5)} == {first}


def test_an_adapter_s_blocks_are_told_from_its_model_s() -> None:
    directory: Any = Directory()
    tokens = list(range(41))
    index: Any = Index(decode_1=chain(tokens, 4), decode_2=chain(tokens, 4, ROOT))
    router = Router(directory, index)
    for name in ("decode-1", "decode-2"):
        directory.announce(name, resident=True)
    assert {router.pick("m", load=PromptLoad(tokens)) for _ in range(3)} == {"decode-1"}
    assert {router.pick("a", load=PromptLoad(tokens)) for _ in range(3)} == {"decode-2"}


# -------------------------------------------------------------------------------------------------------------- gateway
class Adapting(FakeDecode):
    """Has an adapter of the fake model, and one of a model that nobody tokenizes for."""

    def models(self) -> list[ModelCard]:
        (base,) = super().models()
        more = [("polite", MODEL, 1_760_000_000), ("lost", "elsewhere", 0)]
        return [
            base,
            *(replace(base, name=n, parent=p, created=c, resident=False) for n, p, c in more),
        ]


async def test_adapters_are_listed_behind_their_model() -> None:
    async with world() as here, running(Adapting(None, await memory_bus(here.hub, "decode"))):
        await settle()
        assert list(servable(here.service.bus.directory)) == [MODEL, "polite"]
        base, polite = (await here.get("/v1/models").done()).json()["data"]
        assert polite == base | {"id": "polite", "parent": MODEL, "created": 1_760_000_000}
        assert "parent" not in base
        assert (await here.get("/v1/models/polite").done()).json() == polite
        assert (await here.get("/v1/models/lost").done()).status == 404
        assert accepts_images(here.service.bus.directory, "polite")


async def test_a_request_names_the_adapter_as_its_model() -> None:
    async with world() as here, running(Adapting(None, await memory_bus(here.hub, "decode"))):
        await settle()
        reply = await here.ask(model="polite", stream=False).done()
        assert (reply.status, reply.json()["model"]) == (200, "polite")
        assert here.tokenizer.requests[-1].model == "polite"
        unknown = await here.ask(model="rude", stream=False).done()
        assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "polite" in unknown.json()["error"]["message"]


async def test_the_base_of_a_name() -> None:
    hub = MemoryHub()
    bus = await memory_bus(hub, "gateway")
    async with running(Adapting(None, await memory_bus(hub, "decode"))):
        await settle()
        assert [bus.directory.base_of(name) for name in ("polite", MODEL, "unknown")] == [
            MODEL,
            MODEL,
            "unknown",
        ]
    await bus.close()


# ------------------------------------------------------------------------------------------------------------------ CLI
def folder_of(path: Path, *, whole: bool = True) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    if whole:
        (path / "adapter_model.safetensors").write_bytes(b"")
    return path


def test_up_takes_adapters_by_name_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, half = folder_of(tmp_path / "good"), folder_of(tmp_path / "half", whole=False)
    monkeypatch.chdir(tmp_path)
    assert models.resolve_adapters(["polite=good", f"b={good}"], 1) == [
        f"polite={good}",
        f"b={good}",
    ]
    for given, named in (
        (["good"], "'good'"),
        ([f"a={half}"], "adapter_model.safetensors"),
        (["a=/nowhere"], "'/nowhere'"),
    ):
        with pytest.raises(ConfigError) as caught:
            models.resolve_adapters(given, 1)
        assert caught.value.param == "--adapter"
        assert named in caught.value.message
    with pytest.raises(ConfigError) as caught:
        models.resolve_adapters([f"a={good}"], 2)
    assert caught.value.param == "--adapter"


def test_up_tells_every_engine_of_them(tmp_path: Path) -> None:
    from motet_cli.supervision import up

    good = folder_of(tmp_path / "good")
    stack = up.parse_options(
        parser().parse_args(["up", "--port", "0", "--prefill", "1", "--adapter", f"polite={good}"])
    ).stack
    engines = [spec for spec in stack.services() if spec.role in ("decode", "prefill")]
    assert len(engines) == 2
    for spec in engines:
        assert spec.argv[spec.argv.index("--adapters") + 1] == f"polite={good}"
    assert not any("--adapters" in spec.argv for spec in stack.services() if spec not in engines)


def test_models_are_printed_with_their_parents(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [
        Listed("pocket", "chat", "ready", ""),
        Listed("polite", "chat", "ready", "pocket"),
        *(
            Listed(f"a-{kind}", kind, "starting", "")
            for kind in ("speech", "transcription", "embedding", "image")
        ),
    ]
    monkeypatch.setattr(Server, "listed", lambda self: listed)
    assert list_models(parser().parse_args(["models", "--url", "http://127.0.0.1:9"])) == 0
    out = capsys.readouterr().out
    assert "  pocket  (chat, ready)\n" in out
    assert "  polite  (adapter of pocket, ready)\n" in out
    for kind in ("speech", "transcription", "embedding", "image"):
        assert f"  a-{kind}  ({kind}, starting)\n" in out
