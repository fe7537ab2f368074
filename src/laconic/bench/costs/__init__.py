"""What single pieces cost on one machine: kernels, steps with error feedback, and mounts."""
