"""Take frames of a camera into a session: `session.video` and `input_image_buffer.append`."""
