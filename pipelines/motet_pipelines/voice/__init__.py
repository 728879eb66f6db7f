"""Process voice: speech in, turns, transcription, diarization, and speech out."""
