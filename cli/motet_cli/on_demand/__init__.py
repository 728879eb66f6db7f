"""Load models when requests need them, and unload those that were used least recently."""
