"""Read checkpoints: safetensors, GGUF, GPTQ, AWQ and compressed-tensors."""
