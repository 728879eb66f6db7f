"""Decode JSON into structs, with errors that name the field, its value and what was expected."""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar, cast

import msgspec

from motet_gateway.openai.hints import Ignored
from motet_shared.errors import BadRequest, MalformedMessage, UnsupportedParameter

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_LONGEST = 80
_MOST_PROBLEM = 1000  # characters of msgspec's message
_MARGIN = 100  # levels of nesting, and frames, that later steps add to those of a body


class Decoder(Generic[T]):
    """Decode bytes as `cls`.

    Raises MalformedMessage if they are not JSON, BadRequest or UnsupportedParameter if they do not
    fit `cls`.
    """

    def __init__(self, cls: type[T]):
        self._cls = cls
        self._decode = msgspec.json.Decoder(cls).decode
        self._fields: tuple[str, ...] = getattr(cls, "__struct_fields__", ())

    def decode(self, data: bytes | str, ignored: Ignored | None = None) -> T:
        """Return the validated request.

        `ignored` collects and removes the parameters listed in the table of hints; with None they
        are refused like any unknown parameter.
        """
        try:
            found = self._found(data, ignored)
            # Like the wire: fields of type Any may hold integers that it cannot carry.
            msgspec.msgpack.encode(_deeper(found))
        except msgspec.ValidationError as error:
            raise explain(str(error), data) from None
        except (msgspec.DecodeError, UnicodeError) as error:
            raise MalformedMessage(f"the body is not valid JSON: {error}") from None
        except OverflowError:
            raise _too_large(msgspec.json.decode(data)) from None
        except RecursionError:
            raise MalformedMessage("the body is nested too deeply") from None
        if ignored is not None:
            ignored.clear(cast(msgspec.Struct, found))
        return found

    def _found(self, data: bytes | str, ignored: Ignored | None) -> T:
        """Decode strictly; if that fails, decode once more without hints.

        Ordinary requests are decoded only once.
        """
        try:
            return self._decode(data)
        except msgspec.ValidationError as error:
            if ignored is None:
                raise
            try:
                value = msgspec.json.decode(data)
            except (
                msgspec.ValidationError
            ):  # a number out of range: the first error names its field
                raise error from None
            if not ignored.prune(value, self._fields):
                raise
            return msgspec.convert(value, self._cls, str_keys=True)


def _deeper(value: Any) -> Any:
    """Return `value` nested in lists: what is encoded here can be encoded in deeper calls too."""
    for _ in range(_MARGIN):
        value = [value]
    return value


def _too_large(body: Any) -> BadRequest:
    """Return an error that names the first integer in `body` outside of the wire's 64-bit range.

    Called only after encoding has failed, so valid requests are not searched.
    """
    waiting: list[tuple[str, Any]] = [("", body)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            where = path.lstrip(".")
            return BadRequest(
                f"`{where}`: integer out of range; give at most {2**63 - 1}", param=where
            )
        if isinstance(value, dict):
            waiting.extend((f"{path}.{key}", inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend((f"{path}[{index}]", inner) for index, inner in enumerate(value))
    return BadRequest("an integer of the body is out of range")


def explain(problem: str, data: bytes | str) -> BadRequest:
    """Convert msgspec's validation message to an error with the parameter's path and value."""
    if len(problem) > _MOST_PROBLEM:  # it holds a name or a value of the client's
        problem = f"{problem[: _MOST_PROBLEM // 2]}…{problem[-_MOST_PROBLEM // 2 :]}"
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
    """Return " (value …)" for the error message, or an empty string if the value is not found.

    The body is decoded a second time for it, but only for errors.
    """
    try:
        value: Any = msgspec.json.decode(data)
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LookupError, TypeError, ValueError):
        return ""
    return f" (value {text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'})"
