"""Move messages: the bus, streaming calls, discovery and the batching of frames."""
