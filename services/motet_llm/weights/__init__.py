"""Read checkpoints: safetensors, GGUF, and what is published in fewer bits."""
