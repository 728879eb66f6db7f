"""A conversation about pictures through the official client, over the whole stack; a death in the middle of it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from e2e.stack import MotetStack, until
from support.checkpoints.vlm_checkpoints import picture, reference, tiny_vlm
from support.stages.vlm_stage import png

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.slow]

MODEL = "tiny-llava"
TOKENS = 9  # of a picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("llava_siglip", tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def stack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    nothing = [part for name in ("asr", "tts") for part in (f"--{name}", "none")]
    with MotetStack(
        tmp_path_factory.mktemp("stack"), "--llm", str(folder), "--vad", "0", *nothing
    ) as made:
        made.wait_until_all_ready()
        yield made


@pytest.fixture
def client(stack: MotetStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def shown(number: int, **options: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(picture(number))).decode()
    return {"type": "image_url", "image_url": {"url": url, **options}}


def question(*numbers: int) -> Any:
    return {
        "role": "user",
        "content": [*map(shown, numbers), {"type": "text", "text": "What do you see?"}],
    }


def answer(client: openai.OpenAI, *messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=list(messages),
        temperature=0,
        max_tokens=12,
        **{"logprobs": True, **options},
    )


@torch.inference_mode()
def expected(folder: Path, number: int, count: int) -> list[bytes]:
    """What transformers' own model says of one picture, token by token; its bytes are its ids."""
    from transformers import AutoImageProcessor, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), reference(folder)
    content = [{"type": "image"}, {"type": "text", "text": "What do you see?"}]
    prompt = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor(
        [tokenizer.encode(text.replace("<image>", "<image>" * TOKENS), add_special_tokens=False)]
    )
    inputs = AutoImageProcessor.from_pretrained(folder)([picture(number)], return_tensors="pt")
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **inputs,
    )
    spelled = [tokenizer.convert_ids_to_tokens(token) for token in made[0, ids.shape[1] :].tolist()]
    return [token.encode() if token.startswith("<") else bytes([_byte(token)]) for token in spelled]


def _byte(token: str) -> int:
    from support.checkpoints.language_checkpoints import _byte_chars

    return next(byte for byte, char in _byte_chars().items() if char == token)


def test_it_says_what_transformers_says_of_the_picture(client: openai.OpenAI, folder: Path) -> None:
    reply = answer(client, question(1), extra_body={"ignore_eos": True})
    assert reply.usage.prompt_tokens_details.image_tokens == TOKENS
    tokens = [bytes(entry.bytes) for entry in reply.choices[0].logprobs.content]
    assert tokens == expected(folder, 1, len(tokens))
    other = answer(client, question(2), extra_body={"ignore_eos": True})
    assert [entry.logprob for entry in other.choices[0].logprobs.content] != [
        entry.logprob for entry in reply.choices[0].logprobs.content
    ]


def test_several_images_and_history_in_a_stream(client: openai.OpenAI) -> None:
    first = question(1, 2)
    history = [first, {"role": "assistant", "content": "Two."}, question(3)]
    whole = answer(client, *history)
    with answer(
        client, *history, stream=True, stream_options={"include_usage": True}, logprobs=False
    ) as stream:
        chunks = list(stream)
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage.prompt_tokens_details.image_tokens == 3 * TOKENS
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 2 * TOKENS


def test_an_image_that_is_none_is_refused_by_name(client: openai.OpenAI) -> None:
    broken = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,bm90IGEgcGljdHVyZQ=="},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, {"role": "user", "content": [{"type": "text", "text": "?"}, broken]})
    assert caught.value.param == "messages[0].content[1].image_url"
    with pytest.raises(openai.BadRequestError) as caught:
        answer(
            client,
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "https://x.org/a"}}],
            },
        )
    assert caught.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize("victim", ["encoder", "decode"])
def test_who_dies_is_replaced_and_the_chat_goes_on(
    client: openai.OpenAI, stack: MotetStack, victim: str
) -> None:
    before = answer(client, question(1)).choices[0].message.content
    restarted = stack.kill(victim)

    def after() -> str:
        try:
            return str(answer(client, question(1)).choices[0].message.content)
        except openai.InternalServerError:  # 503 while it is being restarted
            return ""

    assert until(after, f"a chat after the death of {victim}", 120) == before
    restarted()
