"""Describe the answers to clients as structs, for the OpenAPI document.

Tests compare them with real answers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0)]
Unix = Annotated[int, Meta(ge=0, description="Unix time in seconds")]
Seconds = Annotated[float, Meta(ge=0)]


# --------------------------------------------------------------------------------------------------------------- errors
class ErrorDetail(Struct):
    """An error; `param` is the wrong parameter's path, `message` has its value and a remedy."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct):
    error: ErrorDetail


# ------------------------------------------------------------------------------------------------- chat and completions
class CachedDetails(Struct):
    cached_tokens: Count
    image_tokens: Count = 0
    audio_tokens: Count = 0


class ReasoningDetails(Struct):
    reasoning_tokens: Count
    accepted_prediction_tokens: Count = 0
    rejected_prediction_tokens: Count = 0


class TokenUsage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedDetails
    completion_tokens_details: ReasoningDetails


class LikelyToken(Struct):
    """A token and its log-probability; `bytes` is exact if the token is part of a character."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChosenToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Struct):
    content: list[ChosenToken]
    refusal: None


class CalledFunction(Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON, as the model wrote it")]


class CalledTool(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class DataUrl(Struct):
    url: str


class GeneratedImage(Struct):
    """An image that was generated in a chat, as a data URL."""

    type: Literal["image_url"]
    image_url: DataUrl
    index: Count
    revised_prompt: str | None = None


class SpokenReply(Struct):
    """The sound of a reply; `error`, an extension, says why it ends early."""

    id: str
    data: Annotated[str, Meta(description="base64")]
    expires_at: Unix
    transcript: str
    error: dict[str, str | bool | None] | None = None


class ChatMessage(Struct):
    """A reply; `reasoning_content`, an extension, is what the model wrote before it answered."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[CalledTool] = []
    images: list[GeneratedImage] = []
    audio: SpokenReply | None = None


class ChatChoice(Struct):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[Count] = []


class RankedToken(Struct):
    """Log-probability of a token and its rank among all, from 1."""

    logprob: float
    rank: Annotated[int, Meta(ge=1)]
    decoded_token: str


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: Unix
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[Count] = []
    prompt_logprobs: list[dict[str, RankedToken] | None] = []


class CompletionLogprobs(Struct):
    """Log-probabilities of tokens, as parallel lists; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(Struct):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[Count] = []
    prompt_token_ids: list[Count] = []
    prompt_logprobs: list[dict[str, RankedToken] | None] = []


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: Unix
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage


# ------------------------------------------------------------------------------------------------------- models, voices
class Loading(Struct):
    """Where a model stands that is loaded on demand: `seconds` and `share` are estimates."""

    stage: Literal["absent", "queued", "clearing", "loading", "ready", "leaving", "failed"]
    share: float
    seconds: float
    problem: str = ""


class Model(Struct):
    """A model that is ready, starting, or loaded on demand.

    `context_length`, `images`, `audio`, `tools` and `reasoning` are of chat models, `voices` of speech models. `parent`
    is the base model of an adapter. `status` is "starting" for an expected model that cannot be
    used yet, and "unloaded" or "loading" for one that is loaded on demand; requests for these wait.
    """

    id: str
    object: Literal["model"]
    created: Unix
    owned_by: str
    kind: Literal["chat", "speech", "transcription", "embedding", "ranking", "image", "video"]
    status: Literal["ready", "starting", "unloaded", "loading", "failed"]
    capabilities: list[str] = []
    loading: Loading | None = None
    context_length: Count = 0
    images: bool = False
    audio: bool = False
    tools: bool = False
    reasoning: bool = False
    parent: str = ""
    voices: list[str] = []


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class SpeechVoice(Struct):
    """A voice of a model, or one of the tenant's own, which has a name."""

    id: str
    object: Literal["audio.voice"]
    model: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    seconds: float | UnsetType = UNSET
    created_at: Unix | UnsetType = UNSET


