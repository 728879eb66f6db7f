"""See and imagine over real services of tiny models: what is drawn is looked at, and whoever leaves frees all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from motet_diffusion.service import Diffusion
from motet_llm.service import Decode
from motet_pipelines.chat.chat import Outcome
from motet_pipelines.chat.vision import InputMedia, see
from motet_pipelines.images.chat_drawing import DRAW_TOOL, MAX_PICTURES, Drawing, remembered
from motet_pipelines.images.imagine import imagine
from motet_shared.errors import DeadlineExceeded, MotetError, PayloadTooLarge, UnknownModel
from motet_shared.messages import (
    Chat,
    DenoisingProgress,
    Draw,
    Generate,
    Sampling,
    Text,
    Tokens,
    ToolCallDelta,
    Usage,
)
from motet_shared.process.actor import operation
from motet_shared.testing import memory_bus, running, settle
from motet_shared.wire.call import Call
from motet_tokenizer.encoding.vocabulary import Vocabulary
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.vlm_checkpoints import picture, tiny_vlm
from support.services.fake_services import MODEL as FAKE
from support.services.fake_services import FakeDecode, FakeTokenizer, tool_call, words
from support.stages import diffusion_stage
from support.stages.diffusion_stage import Caller, ask, config
from support.stages.vlm_stage import MODEL, Stage, png, stage

PROMPT = "two red circles"
CALL = f'<tool_call>\n{{"name": "draw", "arguments": {{"prompt": "{PROMPT}"}}}}\n</tool_call><|im_end|>'
USER = {"role": "user", "content": "Draw two red circles."}
TOKENS = 9  # of a picture
BRUSH = Draw(model=diffusion_stage.MODEL, prompt="", steps=6, previews=2)


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, with a chat template that knows tools and the format of their calls."""
    folder = tiny_vlm("llava_siglip", tmp_path_factory.mktemp("models") / MODEL)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    call = "<tool_call>{{ call.function | tojson }}</tool_call>"
    calls = f"{{% for call in message.tool_calls or [] %}}{call}{{% endfor %}}<|im_end|>\n"
    template = settings["chat_template"].replace("<|im_end|>\n", calls, 1)
    settings["chat_template"] = "{% if tools %}{{ tools | length }}\n{% endif %}" + template
    file.write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def easel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion_checkpoints.stable_diffusion(tmp_path_factory.mktemp("sd") / "model", "euler")


class Eager(Decode):
    """Calls the tool, whatever it is asked, unless it sees a picture: then it says what its model says."""

    script: tuple[int, ...] = ()
    pause = 0.0

    @operation(Generate)
    async def generate(self, call: Call, request: Generate) -> None:
        if request.image_embeddings:
            await super().generate(call, request)
            return
        for token in self.script[len(request.output) :]:
            await call.send(Tokens([token]))
            await asyncio.sleep(self.pause)
        call.finish("stop", Usage(len(request.prompt), len(self.script)))


@dataclass
class Studio:
    """Everything that it takes; `eager` calls the tool."""

    here: Stage
    eager: Eager
    painter: Diffusion

    async def idle(self) -> None:
        await self.here.idle()
        while self.painter.thread.engine.has_work:  # noqa: ASYNC110  # in the middle of a step
            await asyncio.sleep(0.01)
        assert self.here.store.stats()["blobs"] == 0


@pytest.fixture
async def studio(eyes: Path, easel: Path) -> AsyncIterator[Studio]:
    async with stage(eyes) as here:
        await here.encoder()
        eager = await here.decode(Eager)
        assert isinstance(eager, Eager)
        eager.script = tuple(Vocabulary.load(MODEL, str(eyes)).encode(CALL))
        await here.tokenizer()
        painter = await here.start(
            Diffusion(config(easel), await memory_bus(here.hub, "diffusion"))
        )
        yield Studio(here, eager, painter)
        await asyncio.wait_for(Studio(here, eager, painter).idle(), 30)


def request(*messages: dict[str, Any], model: str = MODEL, **fields: Any) -> Chat:
    sampling = Sampling(temperature=0, ignore_eos=True, seed=5)
    return Chat(model=model, messages=[*messages], sampling=sampling, request_id="r", **fields)


@dataclass
class Told:
    """What came of a conversation, in order."""

    events: list[Any] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def drawings(self) -> list[Drawing]:
        return [event for event in self.events if isinstance(event, Drawing)]

    @property
    def texts(self) -> list[Text]:
        return [item for event in self.events if isinstance(event, list) for item in event]

    @property
    def text(self) -> str:
        return "".join(item.text for item in self.texts)

    @property
    def calls(self) -> list[ToolCallDelta]:
        return [call for item in self.texts for call in item.tools or []]


async def imagined(here: Any, asked: Chat, brush: Draw = BRUSH, **options: Any) -> Told:
    bus, store = (here.gateway, here.store) if isinstance(here, Stage) else (here.bus, here.store)
    told = Told()
    async with aclosing(imagine(bus, store, asked, brush, (), told.outcome, **options)) as events:
        async for event in events:
            told.events.append(event)
    return told


