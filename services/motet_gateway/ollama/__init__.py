"""Serve `/api/…`: Ollama's API, as a translation onto the chats, completions and embeddings here."""
