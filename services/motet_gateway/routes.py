"""List all routes of the gateway, each with who may call it, its handler, body and answer.

The table feeds FastAPI's router, the one path of authentication and errors (`http/guard.py`), and
the OpenAPI document. Starlette tries routes in this order, so the busiest come first.
"""

from __future__ import annotations

from typing import Any

from motet_gateway.anthropic.endpoints import count_message_tokens, create_message
from motet_gateway.anthropic.errors import ERRORS as MESSAGES_ERRORS
from motet_gateway.anthropic.models import error_format
from motet_gateway.anthropic.schema import MessagesBody, PromptFields
from motet_gateway.audio.encoder import content_types
from motet_gateway.audio.speech import SpeechBody, speech
from motet_gateway.audio.speech_stream.endpoint import speech_stream
from motet_gateway.audio.transcriptions import transcriptions, translations
from motet_gateway.audio.voices import create_voice, delete_voice, list_voices
from motet_gateway.batches import endpoints as batches
from motet_gateway.batches.schema import BatchBody, BatchesQuery
from motet_gateway.files import endpoints as files
from motet_gateway.files.schema import FilesQuery
from motet_gateway.http.route import SOCKET, Access, Route, Serving
from motet_gateway.images import jobs_endpoints
from motet_gateway.images.endpoints import edits, generations
from motet_gateway.images.jobs_endpoints import JobBody
from motet_gateway.images.schema import GenerationBody
from motet_gateway.ollama import models as ollama_models
from motet_gateway.ollama.embed import embed, embed_prompt
from motet_gateway.ollama.endpoints import create_chat, generate
from motet_gateway.ollama.errors import ERRORS as OLLAMA_ERRORS
from motet_gateway.ollama.errors import OllamaError
from motet_gateway.ollama.pull import pull_model
from motet_gateway.ollama.refused import refuse
from motet_gateway.ollama.schema import (
    EmbedBody,
    EmbeddingsPromptBody,
    GenerateBody,
    OllamaChatBody,
    PullBody,
    ShowBody,
)
from motet_gateway.openai import models
from motet_gateway.openai.chat import chat_completions, completions
from motet_gateway.openai.embeddings import EmbeddingsBody, embeddings
from motet_gateway.openai.schema import ChatBody, CompletionBody
from motet_gateway.openapi import answers, messages, ollama, responses, stored_files
from motet_gateway.openapi import operations as watching
from motet_gateway.openapi import videos as answered_videos
from motet_gateway.openapi.document import JSON, openapi, query_parameters
from motet_gateway.openapi.forms import (
    Schema,
    call_form,
    edit_form,
    file_form,
    transcription_form,
    video_form,
    voice_form,
)
from motet_gateway.operations import health, stack
from motet_gateway.operations.adapters import (
    LoadAdapterBody,
    UnloadAdapterBody,
    load_adapter,
    unload_adapter,
)
from motet_gateway.operations.doctor import doctor
from motet_gateway.ranking.pair_scores import ScoreBody, score_pairs
from motet_gateway.ranking.rerank import RerankBody, rerank, rerank_v2
from motet_gateway.realtime.client_secrets import ClientSecretBody, create_client_secret
from motet_gateway.realtime.endpoint import realtime
from motet_gateway.realtime.webrtc.endpoint import CallsQuery, create_call, hang_up
from motet_gateway.responses import retrieval
from motet_gateway.responses.endpoints import create_response
from motet_gateway.responses.schema import ResponseBody
from motet_gateway.videos import endpoints as videos
from motet_gateway.videos.schema import ContentQuery, RemixBody, VideosQuery
from motet_gateway.vllm.tokens import (
    DetokenizeBody,
    TokenizeBody,
    detokenize_prompt,
    tokenize_prompt,
)
from motet_gateway.web.page import page_routes

