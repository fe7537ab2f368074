"""Reports on records: terminal tables, plots, plot files, and one HTML page."""
