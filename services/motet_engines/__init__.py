"""Serve other engines behind decode's wire: vLLM, llama.cpp and servers with OpenAI's API."""
