"""Text to speech: text in, PCM out while it is made. The engine runs without NATS; `service` puts it behind the bus."""
