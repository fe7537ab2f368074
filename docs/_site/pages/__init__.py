"""The pages of the documentation that are made from the code and from its records."""
