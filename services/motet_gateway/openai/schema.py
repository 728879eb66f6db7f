"""Define the request bodies of OpenAI-compatible endpoints as structs that reject everything else.

Every parameter is in one of four places: a typed field (implemented), `NO_EFFECT` (accepted at
values that request nothing), the table of `hints.py` (cannot change the answer: ignored, and named
in the response header `motet-ignored`; refused with `--strict`), or nowhere (refused by name as
unknown). `requests.py` converts a valid body to requests for the tokenizer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet_gateway.http.decoding import Decoder
from motet_gateway.http.fields import Count, Int64, Metadata, Name, Penalty, Positive, Ratio, Strict
from motet_gateway.images.options import ImageTool
from motet_pipelines.images.chat_drawing import TOOL
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import TEMPLATE_OPTIONS_SIZE, Grammar
from motet_shared.text.characters import characters

from .hints import Ignored
from .structured import (
    ALIASES,
    ResponseFormat,
    StructuredOutputs,
    check_tool_choice,
    grammar_of,
    tool_choice_of,
)

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_IDS = 256

Bias = Annotated[float, Meta(ge=-100, le=100)]


# -------------------------------------------------------------------------------------------------- chat messages
class TextPart(Strict, tag="text"):
    text: str


class ImageUrl(Strict):
    """URL of an image; the extension `max_pixels` takes precedence over `detail`."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    max_pixels: Positive | None = None


class ImagePart(Strict, tag="image_url"):
    image_url: ImageUrl


class VideoPart(Strict, tag="video_url"):
    """Hold a video, in the format common to servers of open models; not part of OpenAI's API.

    `max_pixels` applies to each frame.
    """

    video_url: ImageUrl


class InputAudio(Strict):
    """A recording: a file in base64."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(Strict, tag="input_audio"):
    input_audio: InputAudio


class FilePart(Strict, tag="file"):
    file: Any


class RefusalPart(Strict, tag="refusal"):
    refusal: str


Part = TextPart | ImagePart | VideoPart | AudioPart | FilePart | RefusalPart
Content = str | list[Part]


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class SystemMessage(Strict, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(Strict, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None


class UserMessage(Strict, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class DrawnImage(ImagePart, tag="image_url"):
    """An image of an earlier reply, as it was returned; `revised_prompt` describes it."""

    index: int | None = None
    revised_prompt: str | None = None


class SpokenAudio(Strict):
    """The sound of an earlier reply as it was sent; what counts is its transcript."""

    id: str
    transcript: str | None = None
    data: str | None = None
    expires_at: int | None = None
    error: Any = None


class AssistantMessage(Strict, tag_field="role", tag="assistant"):
    """An earlier reply, as clients send it back.

    The chat template decides whether its reasoning is kept; `reasoning` is another name of
    `reasoning_content`. `annotations` and `function_call` are accepted as null or empty.
    The transcript of `audio` is the content of a message without one.
    """

    content: Content | None = None
    images: list[DrawnImage] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: SpokenAudio | None = None
    function_call: None = None


class ToolMessage(Strict, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


# --------------------------------------------------------------------------------------------------- chat request
class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict, tag="function"):
    function: Function


Tool = FunctionTool | ImageTool


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = (
        None  # extension that servers of open models share: usage in every chunk
    )


class SamplingFields(Strict):
    """Fields that chat and plain completions share.

    Those from `top_k` on are extensions that servers of open models share.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Ratio | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Count, Bias] | None = None
    max_tokens: Positive | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: Ratio | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None  # OpenAI has it in chats only
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # older names of its fields
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_IDS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None


class AudioOptions(Strict):
    """How replies are spoken, with `modalities` ["text", "audio"]; `pcm16` is the format of streams."""

    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
    voice: str | None = None


