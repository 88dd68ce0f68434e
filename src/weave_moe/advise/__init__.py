"""Is it worth it: what the library gains for a model under a load, or why it does not.

advice = advise(preset("qwen3-30b"), topk_ids, share=0.4, communication=0.1)
print(advice.verdict, advice.reason)
"""

from .advice import VERDICTS, Advice, Sweep, advise, end_to_end, needed_speedup, routing_of
from .measured import MeasuredCell, measured_near
from .memory import Memory, ModelSize, fit_memory, size_of_config, size_of_preset

__all__ = [
    "VERDICTS",
    "Advice",
    "MeasuredCell",
    "Memory",
    "ModelSize",
    "Sweep",
    "advise",
    "end_to_end",
    "fit_memory",
    "measured_near",
    "needed_speedup",
    "routing_of",
    "size_of_config",
    "size_of_preset",
]
