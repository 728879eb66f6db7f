"""Run silero's network: 32 ms of audio of many streams in, their speech probabilities out.

Only the weights come from the package `silero-vad`; its Python code would load torch and
torchaudio, which this process does not need.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from motet_shared.errors import ConfigError

RATE = 16000
FRAME = 512  # samples
FRAME_MS = FRAME * 1000 // RATE
CONTEXT = 64  # samples of the previous frame, which the network reads too

Floats = NDArray[np.float32]


class StreamState:
    """Hold the state of the network for one stream: recurrent state, and the last samples."""

    def __init__(self) -> None:
        self.state: Floats = np.zeros((2, 128), np.float32)
        self.tail: Floats = np.zeros(CONTEXT, np.float32)


class Silero:
    """Run the network.

    Calls may come from any thread, one at a time.
    """

    name = "silero-vad"

    def __init__(self, path: str = "", threads: int = 1):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        file = path or str(packaged())
        try:
            self._session = onnxruntime.InferenceSession(
                file, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise ConfigError(f"model: {file} cannot be loaded: {error}") from error
        names = {tensor.name for tensor in self._session.get_inputs()}
        if names != {"input", "state", "sr"}:
            raise ConfigError(
                f"model: {file} takes {sorted(names)}; silero-vad 5 or 6 takes input, sr and state"
            )
        self._rate = np.array(RATE, np.int64)

    def step(self, frames: list[Floats], stream_states: list[StreamState]) -> list[float]:
        """Return the speech probability of one frame per stream and update the streams' memories.

        frames: (FRAME,) each, in -1 to 1.
        """
        tails = [stream_state.tail for stream_state in stream_states]
        inputs = np.concatenate(
            [np.stack(tails), np.stack(frames)], axis=1
        )  # (streams, CONTEXT + FRAME)
        states = np.stack(
            [stream_state.state for stream_state in stream_states], axis=1
        )  # (2, streams, 128)
        feeds = {"input": inputs, "state": states, "sr": self._rate}
        probabilities, states = self._session.run(["output", "stateN"], feeds)
        for number, stream_state in enumerate(stream_states):
            stream_state.state = states[:, number]
            stream_state.tail = inputs[number, -CONTEXT:]
        return [float(probability) for probability in probabilities[:, 0]]


def packaged() -> Path:
    """Return the model file of the installed package. Raises ConfigError without the package."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("model: silero-vad is not installed; pip install 'motet[vad]'")
    return Path(spec.submodule_search_locations[0]) / "data" / "silero_vad_16k_op15.onnx"
