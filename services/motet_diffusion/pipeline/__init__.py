"""Adapt diffusers' pipelines: loading, rules, editing, shared modules, adapters and previews."""
