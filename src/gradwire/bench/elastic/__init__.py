"""`gradwire bench elastic`: replicas of torchft that are killed and join again."""
