"""Score documents against queries, in the forms of Cohere's and Jina's rerank and of vLLM's score."""
