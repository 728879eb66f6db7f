"""Batch pictures by denoising step: engine, loops, step batcher and checkpoints of loops."""
