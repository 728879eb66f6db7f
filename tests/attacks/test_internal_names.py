"""What errors show to clients: no subject and no instance of the stack; and models that are not known are 404."""

from __future__ import annotations

import re

import pytest

from motet_gateway.http.problems import Problem
from motet_shared.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    Overloaded,
    StreamBroken,
    Unavailable,
    WorkerLost,
)
from motet_shared.testing import MemoryHub, memory_buses, settle
from motet_shared.wire import subjects
from support.clients.gateway_client import World, world
from support.services.fake_services import MODEL

ROLES = (
    "gateway",
    "tokenizer",
    "decode",
    "prefill",
    "encoder",
    "asr",
    "tts",
    "vad",
    "diffusion",
    "embedding",
    "ranking",
    "speakers",
)
INTERNAL = re.compile(r"motet\.v\d|\$SRV|-[0-9a-f]{8}\b")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "kind", [DeadlineExceeded, Draining, InternalError, Overloaded, StreamBroken, Unavailable]
)
def test_errors_show_neither_subjects_nor_instances(kind: type[Unavailable], role: str) -> None:
    instance = f"{role}-0123abcd"
    for text in (
        subjects.open_at(instance),
        subjects.operation(role, "chat"),
        subjects.frames_to(instance),
        subjects.open_reply(instance, 7),
        subjects.service("PING", role, instance),
        subjects.jobs("draw"),
        instance,
    ):
        shown = Problem.of(kind(f"no answer from {text}: it has 5 bytes")).body().decode()
        assert not INTERNAL.search(shown), shown
        assert "it has 5 bytes" in shown


def test_what_is_no_instance_stays() -> None:
    for text in (
        "model 'decode-it' is unknown",
        "pocket-asr does not hear",
        "send 100-200 tokens",
        "tts-1 is here",
    ):
        assert Problem.of(WorkerLost(text)).message == text


async def test_a_message_too_large_names_its_size_and_the_limit() -> None:
    async with world(patience=0.2, max_body=8 << 20) as here:
        here.hub.max_payload = 1 << 16
        for bus in here.buses:
            bus.frames.max_payload = 1 << 16
        http = await here.ask(messages=[{"role": "user", "content": "a" * (1 << 17)}]).done()
    assert http.status == 413, http.body
    message = http.json()["error"]["message"]
    assert "65536" in message
    assert not INTERNAL.search(message)
    assert not re.search(r"subject|max_payload|BlobRef|tokenizer", message)


async def status(here: World, model: str) -> tuple[int, str, str | None]:
    http = await here.ask(model=model).done()
    error = http.json()["error"]
    return http.status, error["code"], error["param"]


async def test_an_unknown_model_is_404_while_the_tokenizer_is_down() -> None:
    async with world(patience=0.2) as here:
        await lose(here, "tokenizer")
        assert await status(here, "gpt-99") == (404, "model_not_found", "model")
        assert (await status(here, MODEL))[:2] == (503, "unavailable")


async def test_while_nothing_is_known_a_model_may_still_come() -> None:
    hub = MemoryHub()
    async with memory_buses("gateway", hub=hub) as (bus,):
        from motet_pipelines.chat.models import check_known

        with pytest.raises(Unavailable):
            check_known(bus.directory, "gpt-99")


async def lose(here: World, role: str) -> None:
    """The only instance of the role falls silent for good."""
    directory = here.buses[0].directory
    for beat in directory.instances(role):
        directory._remove(beat.instance)
    await settle()
    assert not directory.ready(role)
