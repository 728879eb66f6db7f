"""Serve image generation in OpenAI's protocol: generations, edits, jobs and their store."""
