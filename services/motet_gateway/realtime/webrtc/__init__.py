"""Serve realtime sessions over WebRTC: calls with one audio track each way and a data channel."""
