"""`motet bench`: a load generator for any server that speaks OpenAI's streaming HTTP API."""
