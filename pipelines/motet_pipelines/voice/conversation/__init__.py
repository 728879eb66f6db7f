"""Hold a spoken conversation: audio and actions in, events out; independent of HTTP."""
