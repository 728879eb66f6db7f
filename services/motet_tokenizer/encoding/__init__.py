"""Turn chats and prompts into token ids: templates, control tokens, encoders in child processes."""
