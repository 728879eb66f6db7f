"""Give instances the pictures of a chat in the form that each takes: as embeddings or as files.

Motet's own engine is given embeddings, which an encoder computes, and a prompt with a placeholder for
each of their vectors. Other engines read the files themselves; their prompt has one mark per picture.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from motet_shared.errors import BlobError, ContextTooLong, Unavailable, UnsupportedParameter
from motet_shared.messages import Chat, EncodedImage, Generate, Image, ImageEmbeddingRef, ModelCard
from motet_shared.text.prefixes import prompt_names

if TYPE_CHECKING:
    from motet_tokenizer.encoding.vocabulary import Vocabulary

EncodeImages = Callable[[], Awaitable[list[EncodedImage]]]


class PromptImages:
    """Hold the pictures of a chat, and its prompt in both forms.

    marked: the prompt with one mark per picture. encode: has an encoder compute the embeddings.
    context: most tokens of prompt and reply, once known. Raises BadRequest if the numbers of marks
    and pictures differ.
    """

    def __init__(self, chat: Chat, marked: list[int], vocabulary: Vocabulary, encode: EncodeImages):
        self._senses = ["audio" if image.is_audio else "image" for image in chat.images]
        vocabulary.template.placeholders(marked, self._senses)
        self._chat = chat
        self._marked = marked
        self._vocabulary = vocabulary
        self._encode = encode
        self.context = 0
        self._expanded: list[int] = []
        self._embeddings: list[ImageEmbeddingRef] = []

    @property
    def prompt(self) -> list[int]:
        """Return the prompt with placeholders once the pictures are encoded, else with marks."""
        return self._expanded or self._marked

    async def encode(self) -> None:
        """Have the pictures encoded, unless they are."""
        if not self._expanded:
            seen = await self._encode()
            ids = [picture.ids for picture in seen]
            expanded = self._vocabulary.template.expand_placeholders(
                self._marked, self._senses, ids
            )
            self._embeddings = [picture.embedding for picture in seen]
            self._expanded = expanded

    async def encode_again(self, error: BlobError) -> None:
        """Have the pictures encoded again. Raises `error` if an engine was given their files."""
        if not self._expanded:
            raise error
        seen = await self._encode()
        self._embeddings = [picture.embedding for picture in seen]

    async def prepare(self, card: ModelCard | None) -> None:
        """Have the pictures encoded if the instance with this card needs it."""
        if card is not None and not (card.refuses_images or card.takes_images):
            await self.encode()

    def request_for(self, card: ModelCard | None, request: Generate) -> Generate:
        """Return the request in the form of the instance with this card, after `prepare`.

        card: None if the instance is gone. Raises UnsupportedParameter if it takes no pictures,
        ContextTooLong if their placeholders leave no room.
        """
        if card is not None and card.refuses_images:
            param = self._chat.images[0].param or "messages"
            name = card.target or card.name
            raise UnsupportedParameter(
                f"`{param}`: {name!r} is given no pictures here; send text", param=param
            )
        if card is not None and card.takes_images:
            return replace(request, prompt=self._marked, chat=self._chat)
        if not self._expanded:
            raise Unavailable(f"the instance of model {request.model!r} is gone; retry in a moment")
        # The room was that of a shorter prompt, if the pictures were not encoded before.
        room = self.context - len(self._expanded)
        if room <= 0:
            raise ContextTooLong(
                f"the prompt has {len(self._expanded)} tokens with its pictures, of {self.context} for"
                " prompt and reply together; send fewer pictures",
                param="messages",
            )
        most = min(request.sampling.max_tokens, room)
        return replace(
            request,
            prompt=self._expanded,
            image_embeddings=self._embeddings,
            sampling=replace(request.sampling, max_tokens=most),
        )

    def names(self) -> list[int]:
        """Return the names of the prompt's tokens, which are equal for equal pictures (`prefixes`)."""
        vocabulary = self._vocabulary
        if self._expanded:
            pictures = [(one.name, one.embeddings.shape[1]) for one in self._embeddings]
            tokens = vocabulary.placeholders
        else:
            files = [(_content(image), image.max_pixels) for image in self._chat.images]
            pictures = [(f"{name}/{pixels}", 1) for name, pixels in files]
            tokens = set(vocabulary.media_marks.values())
        return prompt_names(self.prompt, tokens, pictures)

    def tokens(self, prompt_tokens: int, sense: str) -> int:
        """Return how many tokens of a prompt of `prompt_tokens` are those of "image" or "audio"."""
        if self._expanded:
            both = zip(self._senses, self._embeddings, strict=True)
            return sum(one.embeddings.shape[1] for kind, one in both if kind == sense)
        if set(self._senses) != {sense}:  # engines that read files tell no more than their sum
            return 0
        return max(0, prompt_tokens - len(self._marked) + len(self._chat.images))


def _content(image: Image) -> str:
    """Return a name of the files of an image, equal for equal files."""
    return "+".join(file.digest or file.key for file in (*image.merged, image.file))
