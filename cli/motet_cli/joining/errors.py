"""Define the errors of joining a stack, which the first host sends by their codes.

An incompatible wire version is a `ProtocolMismatch`, as it is between processes.
"""

from __future__ import annotations

from motet_shared.errors import BadRequest, MotetError, from_wire


class TokenUnknown(BadRequest):
    """Report a token that the stack has not issued, or not since its last start."""

    code = "token_unknown"


class TokenExpired(BadRequest):
    """Report a token whose time is over."""

    code = "token_expired"


class TokenUsed(BadRequest):
    """Report a token that as many hosts have used as it was issued for."""

    code = "token_used"


class AuthorityMismatch(MotetError):
    """Report a host whose certificate authority is not the one that the token names."""

    code = "authority_mismatch"


class ModelMismatch(BadRequest):
    """Report a model of this machine whose files differ from those of the stack."""

    code = "model_mismatch"


_BY_CODE = {cls.code: cls for cls in (TokenUnknown, TokenExpired, TokenUsed)}


def refusal(code: str, message: str, param: str | None) -> MotetError:
    """Return the error that the first host has sent."""
    cls = _BY_CODE.get(code)
    return from_wire(code, message, param=param) if cls is None else cls(message, param=param)
