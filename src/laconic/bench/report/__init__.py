"""Records for people: tables, plots, files of them, and one HTML page."""
