"""Environments for other trainers: classes for TRL, verifiers and OpenEnv, and their packages.

`trl`, `verifiers` and `openenv` each need their package; `package` writes what each installs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
