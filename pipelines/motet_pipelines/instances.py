"""Which instance of a role is asked, and which models there are to ask for where one service serves them alone."""

from __future__ import annotations

import random

from motet_shared.bus import Bus
from motet_shared.discovery import Directory
from motet_shared.errors import Unavailable, UnknownModel
from motet_shared.messages import ModelCard


def served(directory: Directory, role: str) -> dict[str, ModelCard]:
    """Cards of the models that ready instances of a role announce, by name.

    Those reported lost a moment ago count until they have been silent for long: they come back, or others take their
    place, and who asks one of them waits for that (`pick`). A session that begins meanwhile is no poorer for it.
    """
    cards = {card.name: card for beat in directory.ready(role, suspects=True) for card in beat.models}
    return dict(sorted(cards.items()))


def check_served(directory: Directory, role: str, model: str) -> None:
    """UnknownModel if instances are there and none announces `model`; Unavailable while nobody can know."""
    names = sorted({card.name for beat in directory.instances(role) for card in beat.models})
    if model in names:
        return
    if not directory.ready(role):
        raise Unavailable(f"model {model!r}: no {role} is ready yet", param="model")
    raise UnknownModel(
        f"model {model!r} is no {role} model here; there are: {', '.join(names) or 'none'}", param="model"
    )


async def pick(bus: Bus, role: str, model: str, *, avoid: str | None = None, patience: float = 0.0) -> str:
    """The least busy ready instance for `model`, another one than `avoid` if there is a choice.

    Waits up to `patience` seconds for one to appear, then raises Unavailable.
    """
    directory = bus.directory
    try:
        ready = await directory.wait_for(lambda d: d.ready(role, model=model), max(patience, 0.0))
    except TimeoutError:
        raise Unavailable(f"no {role} for {model!r} is ready; retry in a moment", param="model") from None
    names = [beat.instance for beat in ready]
    names = [name for name in names if name != avoid] or names
    return min(names, key=lambda name: (directory.active(name), random.random()))
