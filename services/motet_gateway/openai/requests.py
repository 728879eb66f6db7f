"""Convert validated bodies to tokenizer requests: one per choice, each with its own seed."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from motet_gateway.kept import draws
from motet_gateway.tenancy.rights import UNRESTRICTED, Rights
from motet_pipelines.images.chat_drawing import remembered
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Chat, Complete, Sampling

from .reply_details import ReplyDetails
from .schema import (
    AssistantMessage,
    AudioPart,
    ChatBody,
    CompletionBody,
    Content,
    FunctionTool,
    ImagePart,
    Message,
    Part,
    RefusalPart,
    SamplingFields,
    TextPart,
    Tool,
    UserMessage,
    VideoPart,
    grammar_of_body,
)
from .structured import ToolChoice, tool_choice_of

# Fields for which a model may recommend values.
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MEDIA = (ImagePart, VideoPart, AudioPart)
_SEED_MASK = 2**63 - 1
MAX_COMPLETIONS = 32  # prompts * n of one request


def chat_requests(
    body: ChatBody, request_id: str, rights: Rights = UNRESTRICTED, *, accepts_images: bool = False
) -> list[Chat]:
    """Return one request per choice.

    The seed is fixed here, so that a stream that fails over continues with the same noise.
    `accepts_images`: the model is shown the images of earlier replies.
    """
    choice = tool_choice_of(body.tool_choice) if body.tools else ToolChoice("none")
    base = Chat(
        model=body.model,
        messages=wire_messages(body.messages, accepts_images=accepts_images),
        sampling=_sampling(
            body, body.max_completion_tokens or body.max_tokens, _chat_logprobs(body)
        ),
        tools=wire_tools(body.tools or []),
        tool_choice=choice.kind,
        tool=choice.tool,
        parallel_tools=body.parallel_tool_calls is not False,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        grammar=grammar_of_body(body),
        reasoning_effort=body.reasoning_effort or "",
        template_options=body.chat_template_kwargs or {},
        stop=_stops(body.stop),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        request_id=request_id,
        priority=rights.priority(body.service_tier),
        tenant=rights.share(body.safety_identifier or body.user or ""),
        max_context=rights.max_context,
    )
    requests = [_with_seed(base, seed) for seed in _seeds(body.seed, body.n or 1)]
    # The choices share a prompt, so one of them returns what is wanted of it.
    return [replace(requests[0], **_of_prompt(body, requests[0].sampling)), *requests[1:]]


def completion_requests(
    body: CompletionBody, request_id: str, rights: Rights = UNRESTRICTED
) -> list[Complete]:
    """Return one request per prompt and choice, in the order of the choices' indices.

    Raises BadRequest for more than MAX_COMPLETIONS completions.
    """
    prompts, n = _prompts(body.prompt), body.n or 1
    if len(prompts) * n > MAX_COMPLETIONS:
        message = f"`prompt` times `n` requests {len(prompts) * n} completions; at most {MAX_COMPLETIONS} are allowed"
        raise BadRequest(message, param="prompt")
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    base = Complete(
        model=body.model,
        prompt="",
        sampling=_sampling(body, max_tokens, -1 if body.logprobs is None else body.logprobs),
        grammar=grammar_of_body(body),
        echo=bool(body.echo),
        suffix=body.suffix or "",
        stop=_stops(body.stop),
        max_tokens=max_tokens,
        request_id=request_id,
        priority=rights.priority(body.service_tier),
        tenant=rights.share(body.user or ""),
        max_context=rights.max_context,
    )
    base = replace(base, **_of_prompt(body, base.sampling))
    return [
        replace(_with_seed(base, seed), prompt=prompt)
        for prompt in prompts
        for seed in _seeds(body.seed, n)
    ]


def reply_details(body: ChatBody | CompletionBody) -> ReplyDetails:
    """Return what a body wants of its reply besides the text."""
    echoes = isinstance(body, CompletionBody) and body.echo and body.logprobs is not None
    return ReplyDetails(
        token_ids=bool(body.return_token_ids),
        echo_logprobs=_or_none(body.logprobs) if echoes else -1,
        prompt_logprobs=_or_none(body.prompt_logprobs),
    )


def _of_prompt(body: ChatBody | CompletionBody, sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request for what is wanted of its prompt."""
    details = reply_details(body)
    most = max(details.echo_logprobs, details.prompt_logprobs)
    return {
        "return_prompt": details.token_ids,
        "sampling": replace(sampling, prompt_logprobs=most),
    }


