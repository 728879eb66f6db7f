"""Define the error that pocket-tts raises on settings and arguments."""

from __future__ import annotations


class PocketError(ValueError):
    """Report a setting or an argument that pocket-tts cannot use: its name, value and remedy.

    param: the setting of `config.json` or the argument.
    """

    def __init__(self, message: str, *, param: str):
        super().__init__(message)
        self.param = param
