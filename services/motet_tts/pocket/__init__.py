"""Implement pocket-tts: letters to phonemes, to codec frames, to samples; plain modules, no bus."""