TENANT, OPERATOR, PUBLIC = Access.TENANT, Access.OPERATOR, Access.PUBLIC
STREAM, ENDPOINT = Serving.STREAM, Serving.ENDPOINT
_EVENTS, _PLAIN, _VTT = "text/event-stream", "text/plain", "text/vtt"
_LINES = "application/x-ndjson"
_TEXT: Schema = {"type": "string"}
_BYTES: Schema = {"type": "string", "format": "binary"}
_EVENT: Schema = {  # one event of a stream
    "type": "object",
    "properties": {"event": _TEXT, "data": {**_TEXT, "contentMediaType": JSON}},
    "required": ["data"],
}
_TRANSCRIPTS = (answers.Transcription, answers.VerboseTranscription)
_WRITTEN: dict[str, Any] = {_EVENTS: _EVENT, _PLAIN: _TEXT, _VTT: _TEXT}
_DRAWN: dict[str, Any] = {JSON: answers.Images, _EVENTS: _EVENT}
_UNREADY = ((503, watching.Health),)

_REPEATED = tuple(
    {"name": name, "in": "header", "schema": _TEXT} for name in ("idempotency-key", "last-event-id")
)

_TEXTS = (
    Route(
        "POST", "/v1/chat/completions", TENANT, chat_completions, STREAM,
        summary="A reply to a conversation", tag="text", repeatable=True, parameters=_REPEATED,
        body=ChatBody, answer={JSON: answers.ChatCompletion, _EVENTS: _EVENT},
    ),
    Route(
        "POST", "/v1/completions", TENANT, completions, STREAM,
        summary="A text that goes on", tag="text", repeatable=True, parameters=_REPEATED,
        body=CompletionBody, answer={JSON: answers.Completion, _EVENTS: _EVENT},
    ),
    Route(
        "POST", "/v1/embeddings", TENANT, embeddings, STREAM,
        summary="Vectors of texts", tag="text", repeatable=True, parameters=_REPEATED,
        body=EmbeddingsBody, answer={JSON: answers.EmbeddingList},
    ),
    Route(
        "POST", "/v1/rerank", TENANT, rerank, STREAM,
        summary="Documents by their relevance for a query", tag="text",
        body=RerankBody, answer={JSON: answers.Reranking},
    ),
    Route(
        "POST", "/rerank", TENANT, rerank, STREAM,
        summary="The same as /v1/rerank", tag="text",
        body=RerankBody, answer={JSON: answers.Reranking},
    ),
    Route(
        "POST", "/v2/rerank", TENANT, rerank_v2, STREAM,
        summary="The same as /v1/rerank, without documents by default", tag="text",
        body=RerankBody, answer={JSON: answers.Reranking},
    ),
    Route(
        "POST", "/v1/score", TENANT, score_pairs, STREAM,
        summary="Scores of pairs of texts", tag="text",
        body=ScoreBody, answer={JSON: answers.ScoreList},
    ),
    Route(
        "POST", "/score", TENANT, score_pairs, STREAM,
        summary="The same as /v1/score", tag="text",
        body=ScoreBody, answer={JSON: answers.ScoreList},
    ),
    Route(  # vLLM's paths and bodies
        "POST", "/tokenize", TENANT, tokenize_prompt, STREAM,
        summary="Token ids of a prompt", tag="text",
        body=TokenizeBody, answer={JSON: answers.TokenizedPrompt},
    ),
    Route(
        "POST", "/detokenize", TENANT, detokenize_prompt, STREAM,
        summary="The text of token ids", tag="text",
        body=DetokenizeBody, answer={JSON: answers.DetokenizedPrompt},
    ),
)  # fmt: skip

