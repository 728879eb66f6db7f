"""Define the processes with which a machine takes part in a stack that it has joined."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from motet_cli.checkpoints.model_folders import ModelFolder, local_folder
from motet_cli.hub.reference import parse_reference
from motet_cli.joining.choice import COUNTED, Choice
from motet_cli.joining.errors import ModelMismatch
from motet_cli.joining.messages import ModelOffer, ServiceOffer, StackOffer
from motet_cli.joining.offer import files_digest, model_key
from motet_cli.stack_file.schema import StackFile
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import PeerNetwork
from motet_cli.supervision.stack import Stack
from motet_cli.supervision.up import stack_of
from motet_shared.errors import ConfigError

DRAIN = 5.0  # seconds that replies have to end on Ctrl-C, before they go on elsewhere
_LONGEST_DRAIN = 3600  # seconds; the order to leave sets the actual limit
_FLAGS = {"asr": "--asr", "tts": "--tts", "speakers": "--speakers", "diffusion": "--draw"} | {
    "embedding": "--embed",
    "ranking": "--rank",
}


def joined_stack(
    offer: StackOffer, chosen: Sequence[Choice], counts: Mapping[str, int], args: Namespace
) -> Stack:
    """Return the part of a stack that this machine is to run, without addresses.

    args: the command line of `motet join`: models, devices, and what `motet up` has too. Raises
    ConfigError for a model that this machine lacks, ModelMismatch for one that differs.
    """
    from motet_cli.main import up_arguments  # it imports the commands' arguments

    taken = [one.service for one in chosen if one.taken]
    keys = _models_of(offer, taken)
    sources = {key: _source(offer.models[key], dict(_given(args.model))) for key in keys}
    words = ["--config=none", "--film=none", *offer.flags, *_own_flags(args, counts)]
    words += _model_flags(offer, sources)
    found = up_arguments(words)
    tables = {
        offer.models[key].name: msgspec.structs.replace(
            offer.file.models[offer.models[key].name], source=source
        )
        for key, source in sources.items()
        if offer.models[key].declared
    }
    found.stack_file = StackFile(roles=offer.file.roles, models=tables)
    stack = stack_of(found)
    _check_files(offer, keys, stack)
    return stack


def joined_services(
    stack: Stack, chosen: Sequence[Choice], network: PeerNetwork, nats_url: str
) -> list[ChildSpec]:
    """Return the processes of the chosen services, connected to the first host."""
    stack = replace(stack, nats_url=nats_url, credentials=network.folder, network=network)
    taken = {(one.service.role, one.service.model) for one in chosen if one.taken}
    return [
        replace(
            spec,
            argv=(*spec.argv, "--drain-timeout", str(_LONGEST_DRAIN)),
            drain=DRAIN,
        )
        for spec in stack.services()
        if (spec.role, None) in taken
        or (spec.role, model_key(spec.role, spec.model or "")) in taken
    ]


def _models_of(offer: StackOffer, taken: Sequence[ServiceOffer]) -> list[str]:
    """Return the keys of the models whose files are needed here.

    A tokenizer needs those of the language models that run beside it; alone, those of all.
    """
    keys = [one.model for one in taken if one.model is not None]
    language = [key for key in keys if key.startswith("decode/")]
    if not language and any(one.role == "tokenizer" for one in taken):
        keys += [key for key in offer.models if key.startswith("decode/")]
    return list(dict.fromkeys(keys))


def _given(pairs: Sequence[str]) -> Iterator[tuple[str, str]]:
    for pair in pairs:
        name, separator, folder = pair.partition("=")
        if not separator or not name or not Path(folder).expanduser().exists():
            raise ConfigError(
                f"--model: {pair!r} is no name and folder; give NAME=FOLDER", param="--model"
            )
        yield name, str(Path(folder).expanduser().resolve())


def _source(model: ModelOffer, given: Mapping[str, str]) -> str:
    """Return where this machine has a model: as given, as on the first host, or by its name."""
    if model.name in given:
        return given[model.name]
    if local_folder(model.source) is not None or Path(model.source).is_file():
        return model.source
    if not os.path.isabs(model.source) and parse_reference(model.source) is not None:
        return model.source
    if local_folder(model.name) is not None:
        return model.name
    raise ConfigError(
        f"--model: this machine has no {model.name!r}, which the first host has at"
        f" {model.source!r}; give --model {model.name}=FOLDER, or copy it to a folder of MOTET_MODELS",
        param="--model",
    )


def _own_flags(args: Namespace, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the flags of `motet up` that are of this machine: devices, memory, counts, log, site."""
    for device in args.device:
        yield f"--device={device}"
    for share in args.memory_share:
        yield f"--memory-share={share}"
    for role, count in counts.items():
        if role in COUNTED:
            yield f"--{role}={count}"
    yield f"--log-format={args.log_format}"
    if args.site is not None:
        yield f"--site={args.site}"


def _model_flags(offer: StackOffer, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the flag of each model; of kinds that are not run here, `none`."""
    own = {key: source for key, source in sources.items() if not offer.models[key].declared}
    for key, source in own.items():
        if key.startswith("decode/"):
            yield f"--llm={offer.models[key].name}={source}"
    for role, flag in _FLAGS.items():
        found = [key for key in own if key.startswith(f"{role}/")]
        yield f"{flag}={offer.models[found[0]].name}={own[found[0]]}" if found else f"{flag}=none"


def _check_files(offer: StackOffer, keys: Sequence[str], stack: Stack) -> None:
    """Raise ModelMismatch if the files of a model are not those of the first host."""
    folders: dict[str, ModelFolder] = {}
    for model in stack.models:
        folders[model_key("decode", model.name)] = model
    for one in stack.declared:
        folders[model_key(one.role, one.name)] = one.folder
    singles = {"asr": stack.asr, "tts": stack.tts, "speakers": stack.speakers} | {
        "diffusion": stack.draw,
        "embedding": stack.embed,
        "ranking": stack.rank,
    }
    for role, found in singles.items():
        if found is not None:
            folders[model_key(role, found.name)] = found
    for key in keys:
        if files_digest(folders[key].path) != offer.models[key].digest:
            name = offer.models[key].name
            raise ModelMismatch(
                f"--model: {name} in {folders[key].path} has other files than on the first"
                " host, so replies would change when they move; copy its folder, or give the one"
                f" that is equal with --model {name}=FOLDER",
                param="--model",
            )
