"""Drive vLLM's `AsyncLLM` in the process of the host, which runs in vLLM's environment."""
