"""Performance model: predicts step times on a cluster from measurements on one machine."""
