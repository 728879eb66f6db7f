"""How prompts of chats end, and templates that are given instead of a checkpoint's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from motet_shared.errors import BadRequest, ConfigError
from motet_shared.messages import Chat, Sampling
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.encoding.prompt_end import PromptEnd
from motet_tokenizer.encoding.vocabulary import Vocabulary
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.tiny_tokenizers import vocabulary as tiny_vocabulary

STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTINUED = PromptEnd(starts_turn=False, continues=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("prompt_end"))


def conversation(begun: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Count."}, {"role": "assistant", "content": begun}]


@pytest.mark.parametrize("starts_turn", [True, False])
def test_a_new_turn_is_begun_or_not(folder: Path, starts_turn: bool) -> None:
    found = Vocabulary.load("tiny", str(folder)).template.encode(
        conversation("one"), [], None, PromptEnd(starts_turn)
    )
    reference = AutoTokenizer.from_pretrained(folder)
    assert found == reference.apply_chat_template(
        conversation("one"), add_generation_prompt=starts_turn, return_dict=False
    )


# The last ones hold control tokens, which make the prompt take the protected way.
@pytest.mark.parametrize("begun", ["one, two", "one, ", " one", "<|im_end|> one", "a<b|c [d]"])
@pytest.mark.parametrize("source", [None, STRIPS], ids=["keeps", "strips"])
def test_the_last_message_is_continued(
    folder: Path, tmp_path: Path, source: str | None, begun: str
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(source or "")
    vocabulary = Vocabulary.load(
        "tiny", str(folder), chat_template=str(template) if source else None
    )
    found = vocabulary.template.encode(conversation(begun), [], None, CONTINUED)
    reference = AutoTokenizer.from_pretrained(folder)
    if source:
        reference.chat_template = source
    text = reference.apply_chat_template(
        conversation(begun), continue_final_message=True, tokenize=False
    )
    assert vocabulary.backend.decode(found, skip_special_tokens=False) == text
    assert text.endswith(begun.strip() if source else begun)
    if "<|" not in begun:
        assert found == reference.encode(text, add_special_tokens=False)
    else:  # what the client wrote is no control token
        assert len(found) > len(reference.encode(text, add_special_tokens=False))


@settings(max_examples=30)
@given(begun=st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1, max_size=20))
def test_any_text_is_continued_as_it_is(begun: str) -> None:
    vocabulary = tiny_vocabulary()
    ids = vocabulary.template.encode(conversation(begun), [], None, CONTINUED)
    assert vocabulary.decode(ids).endswith(begun)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (conversation("one"), {"add_generation_prompt": True}),
        ([{"role": "user", "content": "Count."}], {}),
        (conversation(""), {}),
        ([*conversation("x")[:1], {"role": "assistant", "tool_calls": []}], {}),
        ([], {}),
    ],
)
def test_what_cannot_be_continued_is_refused(
    messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    fields = {"add_generation_prompt": False, "continue_final_message": True} | options
    chat = Chat(model="m", messages=messages, sampling=Sampling(), **fields)
    with pytest.raises(BadRequest) as raised:
        PromptEnd.of(chat)
    assert raised.value.param == "continue_final_message"


def test_a_template_that_leaves_the_message_out_is_refused(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    vocabulary = Vocabulary.load("tiny", str(folder), chat_template=str(template))
    with pytest.raises(BadRequest) as raised:
        vocabulary.template.encode(conversation("one"), [], None, CONTINUED)
    assert raised.value.param == "messages"


def test_a_model_without_template_refuses_chat_and_says_so(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "base")
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(settings_file.read_text().replace("chat_template", "unused"))
    vocabulary = Vocabulary.load("base", str(folder))
    assert not vocabulary.card.chat
    with pytest.raises(BadRequest) as raised:
        vocabulary.template.encode(conversation("one"), [])
    assert raised.value.param == "messages"
    (tmp_path / "own.jinja").write_text(STRIPS)
    given = Vocabulary.load("base", str(folder), chat_template=str(tmp_path / "own.jinja"))
    assert given.card.chat
    assert given.template.encode(conversation("one"), [])


def config(*templates: str, models: tuple[str, ...] = ("a=x", "b=y")) -> TokenizerConfig:
    return TokenizerConfig(model=models, chat_template=templates)


def test_templates_belong_to_models(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(STRIPS)
    assert config(f"b={file}").templates() == {"b": str(file)}
    assert config(str(file), models=("a=x",)).templates() == {"a": str(file)}


@pytest.mark.parametrize("entry", ["c={file}", "{file}", "a=missing.jinja"])
def test_templates_of_no_model_are_refused(entry: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(STRIPS)
    with pytest.raises(ConfigError) as raised:
        config(entry.format(file=tmp_path / "own.jinja"))
    assert raised.value.param == "chat_template"
