"""Synthesize speech as a stream: text in, PCM out while it is computed.

The engine runs without NATS; `service` serves it on the bus.
"""
