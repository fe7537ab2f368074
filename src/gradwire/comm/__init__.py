"""Exchanges byte buffers between ranks, real or simulated; knows no compressor."""
