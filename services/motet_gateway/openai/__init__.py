"""Serve chat, completions, embeddings and models in OpenAI's protocol."""
