"""Messages between the stages of a pipeline: methods, headers, sample memory, adaptive bits."""
