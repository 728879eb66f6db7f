"""Generate load for any server that speaks OpenAI's streaming HTTP API: `motet bench`."""
