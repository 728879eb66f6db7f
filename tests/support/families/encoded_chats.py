"""Compare prompts with pictures or sound with transformers' own processor and `generate`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from motet_encoder.checkpoint import load_family
from motet_encoder.families import EncoderFamily, Prepared
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_shared.messages import Sampling
from support.families import processed_vlms

TIE = 1e-4
TOLERANCE = 1e-3
TOKENS = 8


@dataclass
class Talk:
    """A prompt with media by number, as transformers prepares it, and what came of it."""

    inputs: dict[str, torch.Tensor]
    media: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = self.inputs["input_ids"][0].tolist()
        return ids


class World:
    """A tiny checkpoint: transformers' processor and model, our encodings and our engine.

    prepare: turns one of `media` into inputs of our tower. given: the processor's arguments for
    some of them; None: the talk is prepared by `inputs_of` alone.
    """

    def __init__(
        self,
        name: str,
        family: processed_vlms.Family,
        folder: Path,
        media: Sequence[Any],
        prepare: Callable[[EncoderFamily, Any], Prepared],
        inputs_of: Callable[[Any, Sequence[int | str]], dict[str, Any]],
    ):
        self.reference: PreTrainedModel = processed_vlms.write_family(name, family, folder)
        self.processor = processed_vlms.reference_processor(folder)
        self.family = load_family(folder, torch.float32)
        self.prepared = [prepare(self.family, one) for one in media]
        self._inputs_of = inputs_of
        self.images = [
            ImageEmbedding(self.family.encode([one])[0], f"medium {number}", one.grid)
            for number, one in enumerate(self.prepared)
        ]
        self._options: dict[str, Any] = {"model": str(folder), "token_budget": family.budget}
        self.engine = self.make_engine()

    def make_engine(self, **options: Any) -> Engine:
        """Return an engine for the checkpoint."""
        sizes = {"block_size": 4, "num_blocks": 300, "max_running": 4, "context": 512}
        fixed: dict[str, Any] = {"dtype": "float32", "overlap": False, "threads": 1}
        return Engine(EngineConfig(**{**fixed, **sizes, **self._options, **options}))

    def talk(self, *parts: int | str) -> Talk:
        """Return a talk of texts and media by number."""
        inputs = dict(self._inputs_of(self.processor, parts))
        inputs.pop("attention_mask", None)
        return Talk(inputs, [part for part in parts if isinstance(part, int)])

    def compare(self, talks: list[Talk]) -> None:
        """Run the talks together, and require transformers' prompts and tokens."""
        for talk in talks:
            for number in talk.media:
                assert _contains(talk.prompt, self.prepared[number].ids)
        self._run(talks)
        for talk in talks:
            self._assert_greedy(talk)

    def _run(self, talks: list[Talk]) -> None:
        by_key: dict[Hashable, Talk] = dict(enumerate(talks))
        sampling = Sampling(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
        for key, talk in enumerate(talks):
            images = [self.images[number] for number in talk.media]
            self.engine.add(key, talk.prompt, sampling, images=images)
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None
                talk = by_key[output.key]
                talk.ids += output.ids
                talk.logprobs += [entry.logprob for entry in output.logprobs or []]
            self.engine.check_integrity()

    @torch.inference_mode()
    def _assert_greedy(self, talk: Talk) -> None:
        """`talk.ids` is what `generate` gives, ties apart, with its log-probabilities."""
        made = 0
        while made < TOKENS:
            result = self.reference.generate(
                **_with_output(talk.inputs, talk.ids[:made]),
                max_new_tokens=TOKENS - made,
                min_new_tokens=TOKENS - made,
                eos_token_id=1 << 20,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            length = len(talk.prompt) + made
            for step, logits_1V in enumerate(result.logits):
                ours, logits_V = talk.ids[made], logits_1V[0].float()
                assert logits_V.max() - logits_V[ours] < TIE
                assert abs(logits_V.log_softmax(-1)[ours].item() - talk.logprobs[made]) < TOLERANCE
                made += 1
                if ours != result.sequences[0, length + step]:
                    break


def _with_output(inputs: dict[str, Any], output: list[int]) -> dict[str, Any]:
    """Return the inputs of a prompt that ends with `output`, which is text."""
    more = torch.tensor([output], dtype=torch.long)
    grown = {
        name: torch.cat((inputs[name], (more if name == "input_ids" else more * 0)), dim=1)
        for name in ("input_ids", "token_type_ids", "mm_token_type_ids")
        if name in inputs
    }
    return inputs | grown | {"attention_mask": torch.ones_like(grown["input_ids"])}


def _contains(prompt: list[int], part: list[int]) -> bool:
    return any(
        prompt[start : start + len(part)] == part for start in range(len(prompt) - len(part) + 1)
    )
