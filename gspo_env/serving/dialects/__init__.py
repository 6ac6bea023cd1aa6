"""The chat APIs that the policy speaks."""
