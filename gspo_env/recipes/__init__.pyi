from .embedded import EmbeddedConfig as EmbeddedConfig
