"""pocket-tts: letters to phonemes, phonemes to codec frames, codec frames to samples; plain modules without a bus."""