_STORED = (404, 503)
_RESPONSES = (
    Route(
        "POST", "/v1/responses", TENANT, create_response, STREAM,
        summary="A response to a conversation", tag="responses", repeatable=True, parameters=_REPEATED,
        body=ResponseBody, answer={JSON: responses.Response, _EVENTS: _EVENT},
    ),
    Route(
        "DELETE", "/v1/responses", TENANT, retrieval.delete_responses, STREAM, once=True,
        summary="No response of this key is kept any longer", tag="responses",
        answer={JSON: responses.DeletedResponses}, errors=(503,),
    ),
    Route(
        "GET", "/v1/responses/{response_id}", TENANT, retrieval.get_response, STREAM,
        summary="A stored response", tag="responses", errors=(400, *_STORED),
        parameters=query_parameters(retrieval.RetrieveQuery),
        answer={JSON: responses.Response, _EVENTS: _EVENT},
    ),
    Route(
        "DELETE", "/v1/responses/{response_id}", TENANT, retrieval.delete_response, STREAM, once=True,
        summary="It is not kept any longer", tag="responses", errors=_STORED,
        answer={JSON: responses.DeletedResponse},
    ),
    Route(
        "POST", "/v1/responses/{response_id}/cancel", TENANT, retrieval.cancel_response, STREAM,
        summary="Run it no more in the background", tag="responses", errors=(400, *_STORED),
        answer={JSON: responses.Response},
    ),
    Route(
        "GET", "/v1/responses/{response_id}/input_items", TENANT, retrieval.list_input_items,
        STREAM, summary="What was given to it", tag="responses", errors=(400, *_STORED),
        parameters=query_parameters(retrieval.ItemsQuery),
        answer={JSON: responses.InputItems},
    ),
)  # fmt: skip

_VIDEOS = (
    Route(
        "POST", "/v1/videos", TENANT, videos.create_video, STREAM, once=True,
        summary="A video, made when there is room", tag="videos", errors=(503,),
        body=video_form(), answer={JSON: answered_videos.Video},
    ),
    Route(
        "GET", "/v1/videos", TENANT, videos.list_videos, STREAM,
        summary="Videos, a page at a time", tag="videos", errors=(400, 503),
        parameters=query_parameters(VideosQuery), answer={JSON: answered_videos.VideoList},
    ),
    Route(
        "GET", "/v1/videos/{video_id}", TENANT, videos.get_video, STREAM,
        summary="Where a video stands", tag="videos", errors=_STORED,
        answer={JSON: answered_videos.Video},
    ),
    Route(
        "DELETE", "/v1/videos/{video_id}", TENANT, videos.delete_video, STREAM, once=True,
        summary="It is made no further, and not kept any longer", tag="videos", errors=_STORED,
        answer={JSON: answered_videos.DeletedVideo},
    ),
    Route(
        "GET", "/v1/videos/{video_id}/content", TENANT, videos.get_video_content, STREAM,
        summary="The video itself, or its newest preview", tag="videos", errors=(400, *_STORED),
        parameters=query_parameters(ContentQuery),
        answer={"video/mp4": _BYTES, "video/webm": _BYTES, "image/webp": _BYTES},
    ),
    Route(
        "POST", "/v1/videos/{video_id}/remix", TENANT, videos.remix_video, STREAM, once=True,
        summary="A video with another prompt", tag="videos", errors=_STORED,
        body=RemixBody, answer={JSON: answered_videos.Video},
    ),
)  # fmt: skip

_FILES = (
    Route(
        "POST", "/v1/files", TENANT, files.upload_file, STREAM, once=True,
        summary="Store a file", tag="files", errors=(503,),
        body=file_form(), answer={JSON: stored_files.File},
    ),
    Route(
        "GET", "/v1/files", TENANT, files.list_files, STREAM,
        summary="Stored files, a page at a time", tag="files", errors=(400, 503),
        parameters=query_parameters(FilesQuery), answer={JSON: stored_files.FileList},
    ),
    Route(
        "GET", "/v1/files/{file_id}", TENANT, files.get_file, STREAM,
        summary="What is known of a file", tag="files", errors=_STORED,
        answer={JSON: stored_files.File},
    ),
    Route(
        "GET", "/v1/files/{file_id}/content", TENANT, files.get_file_content, STREAM,
        summary="The file itself", tag="files", errors=_STORED,
        answer={"application/octet-stream": _BYTES},
    ),
    Route(
        "DELETE", "/v1/files/{file_id}", TENANT, files.delete_file, STREAM, once=True,
        summary="It is not kept any longer", tag="files", errors=_STORED,
        answer={JSON: stored_files.DeletedFile},
    ),
    Route(
        "POST", "/v1/batches", TENANT, batches.create_batch, STREAM, once=True,
        summary="Answer the requests of a file when there is room", tag="batches",
        body=BatchBody, answer={JSON: stored_files.Batch},
    ),
    Route(
        "GET", "/v1/batches", TENANT, batches.list_batches, STREAM,
        summary="Batches, a page at a time", tag="batches", errors=(400, 503),
        parameters=query_parameters(BatchesQuery), answer={JSON: stored_files.BatchList},
    ),
    Route(
        "GET", "/v1/batches/{batch_id}", TENANT, batches.get_batch, STREAM,
        summary="Where a batch stands", tag="batches", errors=_STORED,
        answer={JSON: stored_files.Batch},
    ),
    Route(
        "POST", "/v1/batches/{batch_id}/cancel", TENANT, batches.cancel_batch, STREAM,
        summary="Answer no more of its requests", tag="batches", errors=_STORED,
        answer={JSON: stored_files.Batch},
    ),
)  # fmt: skip

