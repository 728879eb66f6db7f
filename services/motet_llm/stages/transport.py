"""Move states between stages: by blob what is known at once, as fed bytes what follows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from motet_llm.config import DecodeConfig
from motet_models.model_config import read_config
from motet_models.omni import speaks
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, ConfigError, Overloaded
from motet_shared.messages import StateRef

from .states import GivenStates, SentStates

_NUMBER = 4  # bytes
_AXES = 3


def sends_states(config: DecodeConfig) -> bool:
    """Return True for the worker of a thinker whose checkpoint has a talker."""
    try:
        return config.stage == "thinker" and speaks(read_config(Path(config.model)))
    except ConfigError:  # reported when the model is loaded
        return False


def store_states(store: BlobStore, sent: SentStates) -> StateRef | None:
    """Put states into the store for one reader; None if there is no room."""
    data = sent.states_RW.contiguous().numpy().data
    try:
        ref = store.put(data, "float32", tuple(sent.states_RW.shape))
    except Overloaded:
        return None
    positions = b"" if sent.positions is None else sent.positions.astype("<i4").tobytes()
    return StateRef(states=ref, start=sent.start, positions=positions)


async def read_given(
    store: BlobStore, ref: StateRef, replaced: int, codes: Sequence[Sequence[int]] = ()
) -> GivenStates:
    """Return states that a request came with. Raises BadRequest for others, BlobError if gone.

    codes: the further codes of the frames of its output.
    """
    blob = ref.states
    if blob.dtype != "float32" or len(blob.shape) != 2 or not blob.nbytes:
        raise BadRequest(
            f"input_states.states: is {blob.dtype} {list(blob.shape)}; give float32 [tokens, hidden]",
            param="input_states",
        )
    if len(ref.positions) % (_AXES * _NUMBER):
        raise BadRequest(
            f"input_states.positions: has {len(ref.positions)} bytes; give int32 [3, tokens]",
            param="input_states",
        )
    data = await store.get(blob)
    states_MW = torch.frombuffer(data, dtype=torch.float32).view(blob.shape)
    positions = np.frombuffer(ref.positions, "<i4").reshape(_AXES, -1) if ref.positions else None
    return GivenStates(states_MW, replaced, positions, codes=codes)


async def received_states(feeds: AsyncIterator[bytes], width: int) -> AsyncIterator[Tensor]:
    """Yield states `[n, width]` of feeds that may cut them. Raises BadRequest for an incomplete one."""
    rest = b""
    size = width * _NUMBER
    async for data in feeds:
        rest += data
        whole = len(rest) - len(rest) % size
        if whole:
            numbers = np.frombuffer(rest[:whole], "<f4").reshape(-1, width)
            rest = rest[whole:]
            yield torch.from_numpy(numbers.copy())
    if rest:
        raise BadRequest(
            f"input: {len(rest)} bytes are no state of {width} numbers", param="input_states"
        )


def split_frames(output: list[int], groups: int) -> tuple[list[int], list[list[int]]]:
    """Return the first code of each frame of an output, and the further ones by frame.

    groups: codes of a frame, which are one after the other. Raises BadRequest for half a frame.
    """
    if len(output) % groups:
        raise BadRequest(
            f"output: {len(output)} codes are no frames of {groups}; give whole ones",
            param="output",
        )
    further = [output[start + 1 : start + groups] for start in range(0, len(output), groups)]
    return output[::groups], further
