"""The only I/O: byte buffers between ranks, real or simulated. Knows no compressor."""
