"""Serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

The gateway links an adapter into the folder that decode workers watch (`--adapter-folder`, of both),
and answers once all of them announce it. Workers that start later find it in the folder.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from msgspec import Meta

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Int64, Strict
from motet_gateway.http.problems import NotFound
from motet_shared.errors import BadRequest, Unavailable
from motet_shared.messages import ModelCard
from motet_shared.wire.discovery import Directory

FILES = ("adapter_config.json", "adapter_model.safetensors")
TIMEOUT = 60.0  # seconds for all workers to notice a change
_MAX_BODY = 2**16
_PLAIN = b"text/plain; charset=utf-8"

AdapterName = Annotated[
    str, Meta(min_length=1, max_length=200, pattern=r"^(?![\s\S]*[\x00-\x1f\x7f])")
]


class LoadAdapterBody(Strict):
    """Body of POST /v1/load_lora_adapter.

    lora_path: absolute path of a folder saved by PEFT, which the workers can read, too.
    load_inplace: replace an adapter of that name.
    """

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterBody(Strict):
    """Body of POST /v1/unload_lora_adapter; `lora_int_id` is accepted, as the name suffices."""

    lora_name: AdapterName
    lora_int_id: Int64 | None = None


_load_decoder, _unload_decoder = Decoder(LoadAdapterBody), Decoder(UnloadAdapterBody)


async def load_adapter(service: GatewayContext, http: Exchange) -> None:
    """Link an adapter, and answer once each decode worker has read it.

    Raises BadRequest for a name that is taken, a folder that is no adapter, or an adapter that no
    model can use; NotFound for a missing folder.
    """
    folder = _folder_of(service)
    body = _load_decoder.decode(await http.body(_MAX_BODY))
    path = _checked_path(body.lora_path)
    directory, link = service.bus.directory, _link_of(folder, body.lora_name)
    if body.load_inplace and _exists(link):
        _unlink(link, body.lora_name)
        await _wait(directory, body.lora_name, present=False)
    _check_free(directory, link, body.lora_name)
    _link(link, path)
    try:
        await _wait(directory, body.lora_name, present=True)
        _check_usable(_cards(directory, body.lora_name))
    except BaseException:
        link.unlink(missing_ok=True)
        raise
    await http.reply(200, f"{body.lora_name} is served".encode(), content_type=_PLAIN)


async def unload_adapter(service: GatewayContext, http: Exchange) -> None:
    """Remove an adapter's link, and answer once no decode worker announces it.

    Replies that use it are finished with it. Raises NotFound if it was not loaded by this route.
    """
    folder = _folder_of(service)
    body = _unload_decoder.decode(await http.body(_MAX_BODY))
    link = _link_of(folder, body.lora_name)
    if not _exists(link):
        raise NotFound(
            f"lora_name: {body.lora_name!r} is not loaded; load it with POST /v1/load_lora_adapter",
            param="lora_name",
        )
    _unlink(link, body.lora_name)
    await _wait(service.bus.directory, body.lora_name, present=False)
    await http.reply(200, f"{body.lora_name} is unloaded".encode(), content_type=_PLAIN)


def _folder_of(service: GatewayContext) -> Path:
    if service.config.adapter_folder is None:
        raise NotFound(
            "this server loads no adapters while it runs; start it with --adapter-folder FOLDER"
        )
    return service.config.adapter_folder


def _checked_path(given: str) -> Path:
    path = Path(given)
    if not path.is_absolute() or "\x00" in given:
        raise BadRequest(
            f"lora_path: {given!r} is not absolute; give the whole path of a folder",
            param="lora_path",
        )
    if not path.is_dir():
        raise NotFound(
            f"lora_path: {given!r} is no folder; give one saved by PEFT", param="lora_path"
        )
    if missing := [name for name in FILES if not (path / name).is_file()]:
        raise BadRequest(
            f"lora_path: {given!r} lacks {' and '.join(missing)}; give a folder saved by PEFT",
            param="lora_path",
        )
    return path.resolve()


def _link_of(folder: Path, name: str) -> Path:
    """Return the entry of an adapter. Raises BadRequest for a name too long for a file system."""
    entry = quote(name, safe=" @+=,:")
    entry = "%2E" + entry[1:] if entry.startswith(".") else entry
    if len(entry) > 255:
        raise BadRequest(
            f"lora_name: {name[:40]!r}… is too long for a file name; give a shorter one",
            param="lora_name",
        )
    return folder / entry


def _exists(link: Path) -> bool:
    """Return True for an entry of the folder, also if it links to nothing any more."""
    return os.path.lexists(link)


def _check_free(directory: Directory, link: Path, name: str) -> None:
    announced = [card for role in ("tokenizer", "decode") for card in _cards(directory, name, role)]
    if _exists(link) or announced or name in directory.presence.models("decode"):
        raise BadRequest(
            f"lora_name: {name!r} is taken; give another name, or `load_inplace` for an adapter"
            " loaded here",
            param="lora_name",
        )


def _check_usable(cards: list[ModelCard]) -> None:
    """Raise BadRequest if no model can serve the adapter; the others' reasons do not matter."""
    if all(card.problem for card in cards):
        raise BadRequest(f"lora_path: {cards[0].problem}", param="lora_path")


def _link(link: Path, path: Path) -> None:
    try:
        link.symlink_to(path)
    except FileExistsError:  # another request was quicker
        raise BadRequest(f"lora_name: {link.name!r} is taken", param="lora_name") from None
    except OSError as error:
        raise Unavailable(
            f"adapter_folder: cannot link into {str(link.parent)!r}: {error.strerror}; make it"
            " writable for the gateway"
        ) from None


def _unlink(link: Path, name: str) -> None:
    if not link.is_symlink():
        raise BadRequest(
            f"lora_name: {name!r} is a folder in --adapter-folder; move it away instead",
            param="lora_name",
        )
    with contextlib.suppress(FileNotFoundError):
        link.unlink()


def _cards(directory: Directory, name: str, role: str = "decode") -> list[ModelCard]:
    beats = directory.instances(role)
    return [card for beat in beats for card in beat.models if card.name == name]


async def _wait(directory: Directory, name: str, *, present: bool) -> None:
    """Wait until all decode workers, or none of them, announce an adapter.

    Raises Unavailable if that takes longer than TIMEOUT.
    """

    def is_settled(here: Directory) -> bool:
        ready, cards = here.ready("decode"), _cards(here, name)
        return bool(ready) and len(cards) >= len(ready) if present else not cards

    try:
        await directory.wait_for(is_settled, TIMEOUT)
    except TimeoutError:
        raise Unavailable(
            f"lora_name: not all decode workers have noticed {name!r}; give them the gateway's"
            " --adapter-folder",
            param="lora_name",
        ) from None
