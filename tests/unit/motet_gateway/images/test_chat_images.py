"""Chats with pictures through encoder, tokenizer and decode: exact, and through the death of any of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer

from motet_encoder.checkpoint import load_family
from motet_shared.errors import BadRequest, Unavailable, UnsupportedParameter
from motet_shared.messages import Generate
from motet_shared.testing import die
from support.checkpoints.vlm_checkpoints import FAMILIES, picture, reference, tiny_vlm
from support.running.refusals import refuses
from support.stages.vlm_stage import stage

TIE = 1e-4
TWO = [
    {"type": "text", "text": "Compare "},
    {"type": "image"},
    {"type": "text", "text": " with "},
    {"type": "image"},
    {"type": "text", "text": "."},
]
ONE = [{"type": "image"}, {"type": "text", "text": "What is it?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("llava_clip", tmp_path_factory.mktemp("llava"))


@torch.inference_mode()
def expected(
    name: str, folder: Path, messages: list[dict[str, Any]], shown: list[int], count: int
) -> list[Any]:
    """The tokens of `transformers.generate`, each with those that it may be taken for (ties)."""
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(folder),
        AutoImageProcessor.from_pretrained(folder),
    )
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    pictures = [picture(number) for number in shown]
    family = load_family(folder, torch.float32)
    marks = [tokenizer.decode(family.prepare(one, 0).ids) for one in pictures]
    head, *rest = text.split(FAMILIES[name].marks[0])
    whole = head + "".join(mark + part for mark, part in zip(marks, rest, strict=True))
    ids = torch.tensor([tokenizer.encode(whole, add_special_tokens=False)])
    tiled = name in ("smolvlm", "idefics3")
    inputs = dict(processor([pictures] if tiled else pictures, return_tensors="pt"))
    if name.startswith("qwen"):
        inputs["mm_token_type_ids"] = (ids == family.placeholder).int()
    made = reference(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        eos_token_id=1 << 20,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **inputs,
    )
    return [set((one[0] > one[0].max() - TIE).nonzero().flatten().tolist()) for one in made.logits]


def assert_same(ids: list[int], ties: list[set[int]]) -> None:
    """Up to the first tie, after which the reference may have gone another way."""
    assert len(ids) == len(ties)
    for token, likely in zip(ids, ties, strict=True):
        assert token in likely
        if len(likely) > 1:
            return


@pytest.mark.parametrize("name", FAMILIES)
async def test_the_answer_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny_vlm(name, tmp_path)
    async with stage(folder) as made:
        await made.encoder()
        await made.decode(token_budget=16)
        await made.tokenizer()
        reply = await made.ask(TWO, made.pictures(1, 2))
        assert_same(
            reply.ids,
            expected(name, folder, [{"role": "user", "content": TWO}], [1, 2], len(reply.ids)),
        )
        usage = reply.end.usage
        assert usage is not None
        assert 0 < usage.image_tokens < usage.prompt_tokens
        history = [
            {"role": "user", "content": TWO},
            {"role": "assistant", "content": [{"type": "text", "text": "Alike."}]},
            {"role": "user", "content": ONE},
        ]
        later = await made.ask(None, made.pictures(1, 2, 3), messages=history)
        assert_same(later.ids, expected(name, folder, history, [1, 2, 3], len(later.ids)))
        assert later.end.usage is not None
        assert later.end.usage.cached_tokens > usage.image_tokens


async def test_texts_alone_are_served_as_ever(folder: Path) -> None:
    async with stage(folder) as made:
        await made.decode()
        tokenizer = await made.tokenizer()
        assert tokenizer.models()[0].images
        reply = await made.ask("No picture", [])
        ids = tokenizer.vocabularies["eyes"].template.encode(
            [{"role": "user", "content": "No picture"}], []
        )
        assert b"No picture" in bytes(i for i in ids if i < 256)
        assert reply.ids


async def test_a_written_placeholder_is_text(folder: Path) -> None:
    async with stage(folder) as made:
        await made.encoder()
        await made.decode()
        await made.tokenizer()
        forged = [{"type": "text", "text": "<image> <image>"}, {"type": "image"}]
        plain = [{"type": "text", "text": "(image) (image)"}, {"type": "image"}]
        first, second = [await made.ask(content, made.pictures(1)) for content in (forged, plain)]
        assert first.end.usage is not None
        assert second.end.usage is not None
        assert first.end.usage.image_tokens == 9
        assert first.end.usage.prompt_tokens == second.end.usage.prompt_tokens


async def test_without_an_encoder_instance_it_is_unavailable_for_now(folder: Path) -> None:
    async with stage(folder) as made:
        await made.decode()
        await made.tokenizer(decode_wait=0.2)
        with pytest.raises(Unavailable):
            await made.ask(ONE, made.pictures(1))


async def test_an_encoder_instance_that_comes_late_is_waited_for(folder: Path) -> None:
    async with stage(folder) as made:
        await made.decode()
        await made.tokenizer(decode_wait=20.0)
        asking = asyncio.create_task(made.ask(ONE, made.pictures(1)))
        await asyncio.sleep(0.05)
        await made.encoder()
        assert (await asking).ids


async def test_encoder_dies_and_another_one_looks(folder: Path) -> None:
    async with stage(folder) as made:
        encoders = [await made.encoder(), await made.encoder()]
        await made.decode()
        tokenizer = await made.tokenizer(decode_wait=20.0)
        whole = await made.ask(ONE, made.pictures(1))
        seer = next(encoder for encoder in encoders if encoder.stats()["pictures"])
        made.actors.remove(seer)
        die(seer.bus)
        tokenizer.bus.directory.suspect(seer.bus.instance)
        again = await made.ask(ONE, made.pictures(1))
        assert again.ids == whole.ids


async def test_encoder_dies_while_it_looks(folder: Path) -> None:
    async with stage(folder) as made:
        first = await made.encoder(max_prepared=1)
        await first._prepare_slots.acquire()  # it gets no further
        await made.decode()
        await made.tokenizer(decode_wait=30.0)
        asking = asyncio.create_task(made.ask(ONE, made.pictures(1)))
        while not first.bus.calls.active:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        made.actors.remove(first)
        die(first.bus)
        second = await made.encoder()
        assert (await asking).ids
        assert second.stats()["pictures"] == 1
        first._prepare_slots.release()


async def test_embeddings_that_are_gone_are_looked_at_again(folder: Path) -> None:
    async with stage(folder) as made:
        encoder, decode = await made.encoder(), await made.decode()
        tokenizer = await made.tokenizer()
        whole = await made.ask(ONE, made.pictures(1))
        lost: list[str] = []
        generate = decode.generate

        async def forgetful(call: Any, request: Generate) -> None:
            if not lost:
                lost.append(request.request_id)
                while encoder._cache.stats()["cached"]:
                    encoder._cache._evict_oldest()
            await generate(call, request)

        decode.bus.calls.handlers["generate"] = forgetful
        again = await made.ask(ONE, made.pictures(1))
        assert lost
        assert again.ids == whole.ids
        assert encoder.stats()["pictures"] == 2
        assert tokenizer.counters.failovers == 0


async def test_decode_dies_in_mid_answer(folder: Path) -> None:
    async with stage(folder) as made:
        await made.encoder()
        decodes = [await made.decode(), await made.decode()]
        tokenizer = await made.tokenizer(decode_wait=20.0)
        whole = await made.ask(ONE, made.pictures(1), max_tokens=60)
        asking = asyncio.create_task(made.ask(ONE, made.pictures(1), max_tokens=60))
        while not (busy := [one for one in decodes if one.bus.calls.active]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        made.actors.remove(busy[0])
        die(busy[0].bus)
        tokenizer.bus.directory.suspect(busy[0].bus.instance)
        assert (await asking).ids == whole.ids


async def test_refusals_name_what_is_wrong(folder: Path) -> None:
    async with stage(folder) as made:
        await made.encoder()
        await made.decode()
        await made.tokenizer(max_images=2)
        with refuses(BadRequest, "messages"):
            await made.ask(ONE, made.pictures(1, 2))
        with refuses(BadRequest, "messages"):
            await made.ask(ONE, made.pictures(1, 2, 3))
        with refuses(BadRequest, "messages[0].content[0].image_url") as caught:
            await made.ask(ONE, [made.file(b"junk", param="messages[0].content[0].image_url")])
        assert caught.value.param == "messages[0].content[0].image_url"
        with refuses(UnsupportedParameter, "messages[0].content[0].type"):
            await made.ask([{"type": "sound"}], [])


async def test_images_that_hold_too_much_memory_are_refused(folder: Path) -> None:
    async with stage(folder) as made:
        await made.encoder()
        decode = await made.decode()
        await made.tokenizer()
        decode._image_reader._capacity = 1000
        with pytest.raises(BadRequest, match="--image-memory"):
            await made.ask(ONE, made.pictures(1))
        assert decode._image_reader.held == 0
