"""Serve WS /v1/audio/speech/stream: speak texts that are still being written."""
