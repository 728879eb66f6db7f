"""Which decode instance takes a request: a library over what heartbeats say, not another hop."""

from __future__ import annotations

from collections.abc import Collection

from motet_shared.discovery import Directory
from motet_shared.errors import Unavailable
from motet_shared.messages import Heartbeat

ROLE = "decode"


class Router:
    """Least load first. Load is what others have there, as last announced, plus what we have there right now."""

    def __init__(self, directory: Directory):
        self._directory = directory
        self._ours: dict[str, tuple[int, int]] = {}  # instance: heartbeat number, our streams when it came
        self._turn = 0

    def pick(self, model: str, avoid: Collection[str] = ()) -> str | None:
        """A ready instance that serves `model` and is not suspected; None if there is none."""
        ready = [beat for beat in self._directory.ready(ROLE, model=model) if beat.instance not in avoid]
        if not ready:
            return None
        self._turn += 1  # rotates the order in which equals are met
        start = self._turn % len(ready)
        return min(ready[start:] + ready[:start], key=self._load).instance

    async def wait(self, model: str, avoid: Collection[str], patience: float) -> str:
        """The same, waiting for an instance to appear. Raises Unavailable after `patience` seconds."""
        try:
            instance = await self._directory.wait_for(lambda _: self.pick(model, avoid), patience)
        except TimeoutError:
            message = f"no decode instance for model {model!r} is ready after {patience:g} s; retry in a moment"
            raise Unavailable(message, param="model") from None
        return str(instance)

    def context(self, model: str, limit: int) -> int:
        """Longest prompt plus output: `limit`, or what the decode instances have room for, if that is less."""
        cards = [c for beat in self._directory.ready(ROLE, model=model) for c in beat.models if c.name == model]
        return min([limit, *(card.context for card in cards if card.context > 0)])

    def _load(self, beat: Heartbeat) -> float:
        ours = self._directory.outstanding(beat.instance)
        number, ours_then = self._ours.get(beat.instance, (-1, 0))
        if number != beat.seq:
            self._forget_the_gone()
            self._ours[beat.instance] = beat.seq, ours_then = beat.seq, ours
        return max(0.0, beat.load.get("active", 0.0) - ours_then) + ours  # active: running and queued

    def _forget_the_gone(self) -> None:
        alive = {beat.instance for beat in self._directory.instances(ROLE)}
        self._ours = {instance: seen for instance, seen in self._ours.items() if instance in alive}
