"""Generate pictures from text, batched by denoising step.

The engine runs without NATS; `service` connects it to the bus.
"""
