"""What the server tells about itself: one stream's state, the whole server's, and its memory."""
