"""`/v1/realtime`: conversations over a WebSocket, written or spoken."""
