"""What every Motet process needs: the wire, the actors, discovery, blobs, telemetry. Knows nothing of models."""

__version__ = "0.1.0"
