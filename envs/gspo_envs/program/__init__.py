"""Agent programs as environments."""
