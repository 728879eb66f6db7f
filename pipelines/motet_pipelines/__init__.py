"""Pipelines: async generators over the services, for the gateway and for any Python program with a bus."""
