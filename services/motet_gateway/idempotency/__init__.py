"""Answer a request that is sent again under its `Idempotency-Key`: at any gateway, and charged once."""
