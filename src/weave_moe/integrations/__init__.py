"""The layer in the engines that people run models with.

    weave_moe.integrations.transformers    experts_implementation="weave", `report`, `prepare`
    weave_moe.integrations.fuse            `optimize`, which is weave_moe.optimize: whole blocks

A module with an engine's name needs that engine, and is imported by name only.
"""
