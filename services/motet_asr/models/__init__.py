"""Load and run recognizers: Whisper, Moonshine and Parakeet-CTC on our kernels."""
