"""What runs measured: kinds of records, files of them, and which may be compared with which."""
