"""Detect voice activity: silero-vad over live audio, many sessions in one forward pass."""
