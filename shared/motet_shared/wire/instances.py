"""Choose the instance of a role for a request, and list the models that a role serves alone."""

from __future__ import annotations

from motet_shared.errors import Unavailable, UnknownModel
from motet_shared.messages import Heartbeat, ModelCard
from motet_shared.wire import sites
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory


def served(directory: Directory, role: str) -> dict[str, ModelCard]:
    """Return the cards of the models that ready instances of a role announce, by name.

    Instances reported lost still count until they have been silent for long: they return or are
    replaced, and a request for one of their models waits for that in `pick`. A session that begins
    meanwhile keeps its full choice of models. A model that is a stage of another (`answers`) is none
    that a request can name.
    """
    beats = directory.ready(role, suspects=True)
    cards = {card.name: card for beat in beats for card in beat.models if not card.answers}
    return dict(sorted(cards.items()))


def check_served(directory: Directory, role: str, model: str) -> None:
    """Raise UnknownModel if `model` is none of those that instances announce.

    Raises Unavailable while no model is announced and no instance is ready. A model that is still
    to come, or that was lost and may return, is known.
    """
    names = sorted({card.name for beat in directory.instances(role) for card in beat.models})
    if model in names or directory.is_coming(role, model):
        return
    if not names and not directory.ready(role):
        raise Unavailable(f"model {model!r}: no {role} is ready yet", param="model")
    raise UnknownModel(
        f"model {model!r} is no {role} model here; there are: {', '.join(names) or 'none'}",
        param="model",
    )


def _ready_or_failed(directory: Directory, role: str, model: str) -> list[Heartbeat]:
    directory.presence.check_offer(role, model)
    return directory.ready(role, model=model)


async def pick(
    bus: Bus, role: str, model: str, *, avoid: str | None = None, patience: float = 0.0
) -> str:
    """Return the least busy ready instance for `model`, other than `avoid` if there is a choice.

    Wait up to `patience` seconds for one to appear. Raises Unavailable if none did, NoAllowedSite
    if the running task is limited to sites where none did; at once, where the role is at none.
    """
    directory = bus.directory
    ready = directory.ready(role, model=model)
    if not ready and not directory.may_serve(role):
        raise sites.refusal(f"{role} for {model!r}")
    try:
        if not ready:
            with directory.wanting(role, model):
                ready = await directory.wait_for(
                    lambda d: _ready_or_failed(d, role, model), max(patience, 0.0)
                )
    except TimeoutError:
        if sites.allowed():
            raise sites.refusal(f"{role} for {model!r}") from None
        raise Unavailable(
            f"no {role} for {model!r} is ready; retry in a moment", param="model"
        ) from None
    return directory.least_busy([beat for beat in ready if beat.instance != avoid] or ready)
