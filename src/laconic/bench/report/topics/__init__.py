"""One topic a file: `sections(records)` gives what the page says about its kind of records."""
