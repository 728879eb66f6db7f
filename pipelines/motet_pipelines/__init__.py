"""Compose services into pipelines: async generators for the gateway and any program with a bus."""
