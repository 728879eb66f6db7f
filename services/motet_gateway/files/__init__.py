"""Serve /v1/files: keep what tenants upload, such as the requests of a batch, and its results."""
