"""The environment contract: action text in, observation text and a reward out."""
