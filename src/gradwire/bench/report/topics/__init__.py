"""Sections of the report about records that are not training runs, step times or kernels."""
