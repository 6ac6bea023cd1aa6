"""A run's folder, read: settings, metrics, how it ended, and the page that shows it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
