"""Where gradients come from: the places in which Laconic mounts."""
