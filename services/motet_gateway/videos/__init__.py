"""Serve /v1/videos in OpenAI's protocol: videos are made as jobs, kept and read as files."""
