"""The catalogue: one method a file, and the file's name is the method's."""
