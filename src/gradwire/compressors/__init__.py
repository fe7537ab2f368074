"""The compressors: one method per file, named after the file."""
