"""Integrations: compressed averaging in DDP, FSDP2, optimizers, trainers and Keras."""