VoiceId = Annotated[str, Meta(pattern="^voice_[0-9a-f]{24}$")]


class OwnVoice(Struct):
    """A voice that a tenant made of a recording, in which `text` is said."""

    id: VoiceId
    object: Literal["audio.voice"]
    name: str
    text: str
    seconds: float
    created_at: Unix


class VoiceList(Struct):
    object: Literal["list"]
    data: list[SpeechVoice]


class DeletedVoice(Struct):
    id: VoiceId
    object: Literal["audio.voice"]
    deleted: Literal[True]


# ----------------------------------------------------------------------------------------------------------- embeddings
class EmbeddingUsage(Struct):
    prompt_tokens: Count
    total_tokens: Count


_Vector = list[float] | Annotated[str, Meta(description="base64 of little-endian float32")]


class Embedding(Struct):
    """A text's vector, or the vectors of its tokens where the model has one of each."""

    object: Literal["embedding"]
    index: Count
    embedding: _Vector | None = None
    embeddings: list[_Vector] | None = None


class EmbeddingList(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedDocument(Struct):
    """A document: its place in the request, and the document itself if it is wanted."""

    index: Count
    relevance_score: float
    document: dict[str, Any] | None = None


class RankedTokens(Struct):
    input_tokens: Count


class RerankingMeta(Struct):
    tokens: RankedTokens


class Reranking(Struct):
    """Documents by their relevance, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
    meta: RerankingMeta


class PairScore(Struct):
    index: Count
    object: Literal["score"]
    score: float


class ScoreList(Struct):
    id: str
    object: Literal["list"]
    created: Unix
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


class TokenizedPrompt(Struct):
    """The answer of vLLM's /tokenize; `token_strs` are the texts, if they were requested."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizedPrompt(Struct):
    prompt: str


# ----------------------------------------------------------------------------------------------------------- recordings
class DurationUsage(Struct):
    type: Literal["duration"]
    seconds: Count


class TimedWord(Struct):
    word: str
    start: Seconds
    end: Seconds


class TimedSegment(Struct):
    id: Count
    seek: Count
    start: Seconds
    end: Seconds
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class SpokenSegment(Struct):
    type: Literal["transcript.text.segment"]
    id: str
    start: Seconds
    end: Seconds
    text: str
    speaker: str


class Transcription(Struct, forbid_unknown_fields=True):
    """Answer for `response_format` json."""

    text: str
    usage: DurationUsage


class VerboseTranscription(Struct, forbid_unknown_fields=True):
    """Answer for `response_format` verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: Seconds
    text: str
    usage: DurationUsage
    segments: list[TimedSegment] = []
    words: list[TimedWord] = []


class DiarizedTranscription(Struct, forbid_unknown_fields=True):
    """Answer for `response_format` diarized_json."""

    task: Literal["transcribe"]
    duration: Seconds
    text: str
    segments: list[SpokenSegment]
    usage: DurationUsage


# --------------------------------------------------------------------------------------------------------------- images
class ImageData(Struct):
    """An image: its data in base64, or a URL that expires."""

    b64_json: str = ""
    url: str = ""


class Images(Struct):
    created: Unix
    data: list[ImageData]
    background: Literal["opaque"]
    output_format: Literal["png", "jpeg", "webp"]
    quality: str
    size: Annotated[str, Meta(pattern="^[0-9]+x[0-9]+$")]


class ImageJob(Struct):
    """A job; `position` in the queue while queued, `data` once done, `error` once failed."""

    id: str
    object: Literal["image.job"]
    created_at: Unix
    status: Literal["queued", "running", "done", "failed", "cancelled"]
    position: int | None
    step: Count
    steps: Count
    data: list[ImageData]
    error: ErrorDetail | None


# ---------------------------------------------------------------------------------------------------- realtime sessions
class ClientSecretAnswer(Struct):
    """A client secret; `session` is the session that it opens."""

    value: str
    expires_at: Unix
    session: dict[str, Any]
