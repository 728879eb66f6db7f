"""The tokenizer service: owns a request from text to text. Runs without torch."""
