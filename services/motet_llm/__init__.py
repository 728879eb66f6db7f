"""Generate text: the LLM engine, and the actor that serves it."""
