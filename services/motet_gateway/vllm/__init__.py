"""Serve the routes that vLLM adds to OpenAI's."""
