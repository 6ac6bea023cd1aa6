"""Credit assignment: a group of episodes in, advantages out."""
