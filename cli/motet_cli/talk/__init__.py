"""Hold a spoken conversation at a terminal, over the bus or over a WebSocket: `motet talk`."""
