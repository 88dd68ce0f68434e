"""The layer in the engines that people run models with.

    weave_moe.integrations.transformers    experts_implementation="weave", `report`, `prepare`
    weave_moe.integrations.fuse            `optimize`, which is weave_moe.optimize: whole blocks
    weave_moe.integrations.vllm            vLLM's plugin, on where WEAVE_MOE_VLLM=1
    weave_moe.integrations.sglang          SGLang's plugin, on where WEAVE_MOE_SGLANG=1

Modules with an engine's name are imported by name only. Those of plugins need their engine only
once they are switched on.
"""
