"""JSON into structs, with errors that name the field, the value and what was expected."""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from motet_shared.errors import BadRequest, MalformedMessage, UnsupportedParameter

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_LONGEST = 80


class Decoder(Generic[T]):
    """Decodes bytes as `cls`: MalformedMessage if they are not JSON, BadRequest if they are the wrong JSON."""

    def __init__(self, cls: type[T]):
        self._decode = msgspec.json.Decoder(cls).decode

    def decode(self, data: bytes | str) -> T:
        try:
            return self._decode(data)
        except msgspec.ValidationError as error:
            raise explain(str(error), data) from None
        except (msgspec.DecodeError, UnicodeError) as error:
            raise MalformedMessage(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise MalformedMessage("the body is nested too deeply") from None


def explain(problem: str, data: bytes | str) -> BadRequest:
    """msgspec's validation message as an error that carries the parameter's path and shows its value."""
    match = _AT.match(problem)
    what, path = (match["what"], match["path"] or "") if match else (problem, "")
    unknown, missing = _UNKNOWN.fullmatch(what), _MISSING.fullmatch(what)
    if unknown:
        param = _join(path, unknown["name"])
        return UnsupportedParameter(f"unknown parameter `{param}`; remove it", param=param)
    if missing:
        param = _join(path, missing["name"])
        return BadRequest(f"`{param}` is required", param=param)
    where = path.lstrip(".")
    return BadRequest(f"`{where or 'body'}`: {_lower(what)}{_got(path, data)}", param=where or None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _got(path: str, data: bytes | str) -> str:
    """ " (value …)", so that the client need not search for what is wrong. Only errors pay for this second look."""
    try:
        value: Any = msgspec.json.decode(data)
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LookupError, TypeError, ValueError):
        return ""
    return f" (value {text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'})"
