"""Framework integrations, packaged as ``prism_plugins.integrations``."""
