"""Load and run speech models and their codecs: PocketTTS, pocket-tts, CSM, VITS, Mimi."""
