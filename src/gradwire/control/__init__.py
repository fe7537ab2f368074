"""Controllers, which change compression settings during training: one controller per file."""
