"""Number the gateways that serve a client's request one after another, as epochs of what they ask."""

from __future__ import annotations

from collections.abc import Callable

from motet_shared.wire.epochs import Epoch

from . import draws

_NAME = "epoch"  # of the draw of a session, and of the noted number of the last gateway
_BITS = 16  # of an epoch's number that tell gateways from one another


class GatewayEpochs:
    """Give what this gateway asks the services an epoch that ends what the one before it had asked.

    memo, note: of the request's recorder; what is noted has to outlast checkpoints.
    """

    def __init__(self, memo: Callable[[str], bytes | None], note: Callable[[str, bytes], None]):
        self._memo, self._note = memo, note
        self._number: int | None = None

    def of(self, given: Epoch, drawn: draws.Draws) -> Epoch:
        """Return the epoch of work of the epoch `given`; without a session, one of the request's."""
        if self._number is None:
            before = self._memo(_NAME)
            self._number = 0 if before is None else int.from_bytes(before) + 1
            self._note(_NAME, self._number.to_bytes(8))
        # Not the session of epochs without a gateway's number, as a gateway that keeps nothing gives them.
        session = f"kept-{given.session or drawn.bytes(16, _NAME).hex()}"
        return Epoch(session, (given.number << _BITS) + self._number)
