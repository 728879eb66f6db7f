"""Serve `/v1/realtime`: written or spoken conversations over a WebSocket."""
