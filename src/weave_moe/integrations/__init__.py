"""The layer in the engines that people run models with.

    weave_moe.integrations.transformers    experts_implementation="weave", `optimize`, `report`

Each module needs its engine and is imported by name only.
"""
