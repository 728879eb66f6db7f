"""The LLM engine, and the actor that serves it."""
