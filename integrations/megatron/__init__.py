"""Megatron-core integration."""


class MegatronIntegration:
    """Placeholder until the adapter lands in this same change set."""

    name = "megatron"
