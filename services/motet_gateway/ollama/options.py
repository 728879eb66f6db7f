"""Define `options`: the sampling parameters of Ollama, and convert them to those of a chat.

Parameters of loading (`num_ctx`, `num_gpu`, …) belong to the stack and are ignored as hints
(`openai/hints.py`); other samplers of llama.cpp are accepted at the values that switch them off.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from motet_gateway.http.fields import Count, Int64, Penalty, Ratio, Strict
from motet_gateway.openai.schema import SamplingFields, check_stops
from motet_shared.errors import UnsupportedParameter

MAX_STOPS = 64
OFF: dict[str, tuple[float, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "penalize_newline": (False,),
}


class Options(Strict):
    """Sampling parameters; what is left out is the model's own recommendation.

    num_predict: most tokens of the reply, without a limit at 0 or less. seed: -1 chooses one.
    repeat_last_n: tokens that `repeat_penalty` counts; here always all of them.
    """

    num_predict: Int64 | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Count | None = None
    top_p: Ratio | None = None
    min_p: Ratio | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    repeat_last_n: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    tfs_z: Any = None
    typical_p: Any = None
    penalize_newline: Any = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingFields` by name.

        Raises BadRequest or UnsupportedParameter by the option's path.
        """
        self._check()
        limit = self.num_predict
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        check_stops(stops, MAX_STOPS, "options.stop")
        return {
            "max_tokens": limit if limit is not None and limit > 0 else None,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed == -1 else self.seed,
            "stop": stops or None,
            "repetition_penalty": self._repetition(),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }

    def _repetition(self) -> float | None:
        return 1.0 if self.repeat_last_n == 0 else self.repeat_penalty

    def _check(self) -> None:
        for name, accepted in OFF.items():
            value = getattr(self, name)
            if value is not None and value not in accepted:
                param = f"options.{name}"
                message = f"`{param}` {value!r:.40} is not supported; leave it out"
                raise UnsupportedParameter(message, param=param)
        is_windowed = self.repeat_last_n is not None and self.repeat_last_n > 0
        if is_windowed and self.repeat_penalty not in (None, 1):
            param = "options.repeat_last_n"
            message = (
                f"`{param}` {self.repeat_last_n} is not supported: `repeat_penalty` counts all"
                " tokens; send -1 or leave it out"
            )
            raise UnsupportedParameter(message, param=param)


def apply_options(body: SamplingFields, options: Options | None) -> None:
    """Set the sampling parameters of a chat or a completion."""
    for name, value in (options or Options()).sampling().items():
        setattr(body, name, value)
