"""Serve HTTP and WebSocket: the ASGI application, protocol limits, origins, decoding and errors."""
