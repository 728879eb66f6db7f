"""Drive a server with OpenAI's API over HTTP: prompts of token ids where it takes them, else chats."""
