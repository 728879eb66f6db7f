"""Score documents against queries, as Cohere's and Jina's rerank and vLLM's score have it."""