def wire_messages(messages: list[Message], *, accepts_images: bool = False) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's format with plain strings as content.

    The role `developer`, the newer name, becomes `system`. A user's message with images keeps its
    parts; {"type": "image"} and {"type": "audio"} stand for the next one of `chat_images.sources`.
    """
    plain = []
    for index, message in enumerate(messages):
        shape: dict[str, Any] = msgspec.to_builtins(message)
        if shape["role"] == "developer":
            shape["role"] = "system"
        if message.content is not None:
            shape["content"] = _content(message, f"messages[{index}].content")
        if isinstance(message, AssistantMessage):
            _check_assistant(message, index)
            shape.pop("audio", None)
            if message.content is None and message.audio is not None:
                shape["content"] = message.audio.transcript or ""
            shape.setdefault("content", "")
            shape.pop("annotations", None)
            if (reasoning := shape.pop("reasoning", None)) is not None:
                shape.setdefault("reasoning_content", reasoning)
            if shape.pop("images", None):
                plain += remembered(
                    [image.revised_prompt or "" for image in message.images or []],
                    accepts_images=accepts_images,
                )
        plain.append(shape)
    return plain


def _content(message: Message, where: str) -> str | list[dict[str, str]]:
    content = message.content or ""
    if isinstance(content, str) or not (isinstance(message, UserMessage) and _has_media(content)):
        return flatten(content, where)
    return [
        {"type": "audio" if isinstance(part, AudioPart) else "image"}
        if isinstance(part, _MEDIA)
        else {"type": "text", "text": flatten([part], where, index)}
        for index, part in enumerate(content)
    ]


def _has_media(content: list[Part]) -> bool:
    return any(isinstance(part, _MEDIA) for part in content)


def flatten(content: Content, where: str, first: int = 0) -> str:
    """Return the text of a message, with several text parts joined by newlines.

    Raises UnsupportedParameter for other media. `first` is the index of the first part.
    """
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content, first):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            kind, param = part.__struct_config__.tag, f"{where}[{index}]"
            if isinstance(part, _MEDIA):
                message = f"`{param}`: `{kind}` is accepted in user messages only; move it there"
                raise UnsupportedParameter(message, param=param)
            raise UnsupportedParameter(
                f"`{param}`: content of type `{kind}` is not supported; send text parts",
                param=param,
            )
    return "\n".join(texts)


def wire_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return the function tools.

    The image tool is left out: image generation runs in the gateway, which declares it itself.
    """
    return [
        {"type": "function", "function": msgspec.to_builtins(tool.function)}
        for tool in tools
        if isinstance(tool, FunctionTool)
    ]


def random_seed() -> int:
    return draws.randbits(63)


def _check_assistant(message: AssistantMessage, index: int) -> None:
    if (
        message.content is not None
        or message.tool_calls
        or message.images
        or message.refusal is not None
    ):
        return
    if message.audio is None:
        param = f"messages[{index}].content"
        raise BadRequest(f"`{param}` is required unless the message has `tool_calls`", param=param)
    if message.audio.transcript is None:
        param = f"messages[{index}].audio.transcript"
        text = f"`{param}`: sounds are not kept here; send the reply's transcript with its id"
        raise BadRequest(text, param=param)


def _stops(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _seeds(seed: int | None, n: int) -> list[int]:
    first = random_seed() if seed is None else seed & _SEED_MASK
    return [(first + index) & _SEED_MASK for index in range(n)]


def _with_seed(request: Any, seed: int) -> Any:
    sampling = replace(request.sampling, seed=seed)
    return replace(request, sampling=sampling)


def _chat_logprobs(body: ChatBody) -> int:
    return (body.top_logprobs or 0) if body.logprobs else -1


def _sampling(body: SamplingFields, max_tokens: int | None, logprobs: int) -> Sampling:
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(
            f"`min_tokens` {min_tokens} exceeds the {max_tokens} tokens allowed", param="min_tokens"
        )
    top_k = max(body.top_k or 0, 0)
    if body.top_p == 0:  # only the most probable token remains
        top_k = 1
    return Sampling(
        temperature=_or(body.temperature, 1.0),
        top_k=top_k,
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=body.logit_bias or {},
        logprobs=logprobs,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or [],
        left_out=[
            name
            for name in _RECOMMENDED
            if getattr(body, name) is None and not (name == "top_k" and top_k)
        ],
        # A placeholder: without a limit the tokenizer sets the rest of the context.
        max_tokens=16 if max_tokens is None else max_tokens,
    )


def _or_none(count: int | None) -> int:
    """Return a number of alternatives, -1 for none requested."""
    return -1 if count is None else count


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the prompts of a completion request.

    Raises BadRequest if they are empty, or mix token ids with texts.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("`prompt` must not be empty", param="prompt")
    kinds = {type(entry) for entry in prompt}
    if len(kinds) > 1:
        raise BadRequest(
            "`prompt` must be a text, token ids, or a list of one of them", param="prompt"
        )
    ids = [entry for entry in prompt if isinstance(entry, int)]
    if ids:
        _check_ids(ids)
        return [ids]
    for entry in prompt:
        if isinstance(entry, list):
            _check_ids(entry)
    return [entry for entry in prompt if not isinstance(entry, int)]


def _check_ids(ids: list[int]) -> None:
    if not ids:
        raise BadRequest("`prompt` must not contain an empty list of token ids", param="prompt")
    if min(ids) < 0:
        raise BadRequest(
            f"`prompt` contains the token id {min(ids)}; ids start at 0", param="prompt"
        )
