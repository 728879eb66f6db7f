"""Load and run speech models: one module per family, and how their sentences share a step."""
