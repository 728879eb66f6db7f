"""Configure a client for a server: `motet connect claude-code|codex|opencode|openai-agents|continue`."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet_cli.commands.keys import create_key, tenants_path
from motet_cli.commands.server import Server, read_key
from motet_shared.credentials import write_private
from motet_shared.errors import ConfigError

KEY_VARIABLE = "MOTET_API_KEY"
_NO_KEY = "none"  # of a server without tenants, which takes any


@dataclass(frozen=True, slots=True)
class Target:
    """Hold what a client is configured with. url: of the server, without /v1."""

    url: str
    model: str
    key: str


@dataclass(frozen=True, slots=True)
class Client:
    """Describe the configuration of a client.

    file: where it reads it, below the home folder; "" for variables of a shell. render: returns a
    text, or a document that is merged into the JSON of the file. variables: returns those that the
    client needs besides.
    """

    file: str
    render: Callable[[Target], str | dict[str, Any]]
    variables: Callable[[Target], dict[str, str]] = lambda _target: {}


def _claude_code(target: Target) -> dict[str, Any]:
    tiers = ("OPUS", "SONNET", "HAIKU")
    named = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": target.model for tier in tiers}
    access = {"ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": target.key}
    return {"env": access | {"ANTHROPIC_MODEL": target.model} | named}


def _codex(target: Target) -> str:
    return (
        f"model = {json.dumps(target.model)}\n"
        'model_provider = "motet"\n\n'
        "[model_providers.motet]\n"
        'name = "Motet"\n'
        f"base_url = {json.dumps(target.url + '/v1')}\n"
        f'env_key = "{KEY_VARIABLE}"\n'
        'wire_api = "responses"\n'
    )


def _opencode(target: Target) -> dict[str, Any]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Motet",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: {"name": target.model}},
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"motet": provider},
        "model": f"motet/{target.model}",
    }


def _continue(target: Target) -> str:
    return (
        "name: Motet\n"
        "version: 1.0.0\n"
        "schema: v1\n"
        "models:\n"
        f"  - name: {json.dumps(target.model)}\n"
        "    provider: openai\n"
        f"    model: {json.dumps(target.model)}\n"
        f"    apiBase: {json.dumps(target.url + '/v1')}\n"
        f"    apiKey: {json.dumps(target.key)}\n"
    )


def _openai_variables(target: Target) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "OPENAI_DEFAULT_MODEL": target.model,
    }


CLIENTS: dict[str, Client] = {
    "claude-code": Client(".claude/settings.json", _claude_code),
    "codex": Client(".codex/config.toml", _codex, lambda target: {KEY_VARIABLE: target.key}),
    "opencode": Client(".config/opencode/opencode.json", _opencode),
    "openai-agents": Client("", lambda _target: "", _openai_variables),
    "continue": Client(".continue/config.yaml", _continue),
}


def run(args: Namespace) -> int:
    """Print the configuration of `args.client`, or write it with `--write`."""
    client = CLIENTS[args.client]
    if args.write and not client.file:
        raise ConfigError(
            f"--write: {args.client} reads no file; omit it, and let a shell read what is printed",
            param="--write",
        )
    target = Target(args.url.rstrip("/"), _model(args), _key(args))
    variables = client.variables(target)
    if client.file:
        _deliver(Path.home() / client.file, client.render(target), write=args.write)
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _model(args: Namespace) -> str:
    """Return `--model`, or the first chat model that the server lists."""
    if args.model:
        return str(args.model)
    with Server(args.url, read_key(args.api_key_file)) as server:
        models = server.models()
    if not models:
        raise ConfigError(
            f"--model: {args.url} serves no chat model; name one, or start one with `motet up --llm`",
            param="--model",
        )
    return models[0]


def _key(args: Namespace) -> str:
    """Return a new key of `--tenant`, else the key that this command uses itself."""
    if args.tenant:
        path = tenants_path(args.tenants_file)
        key, about = create_key(path, args.tenant, f"motet connect {args.client}")
        print(about, file=sys.stderr)
        return key
    return read_key(args.api_key_file) or _NO_KEY


def _deliver(path: Path, rendered: str | dict[str, Any], *, write: bool) -> None:
    if isinstance(rendered, dict):
        text = json.dumps(_merged(_document(path), rendered) if write else rendered, indent=2)
        text += "\n"
    else:
        text = rendered
    if not write:
        print(f"{path}:", file=sys.stderr)
        print(text, end="")
        return
    if isinstance(rendered, str) and path.exists():
        raise ConfigError(
            f"--write: {path} exists and is not JSON; omit --write, and add what is printed by hand",
            param="--write",
        )
    _write(path, text)
    print(f"{path} is written", file=sys.stderr)


def _document(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, empty if there is none. Raises ConfigError."""
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        found = error
    if not isinstance(found, dict):
        raise ConfigError(
            f"--write: {path} has no JSON object that can be read; omit --write, and add what is"
            " printed by hand",
            param="--write",
        )
    return found


def _merged(known: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Return a document with the fields of both; `added` wins."""
    result = dict(known)
    for name, value in added.items():
        old = result.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[name] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read, as it has a key."""
    try:
        write_private(path, text)
    except OSError as error:
        raise ConfigError(
            f"--write: {path} cannot be written: {error.strerror}; check the permissions of its folder",
            param="--write",
        ) from None
