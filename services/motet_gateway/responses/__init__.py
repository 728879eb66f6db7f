"""Serve `/v1/responses`: OpenAI's Responses, streamed, whole or in the background."""
