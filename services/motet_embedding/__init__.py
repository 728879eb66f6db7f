"""What a text means, as a vector: sentence encoders of transformers, batched across requests."""
