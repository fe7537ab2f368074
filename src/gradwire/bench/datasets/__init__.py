"""Readers of public data sets in their official formats, from a folder that the user names."""
