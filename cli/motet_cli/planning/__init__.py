"""Compute the machines that a model or a traffic needs: `motet plan`."""
