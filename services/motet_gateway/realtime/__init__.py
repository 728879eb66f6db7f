"""`/v1/realtime`: conversations over a WebSocket. Text today; speech joins when its services exist."""