_MESSAGES = (
    Route(
        "POST", "/v1/messages", TENANT, create_message, STREAM,
        summary="A reply in Anthropic's format", tag="messages", body=MessagesBody,
        repeatable=True, parameters=_REPEATED,
        answer={JSON: messages.MessageReply, _EVENTS: _EVENT}, error_format=MESSAGES_ERRORS,
    ),
    Route(
        "POST", "/v1/messages/count_tokens", TENANT, count_message_tokens, STREAM,
        summary="The number of tokens of a prompt", tag="messages", body=PromptFields,
        answer={JSON: messages.MessageTokensCount}, error_format=MESSAGES_ERRORS,
    ),
)  # fmt: skip

_OLLAMA = (
    Route(
        "POST", "/api/chat", TENANT, create_chat, STREAM,
        summary="A reply to a conversation, in Ollama's format", tag="ollama",
        body=OllamaChatBody, answer={_LINES: _TEXT, JSON: ollama.OllamaChat},
        error_format=OLLAMA_ERRORS,
    ),
    Route(
        "POST", "/api/generate", TENANT, generate, STREAM,
        summary="A reply to a prompt, in Ollama's format", tag="ollama",
        body=GenerateBody, answer={_LINES: _TEXT, JSON: ollama.OllamaGeneration},
        error_format=OLLAMA_ERRORS,
    ),
    Route(
        "POST", "/api/embed", TENANT, embed, STREAM,
        summary="Vectors of texts, in Ollama's format", tag="ollama",
        body=EmbedBody, answer={JSON: ollama.OllamaEmbeddings}, error_format=OLLAMA_ERRORS,
    ),
    Route(
        "POST", "/api/embeddings", TENANT, embed_prompt, STREAM,
        summary="The vector of one text, in Ollama's format", tag="ollama",
        body=EmbeddingsPromptBody, answer={JSON: ollama.OllamaEmbedding},
        error_format=OLLAMA_ERRORS,
    ),
    Route(
        "GET", "/api/tags", TENANT, ollama_models.list_models, ENDPOINT,
        summary="What can answer, in Ollama's format", tag="ollama",
        answer={JSON: ollama.OllamaModels}, error_format=OLLAMA_ERRORS,
    ),
    Route(
        "GET", "/api/ps", TENANT, ollama_models.running_models, ENDPOINT,
        summary="What is in memory, in Ollama's format", tag="ollama",
        answer={JSON: ollama.RunningOllamaModels}, error_format=OLLAMA_ERRORS,
    ),
    Route(
        "POST", "/api/show", TENANT, ollama_models.show_model, STREAM,
        summary="One model, in Ollama's format", tag="ollama",
        body=ShowBody, answer={JSON: ollama.ShownOllamaModel}, error_format=OLLAMA_ERRORS,
    ),
    Route(
        "POST", "/api/pull", OPERATOR, pull_model, STREAM,
        summary="Download a model", tag="operation",
        body=PullBody, answer={_LINES: _TEXT, JSON: ollama.PullStatus},
        errors=(404, 429), error_format=OLLAMA_ERRORS,
    ),
    Route(
        "GET", "/api/version", PUBLIC, ollama_models.version, ENDPOINT,
        summary="Motet's version, as Ollama tells its own", tag="operation",
        answer={JSON: watching.Version}, error_format=OLLAMA_ERRORS,
    ),
    *(
        Route(
            method, f"/api/{name}", TENANT, refuse, STREAM,
            summary="Refused by name", tag="operation", status=400,
            answer={JSON: OllamaError}, error_format=OLLAMA_ERRORS,
        )
        for method, name in (
            ("POST", "create"), ("POST", "copy"), ("DELETE", "delete"), ("POST", "push"),
            ("POST", "blobs/{digest}"),
        )
    ),
)  # fmt: skip

