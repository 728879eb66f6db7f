"""Serve `/v1/messages`: Anthropic's Messages, streamed or whole, and the count of their tokens."""