# ----------------------------------------------------------------------------------------------------------------- see
async def test_a_question_about_pictures(eyes: Path) -> None:
    async with stage(eyes) as here:
        await here.encoder()
        await here.decode()
        await here.tokenizer()
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]
        whole = await here.ask(content, here.pictures(1, 1), max_tokens=8)
        outcome = Outcome()
        asked = request({"role": "user", "content": content}, max_tokens=8)
        shown = [InputMedia(png(picture(1)))] * 2
        before = here.store.stats()["blobs"]
        text = ""
        async with aclosing(see(here.gateway, here.store, asked, shown, outcome)) as batches:
            async for batch in batches:
                assert here.store.stats()["blobs"] == before + 1, "equal files are there once"
                text += "".join(item.text for item in batch)
        assert here.store.stats()["blobs"] == before
        assert text == whole.text
        assert outcome.end is not None
        assert outcome.end.usage is not None
        assert outcome.end.usage.image_tokens == 2 * TOKENS


# ------------------------------------------------------------------------------------------------------------- imagine
async def test_it_draws_looks_and_says_what_it_sees(studio: Studio) -> None:
    here = studio.here
    told = await imagined(here, request(USER), accepts_images=True)
    kinds = [type(event) for event in told.events]
    strokes = [event for event in told.events if isinstance(event, DenoisingProgress)]
    assert [stroke.step for stroke in strokes] == [1, 2, 3, 4, 5, 6]
    assert sum(bool(stroke.preview) for stroke in strokes) == 2
    assert kinds.index(DenoisingProgress) < kinds.index(Drawing)
    assert kinds[-1] is list, "the description comes last"
    (drawing,) = told.drawings
    assert drawing.prompt == PROMPT
    alone = await Caller(here.gateway, here.store).draw(ask(PROMPT, seed=5))
    assert drawing.data == alone.outcome.data
    assert not told.calls

    seen = request(USER, *remembered([PROMPT], accepts_images=True), tools=[DRAW_TOOL])
    outcome, text = Outcome(), ""
    async with aclosing(
        see(here.gateway, here.store, seen, [InputMedia(drawing.data)], outcome)
    ) as batches:
        async for batch in batches:
            text += "".join(item.text for item in batch)
    assert told.text == text
    assert told.outcome.end is not None
    assert outcome.end is not None
    whole, last = told.outcome.end.usage, outcome.end.usage
    assert whole is not None
    assert last is not None
    assert whole.image_tokens == TOKENS
    assert whole.completion_tokens == last.completion_tokens + len(studio.eager.script)
    assert last.cached_tokens > TOKENS, "what was drawn in an earlier reply is not prefilled again"


async def test_tokens_are_counted_over_all_turns(studio: Studio) -> None:
    used = len(studio.eager.script)
    told = await imagined(studio.here, request(USER, max_tokens=used + 3), accepts_images=True)
    assert told.outcome.end is not None
    assert told.outcome.end.usage is not None
    assert told.outcome.end.usage.completion_tokens == used + 3
    assert told.outcome.end.status == "length"
    none_left = await imagined(studio.here, request(USER, max_tokens=used), accepts_images=True)
    assert len(none_left.drawings) == 1
    assert none_left.outcome.end is not None
    assert none_left.outcome.end.status == "length"
    assert none_left.text == ""


@pytest.mark.parametrize("phase", ["thinking", "drawing", "describing"])
async def test_whoever_leaves_frees_everything(studio: Studio, phase: str) -> None:
    studio.eager.pause = 0.01
    kind = {"thinking": list, "drawing": DenoisingProgress, "describing": list}[phase]
    brush = Draw(model=BRUSH.model, prompt="", steps=6 if phase == "describing" else 2000)
    drawn = False
    async with aclosing(
        imagine(studio.here.gateway, studio.here.store, request(USER), brush, accepts_images=True)
    ) as events:
        async for event in events:
            drawn = drawn or isinstance(event, Drawing)
            if isinstance(event, kind) and (phase != "describing" or drawn):
                break
    assert drawn == (phase == "describing")
    await asyncio.wait_for(studio.idle(), 30)
    assert studio.painter.thread.engine.passes < 1000


async def test_the_deadline_is_that_of_all_stages(studio: Studio) -> None:
    brush = Draw(model=BRUSH.model, prompt="", steps=2000)
    with pytest.raises(DeadlineExceeded):
        await imagined(studio.here, request(USER), brush, accepts_images=True, deadline=1.0)
    await asyncio.wait_for(studio.idle(), 30)


# -------------------------------------------------------------------------------------- what a model may do with a tool
@dataclass
class Talker:
    caller: Caller
    tokenizer: FakeTokenizer

    def says(self, *turns: list[Text]) -> None:
        """One turn after the other, and the last one again and again."""
        left = list(turns)
        self.tokenizer.reply = lambda _: left.pop(0) if len(left) > 1 else left[0]

    async def told(self, brush: Draw = BRUSH, **fields: Any) -> Told:
        return await imagined(self.caller, request(USER, model=FAKE, **fields), brush, patience=0.2)

    def results(self) -> list[Any]:
        """What the model was told of its calls, in the last turn."""
        messages = self.tokenizer.requests[-1].messages
        return [json.loads(message["content"]) for message in messages if message["role"] == "tool"]


