"""What the tests share: environments, engines, models and peers."""
