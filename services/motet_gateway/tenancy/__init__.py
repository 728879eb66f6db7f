"""Authenticate callers and account for what tenants use."""