class ChatBody(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # Extensions that servers of open models share: variables of the chat template, and whether
    # reasoning is returned.
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    # Whether the prompt ends with the head of a new turn (true), and whether the reply continues the
    # last message instead.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # How replies are spoken, with `modalities` ["text", "audio"].
    audio: AudioOptions | None = None
    # They cannot change the answer, so any value of the right type is accepted.
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # See NO_EFFECT.
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(SamplingFields, kw_only=True):
    """Body of POST /v1/completions; `prompt` is a text, token ids, or a list of either.

    `max_tokens` 0 asks for the prompt alone: echoed, or its log-probabilities. `suffix` is the text
    behind the gap that the completion fills.
    """

    prompt: str | list[str | int | list[int]]
    max_tokens: Count | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # See NO_EFFECT.
    best_of: Any = None


# Values of `modalities` that enable the tool `image_generation` with its defaults.
DRAWING = (["text", "image"], ["image", "text"])

# Values of `modalities` with which replies are spoken, as `audio` says.
SPEAKING = (["text", "audio"], ["audio", "text"])

# Values, besides null, at which a parameter requests nothing. Any other value is refused with an
# error that names the parameter.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": (),
    "functions": (),
    "modalities": (["text"], *DRAWING, *SPEAKING),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_chat = Decoder(ChatBody)
_completion = Decoder(CompletionBody)


def parse_chat(body: bytes, ignored: Ignored | None = None) -> ChatBody:
    """Validate a chat body; without `ignored`, hints are refused.

    Raises BadRequest or UnsupportedParameter, which name the parameter.
    """
    request = _chat.decode(body, ignored)
    _check_common(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        message = f"`max_tokens` ({both[0]}) and `max_completion_tokens` ({both[1]}) differ; send only the latter"
        raise BadRequest(message, param="max_tokens")
    if characters(request.chat_template_kwargs, TEMPLATE_OPTIONS_SIZE) > TEMPLATE_OPTIONS_SIZE:
        message = (
            f"`chat_template_kwargs` has more than {TEMPLATE_OPTIONS_SIZE} characters; give fewer"
        )
        raise BadRequest(message, param="chat_template_kwargs")
    check_tools(request)
    return request


def parse_completion(body: bytes, ignored: Ignored | None = None) -> CompletionBody:
    """Validate a completion body; without `ignored`, hints are refused.

    Raises BadRequest or UnsupportedParameter, which name the parameter.
    """
    request = _completion.decode(body, ignored)
    _check_common(request)
    if request.suffix and request.echo:
        raise UnsupportedParameter(
            "`suffix` with `echo` is not supported; send one of them", param="suffix"
        )
    if request.suffix and not _is_text(request.prompt):
        raise BadRequest("`suffix` needs a `prompt` of text, not of token ids", param="suffix")
    return request


def _is_text(prompt: str | list[str | int | list[int]]) -> bool:
    return isinstance(prompt, str) or all(isinstance(entry, str) for entry in prompt)


def grammar_of_body(request: SamplingFields) -> Grammar | None:
    """Return the grammar that a body asks for. Raises BadRequest for more than one."""
    values = {name: getattr(request, name) for name in ALIASES}
    guided = {name: value for name, value in values.items() if value is not None}
    return grammar_of(request.response_format, request.structured_outputs, guided)


def check_tools(request: ChatBody) -> None:
    """Check the tools of a chat.

    There is at most one image tool, no function has its name, required functions exist, and no call
    is required if images are generated. Raises BadRequest or UnsupportedParameter.
    """
    tools = request.tools or []
    draws = [index for index, tool in enumerate(tools) if isinstance(tool, ImageTool)]
    if len(draws) > 1:
        where = f"tools[{draws[1]}]"
        raise BadRequest(
            f"`{where}`: only one `image_generation` is allowed; remove this one", param=where
        )
    names = [tool.function.name for tool in tools if isinstance(tool, FunctionTool)]
    for index, tool in enumerate(tools):
        if draws and isinstance(tool, FunctionTool) and tool.function.name == TOOL:
            where = f"tools[{index}].function.name"
            message = f"`{where}` {TOOL!r} is reserved for `image_generation`; choose another name"
            raise BadRequest(message, param=where)
    choice = tool_choice_of(request.tool_choice)
    if choice.kind == "required" and (draws or request.modalities in DRAWING):
        message = "`tool_choice`: a call cannot be required together with image generation; send 'auto' or 'none'"
        raise UnsupportedParameter(message, param="tool_choice")
    check_tool_choice(choice, names)


def _check_common(request: ChatBody | CompletionBody) -> None:
    for name, accepted in NO_EFFECT.items():
        value = getattr(request, name, None)
        if value is not None and not any(
            value == ok and type(value) is type(ok) for ok in accepted
        ):
            raise UnsupportedParameter(_refusal(name, value, accepted), param=name)
    if request.stream_options is not None:
        _check_stream_options(request.stream_options, request.stream)
    grammar_of_body(request)
    if request.stream and request.prompt_logprobs is not None:
        message = "`prompt_logprobs` is not streamed; omit `stream`, or send `echo` with `logprobs`"
        raise UnsupportedParameter(message, param="prompt_logprobs")
    check_stops([request.stop] if isinstance(request.stop, str) else request.stop or [])


def check_stops(stops: list[str], most: int = MAX_STOPS, param: str = "stop") -> None:
    """Raise BadRequest for more than `most` stop strings, or an empty one."""
    if len(stops) > most:
        message = f"`{param}` has {len(stops)} strings; at most {most} are allowed"
        raise BadRequest(message, param=param)
    if "" in stops:
        raise BadRequest(f"`{param}` must not contain an empty string", param=param)


def _check_stream_options(options: StreamOptions, stream: bool | None) -> None:
    if not stream:
        raise BadRequest("`stream_options` needs `stream: true`", param="stream_options")
    if options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise UnsupportedParameter(_refusal(name, True, (False,)), param=name)


def _refusal(name: str, value: Any, accepted: tuple[Any, ...]) -> str:
    allowed = " or ".join(["null", *map(_shown, accepted)])
    return f"`{name}` {_shown(value)} is not supported; omit it or send {allowed}"


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."
