"""Serve HTTP, server-sent events, WebSocket and the chat page in front of the services on NATS."""
