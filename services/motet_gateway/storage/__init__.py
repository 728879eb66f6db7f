"""Keep what must survive restarts in NATS JetStream: documents, byte quotas and work queues."""