@asynccontextmanager
async def talking(easel: Path, painters: int = 1) -> AsyncIterator[Talker]:
    async with diffusion_stage.stage(easel, painters, longest_text=200) as (caller, _, hub):
        tokenizer = FakeTokenizer(None, await memory_bus(hub, "tokenizer"))
        async with running(tokenizer), running(FakeDecode(None, await memory_bus(hub, "decode"))):
            await settle()
            yield Talker(caller, tokenizer)


@pytest.fixture
async def talker(easel: Path) -> AsyncIterator[Talker]:
    async with talking(easel) as made:
        yield made


def drawing_call(prompt: str, index: int = 0) -> Text:
    return tool_call(json.dumps({"prompt": prompt}), index=index)


async def test_a_blind_model_hears_what_was_drawn(talker: Talker) -> None:
    talker.says(
        [*words("Two of them."), drawing_call("a circle"), drawing_call("a star", 1)],
        words("Here they are."),
    )
    told = await talker.told()
    assert told.text == "Two of them.Here they are."
    assert [one.prompt for one in told.drawings] == ["a circle", "a star"]
    assert told.drawings[0].data != told.drawings[1].data
    assert [result["prompt"] for result in talker.results()] == ["a circle", "a star"]
    last = talker.tokenizer.requests[-1]
    assert [message["role"] for message in last.messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in last.messages[1]["tool_calls"]] == ["call_0", "call_1"]
    assert not last.images


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"prompt": ', "give {"),
        ("[]", "give {"),
        ('{"prompt": 5}', "give {"),
        ('{"prompt": "  "}', "give {"),
        (json.dumps({"prompt": "x" * 300}), "300 characters; at most 200 are read"),
    ],
)
async def test_what_the_model_did_wrong_is_told_to_it(
    talker: Talker, arguments: str, message: str
) -> None:
    talker.says([tool_call(arguments)], words("Sorry."))
    told = await talker.told()
    assert (told.text, told.drawings) == ("Sorry.", [])
    (result,) = talker.results()
    assert message in result["error"]


@pytest.mark.parametrize(
    ("brush", "error"),
    [({"width": 30_000, "height": 30_000}, PayloadTooLarge), ({"model": "nobody"}, UnknownModel)],
)
async def test_what_the_caller_did_wrong_is_the_callers(
    talker: Talker, brush: dict[str, Any], error: type[MotetError]
) -> None:
    talker.says([drawing_call("a star")], words("never said"))
    with pytest.raises(error):
        await talker.told(Draw(**{"model": BRUSH.model, "prompt": "", "steps": 6, **brush}))


async def test_without_anybody_who_draws_the_conversation_goes_on(easel: Path) -> None:
    async with talking(easel, painters=0) as talker:
        talker.says([drawing_call("a star")], words("Sorry."))
        told = await talker.told()
        assert told.text == "Sorry."
        assert talker.results() == [{"error": "unavailable"}]


async def test_the_callers_tools_are_the_callers(talker: Talker) -> None:
    weather = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    talker.says(
        [drawing_call("a star"), tool_call('{"city": "x"}', "weather", 1)], words("never said")
    )
    told = await talker.told(tools=[weather])
    assert [(piece.index, piece.name, piece.arguments) for piece in told.calls] == [
        (0, "weather", ""),
        (0, "", '{"city": "x"}'),
    ]
    assert len(told.drawings) == 1
    (asked,) = talker.tokenizer.requests
    assert asked.tools == [weather, DRAW_TOOL]


async def test_a_model_that_draws_without_end_is_stopped(talker: Talker) -> None:
    talker.says(
        [drawing_call("a star")],
        [drawing_call("a star", index) for index in range(MAX_PICTURES + 2)],
        words("Done."),
    )
    told = await talker.told()
    assert len(told.drawings) == MAX_PICTURES
    assert [("error" in result) for result in talker.results()] == [False] * MAX_PICTURES + [
        True
    ] * 3
    assert talker.tokenizer.requests[-1].tools == []
    assert told.text == "Done."


@pytest.mark.parametrize("arguments", ["[]", '{"prompt": "a star"}'])
async def test_a_model_that_calls_for_ever_is_left(talker: Talker, arguments: str) -> None:
    talker.says([tool_call(arguments)])
    told = await talker.told()
    assert len(told.drawings) == (0 if arguments == "[]" else MAX_PICTURES)
    assert len(talker.tokenizer.requests) == MAX_PICTURES + 2
    assert [bool(asked.tools) for asked in talker.tokenizer.requests] == [True] * MAX_PICTURES + [
        False
    ] * 2


async def test_without_a_call_nothing_is_drawn(talker: Talker) -> None:
    talker.says(words("Hello there."))
    told = await talker.told()
    assert (told.text, told.drawings, len(talker.tokenizer.requests)) == ("Hello there.", [], 1)
