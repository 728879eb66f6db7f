"""Define the error that recipes raise on a wrong value."""

from __future__ import annotations


class RecipeError(ValueError):
    """Report a value that a recipe cannot use: its name, what it is and what it must be.

    param: the name of the argument, the recipe field or the flag.
    """

    def __init__(self, message: str, *, param: str):
        super().__init__(message)
        self.param = param
