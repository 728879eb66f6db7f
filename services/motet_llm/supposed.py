"""A request as it will be if the first tokens of its draft are right: what the rows behind them are drawn for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motet_shared.messages import Sampling

from .request import Request

if TYPE_CHECKING:
    from .grammar import Sentence


class Supposed:
    """`request` with the tokens `ahead` at its end. It reads from the request, so it is of use for one step only."""

    __slots__ = ("ahead", "request")

    def __init__(self, request: Request, ahead: tuple[int, ...]):
        self.request = request
        self.ahead = ahead

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.request.stop_ids

    @property
    def sentence(self) -> Sentence | None:
        """Of the request itself: it has not seen what is ahead."""
        return self.request.sentence

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens, *self.ahead]

    @property
    def output(self) -> list[int]:
        return [*self.request.output, *self.ahead]

    @property
    def num_output(self) -> int:
        return self.request.num_output + len(self.ahead)


Row = Request | Supposed  # what a token is drawn for