_SOUNDS = (
    Route(
        "POST", "/v1/audio/speech", TENANT, speech, STREAM,
        summary="A text, spoken", tag="sound", repeatable=True, parameters=_REPEATED,
        body=SpeechBody, answer={kind: _BYTES for kind in content_types()} | {_EVENTS: _EVENT},
    ),
    Route(SOCKET, "/v1/audio/speech/stream", TENANT, speech_stream, Serving.SOCKET),
    Route(
        "POST", "/v1/audio/transcriptions", TENANT, transcriptions, STREAM,
        summary="What is said, written down", tag="sound",
        body=transcription_form("transcribe"),
        answer={JSON: (*_TRANSCRIPTS, answers.DiarizedTranscription), **_WRITTEN},
    ),
    Route(
        "POST", "/v1/audio/translations", TENANT, translations, STREAM,
        summary="What is said, in English", tag="sound",
        body=transcription_form("translate"), answer={JSON: _TRANSCRIPTS, **_WRITTEN},
    ),
    Route(
        "POST", "/v1/audio/voices", TENANT, create_voice, STREAM, once=True,
        summary="A voice of one's own, from a recording", tag="sound",
        body=voice_form(), answer={JSON: answers.OwnVoice}, errors=(503,),
    ),
    Route(
        "GET", "/v1/audio/voices", TENANT, list_voices, STREAM,
        summary="Voices of the models that speak, and one's own", tag="sound",
        answer={JSON: answers.VoiceList},
    ),
    Route(
        "DELETE", "/v1/audio/voices/{voice_id}", TENANT, delete_voice, STREAM, once=True,
        summary="A voice of one's own, deleted", tag="sound",
        answer={JSON: answers.DeletedVoice}, errors=(404, 503),
    ),
    Route(SOCKET, "/v1/realtime", TENANT, realtime, Serving.SOCKET, client_secrets=True),
    Route(
        "POST", "/v1/realtime/client_secrets", TENANT, create_client_secret, STREAM,
        summary="A key for one realtime session", tag="realtime",
        body=ClientSecretBody, answer={JSON: answers.ClientSecretAnswer},
    ),
    Route(
        "POST", "/v1/realtime/calls", TENANT, create_call, STREAM, once=True,
        summary="A realtime session over WebRTC", tag="realtime", status=201, errors=(503,),
        parameters=query_parameters(CallsQuery), client_secrets=True,
        body=call_form(), answer={"application/sdp": _TEXT},
    ),
    Route(
        "POST", "/v1/realtime/calls/{call_id}/hangup", TENANT, hang_up, STREAM, once=True,
        summary="The end of a call", tag="realtime", errors=(404,), client_secrets=True,
    ),
)  # fmt: skip

# The header with which the chat models are answered in Anthropic's format.
_ANTHROPIC = ({"name": "anthropic-version", "in": "header", "schema": _TEXT},)
_MODELS = (
    Route(
        "GET", "/v1/models", TENANT, models.list_models, STREAM,
        summary="What can answer now", tag="models", errors=(400,),
        answer={JSON: (answers.ModelList, messages.MessagesModels)}, parameters=_ANTHROPIC,
        choose_error_format=error_format,
    ),
    Route(
        "GET", "/v1/models/{name:path}", TENANT, models.get_model, STREAM,
        summary="One of them", tag="models", errors=(404,),
        answer={JSON: (answers.Model, messages.MessagesModel)}, parameters=_ANTHROPIC,
        choose_error_format=error_format,
    ),
)  # fmt: skip

