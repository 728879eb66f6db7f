"""Serve transcriptions and speech in OpenAI's protocol."""
