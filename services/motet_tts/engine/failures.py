"""Name the error of a sentence that fails although it is computed alone."""

from __future__ import annotations

import torch
from torch import Tensor

from motet_kernels.runtime.missing_memory import is_out_of_memory
from motet_shared.errors import InternalError, MotetError, Overloaded, model_error


def failure(error: Exception, device: torch.device) -> MotetError:
    """Return the error of a sentence whose computation raised `error`.

    Raises an error of a GPU other than missing memory, which leaves the process without its use.
    """
    if is_out_of_memory(error):
        return Overloaded(
            "memory: the sentence does not fit beside what is in use; try again later"
        )
    if isinstance(error, MotetError):
        return error
    if device.type != "cpu":
        raise error
    return model_error(error, "the sentence ends")


def not_finite() -> InternalError:
    """Return the error of a sentence for which the model computed NaN or infinity."""
    return InternalError("the model computed NaN or infinity; the sentence ends")


def finite_rows(values_B: Tensor) -> Tensor:
    """Return True for each row without NaN or infinity: both survive a sum."""
    return values_B.flatten(1).sum(-1, dtype=torch.float32).isfinite()
