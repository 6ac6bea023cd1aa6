"""Training: a config in, a trained folder out."""