_IMAGES = (
    Route(
        "POST", "/v1/images/generations", TENANT, generations, STREAM,
        summary="Pictures of a prompt", tag="images", repeatable=True, parameters=_REPEATED,
        body=GenerationBody, answer=_DRAWN,
    ),
    Route(
        "POST", "/v1/images/edits", TENANT, edits, STREAM,
        summary="A picture, changed", tag="images", body=edit_form(), answer=_DRAWN,
    ),
    Route(
        "POST", "/v1/images/jobs", TENANT, jobs_endpoints.submit, STREAM, once=True,
        summary="Pictures, drawn when there is room", tag="images",
        body=JobBody, answer={JSON: answers.ImageJob}, status=202,
    ),
    Route(
        "GET", "/v1/images/jobs/{job}", TENANT, jobs_endpoints.job_status, ENDPOINT,
        summary="Where a job stands", tag="images",
        answer={JSON: answers.ImageJob}, errors=(404, 503),
    ),
    Route(
        "DELETE", "/v1/images/jobs/{job}", TENANT, jobs_endpoints.cancel_job, ENDPOINT, once=True,
        summary="Draw it no more", tag="images",
        answer={JSON: answers.ImageJob}, errors=(404, 503),
    ),
    Route(
        "GET", "/images/{name}", PUBLIC, jobs_endpoints.stored_image, ENDPOINT,
        summary="A picture that has a URL", tag="images",
        answer={f"image/{kind}": _BYTES for kind in ("png", "jpeg", "webp")}, errors=(404, 503),
    ),
)  # fmt: skip

_OPERATION = (
    Route(
        "GET", "/health/live", PUBLIC, health.live, ENDPOINT,
        summary="Whether it lives", tag="operation", answer={JSON: watching.Live},
    ),
    Route(  # vLLM's path: load balancers and benchmarks use it
        "GET", "/health", PUBLIC, health.ready, ENDPOINT,
        summary="As /health/ready", tag="operation",
        answer={JSON: watching.Health}, errors=(404,), others=_UNREADY,
    ),
    Route(
        "GET", "/health/ready", PUBLIC, health.ready, ENDPOINT,
        summary="Whether it can serve", tag="operation",
        answer={JSON: watching.Health}, errors=(404,), others=_UNREADY,
    ),
    Route(  # vLLM's path and answer
        "GET", "/version", PUBLIC, health.version, ENDPOINT,
        summary="Motet's version", tag="operation", answer={JSON: watching.Version},
    ),
    Route(
        "GET", "/metrics", OPERATOR, health.metrics, ENDPOINT,
        summary="For Prometheus", tag="operation", answer={_PLAIN: _TEXT},
    ),
    Route(
        "GET", "/metrics/stack", OPERATOR, stack.stack, ENDPOINT,
        summary="Who is there", tag="operation", answer={JSON: watching.Stack}, errors=(400,),
    ),
    Route(
        "GET", "/metrics/doctor", OPERATOR, doctor, ENDPOINT,
        summary="What is short", tag="operation",
        answer={JSON: watching.Diagnosis}, errors=(400,),
    ),
    Route(
        "GET", "/metrics/replies", OPERATOR, stack.replies, ENDPOINT,
        summary="The last replies", tag="operation",
        answer={JSON: watching.Replies}, errors=(400,),
    ),
    Route(  # vLLM's paths and bodies
        "POST", "/v1/load_lora_adapter", OPERATOR, load_adapter, STREAM, once=True,
        summary="Serve a LoRA adapter", tag="operation",
        body=LoadAdapterBody, answer={_PLAIN: _TEXT}, errors=(404, 503),
    ),
    Route(
        "POST", "/v1/unload_lora_adapter", OPERATOR, unload_adapter, STREAM, once=True,
        summary="Serve a LoRA adapter no longer", tag="operation",
        body=UnloadAdapterBody, answer={_PLAIN: _TEXT}, errors=(404, 503),
    ),
    Route(
        "GET", "/openapi.json", PUBLIC, openapi, ENDPOINT,
        summary="This document", tag="operation", answer={JSON: {"type": "object"}},
    ),
)  # fmt: skip

ROUTES: tuple[Route, ...] = (
    *_TEXTS, *_RESPONSES, *_MESSAGES, *_OLLAMA, *_SOUNDS, *_MODELS, *_IMAGES, *_VIDEOS,
    *_FILES, *_OPERATION,
    *page_routes(),
)  # fmt: skip
