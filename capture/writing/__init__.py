"""Write a trace: buffers, a thread, segments, an index."""
