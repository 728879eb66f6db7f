"""Text to pictures, batched by step. The engine runs without NATS; `service` puts it behind the bus."""
