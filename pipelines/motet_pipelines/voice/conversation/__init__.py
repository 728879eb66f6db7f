"""Hold a spoken conversation: audio and actions in, events out; knows nothing of HTTP."""
