"""Provide what every Motet process needs: wire, actors, discovery, blobs and telemetry.

This package knows nothing of models.
"""

__version__ = "0.2.0"
