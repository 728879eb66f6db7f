"""Describe every endpoint as an OpenAPI document."""
