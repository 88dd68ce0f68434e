"""The shipped model, traces and texts, and the loader that also reads users' traces."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weave_moe import data
from weave_moe.data import BEGIN, END, VOCAB, Trace, load_trace

DATA = Path(data.__file__).parent
SMALL, WIDE = "small-16e-top4", "wide-128e-top8"


# Texts and tokens


@given(st.text())
def test_encode_and_decode_are_inverse(text: str) -> None:
    ids = data.encode(text)
    assert data.decode(ids) == text
    assert ids == [int(byte) for byte in text.encode()]
    assert data.encode(text, begin=True) == [BEGIN, *ids]
    assert data.decode([BEGIN, *ids, END, VOCAB - 1]) == text


@given(st.binary())
def test_decode_takes_broken_utf8(raw: bytes) -> None:
    assert data.decode(raw) == raw.decode("utf-8", errors="replace")


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
def test_decode_names_an_id_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match=str(token)):
        data.decode([65, token])


def test_encode_refuses_what_is_no_text() -> None:
    with pytest.raises(TypeError, match="bytes"):
        data.encode(b"abc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="surrogates"):
        data.encode("\ud800")


def test_texts() -> None:
    assert data.text_names() == ["kjv", "python"]
    for name in data.text_names():
        assert 8_000 <= len(data.encode(data.sample_text(name))) <= 16_000
    assert data.sample_text("kjv").startswith("Ruth1:1 Now it came to pass")
    compile(data.sample_text("python"), "shlex.py", "exec")
    with pytest.raises(ValueError, match=r"kjv, python.*'../model/config'"):
        data.sample_text("../model/config")


# Provenance


def test_every_shipped_file_is_in_the_provenance_with_its_digest() -> None:
    table = (DATA / "PROVENANCE.md").read_text()
    listed = dict(re.findall(r"^\| `([^`]+)` \| `([0-9a-f]{64})` \|", table, re.MULTILINE))
    shipped = {
        path.relative_to(DATA).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in DATA.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc", ".md"}
    }
    assert listed == shipped


def test_sizes_stay_small() -> None:
    sizes = {path: path.stat().st_size for path in DATA.rglob("*") if path.is_file()}
    assert sizes[data.model_path() / "model.safetensors"] <= 6_500_000
    assert sum(sizes.values()) <= 8_000_000


def test_the_import_needs_no_torch() -> None:
    code = (
        "import sys, weave_moe.data as d; d.load_trace('small-16e-top4');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Shipped traces


def test_trace_names() -> None:
    assert data.trace_names() == [SMALL, WIDE]


@pytest.mark.parametrize(
    ("name", "shape", "experts"), [(SMALL, (4096, 4, 4), 16), (WIDE, (8192, 6, 8), 128)]
)
def test_shipped_trace(name: str, shape: tuple[int, int, int], experts: int) -> None:
    trace = load_trace(name)
    assert trace.name == name
    assert (trace.tokens, trace.layers, trace.top_k) == trace.topk_ids.shape == shape
    assert trace.topk_ids.dtype == np.int64
    assert trace.topk_weights.dtype == np.float32
    assert trace.topk_weights.shape == shape
    assert trace.experts == experts
    # A router's top-k: distinct experts, falling weights that add up to 1 (stored as float16).
    rows = np.sort(trace.topk_ids, axis=-1)
    assert rows.min() >= 0
    assert rows.max() < experts
    assert (np.diff(rows, axis=-1) > 0).all()
    assert (np.diff(trace.topk_weights, axis=-1) <= 0).all()
    np.testing.assert_allclose(trace.topk_weights.sum(-1), 1.0, atol=1e-3)

    meta = trace.meta
    assert meta["note"] == "learned routing of a small model, not of a production model"
    assert meta["licence"] == "Apache-2.0"
    assert meta["seed"] == 1
    assert (meta["model"]["layers"], meta["top_k"], meta["experts"]) == (*shape[1:], experts)
    assert set(meta["text"]) == set(data.text_names())
    assert {"date", "torch", "transformers", "numpy", "python"} <= set(meta["recorded"])
    assert {"date", "device", "steps", "corpus_sha256_16"} <= set(meta["training"])
    assert max(meta["training"]["held_out_bits_per_byte"].values()) < 2.0
    spans = meta["windows"]
    assert sum(span["stop"] - span["start"] for span in spans) == shape[0]
    for span in spans:
        assert 0 <= span["start"] < span["stop"] <= len(data.encode(data.sample_text(span["text"])))


def _shift_between_texts(trace: Trace, kinds: np.ndarray) -> float:
    """Total variation between the two texts' expert shares, averaged over layers."""
    shares = [
        np.stack(
            [
                np.bincount(trace.topk_ids[kinds == kind, layer].ravel(), minlength=trace.experts)
                for layer in range(trace.layers)
            ]
        )
        / ((kinds == kind).sum() * trace.top_k)
        for kind in (0, 1)
    ]
    return float(np.abs(shares[0] - shares[1]).sum(-1).mean() / 2)


@pytest.mark.parametrize("name", [SMALL, WIDE])
def test_routing_is_learned(name: str) -> None:
    """Experts tell the texts apart, while each layer's load stays within reach of even."""
    trace = load_trace(name)
    kinds = np.concatenate(
        [
            np.full(span["stop"] - span["start"], data.text_names().index(span["text"]))
            for span in trace.meta["windows"]
        ]
    )
    by_chance = np.random.default_rng(0).permutation(kinds)
    assert _shift_between_texts(trace, kinds) > 0.15
    assert _shift_between_texts(trace, by_chance) < 0.05
    for layer in range(trace.layers):
        load = np.bincount(trace.topk_ids[:, layer].ravel(), minlength=trace.experts)
        assert load.min() / load.mean() > 0.3
        assert load.max() / load.mean() < 2.5


# The shipped model


@pytest.fixture(scope="module")
def model() -> Any:
    """The shipped model in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        data.model_path(), dtype=torch.float32
    )
    return loaded.eval()


def _run(model: Any, spans: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Bits a byte of each span, and router logits [tokens, layers, experts]."""
    import torch

    bits, logits = [], []
    with torch.no_grad():
        for span in spans:
            text = data.encode(data.sample_text(span["text"]))
            ids = torch.tensor([text[span["start"] : span["stop"]]])
            out = model.model(input_ids=ids, output_router_logits=True, use_cache=False)
            scores = model.lm_head(out.last_hidden_state)[0, :-1]
            loss = torch.nn.functional.cross_entropy(scores, ids[0, 1:])
            bits.append(float(loss) / math.log(2))
            logits.append(torch.stack([layer.view(-1, 16) for layer in out.router_logits], 1))
    return bits, torch.cat(logits)


def test_model_is_what_it_says(model: Any) -> None:
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == 2_698_624
    config = json.loads((data.model_path() / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["vocab_size"] == VOCAB
    assert (config["bos_token_id"], config["eos_token_id"]) == (BEGIN, END)


def test_trace_is_what_the_model_does(model: Any) -> None:
    import torch

    trace = load_trace(SMALL)
    spans = trace.meta["windows"]
    _, logits = _run(model, spans)
    weights, ids = logits.softmax(-1).topk(trace.top_k, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).numpy()
    same = ids.numpy() == trace.topk_ids
    assert same.mean() >= 0.95
    np.testing.assert_allclose(weights[same], trace.topk_weights[same], atol=5e-3)
    # The bar can be missed: other text under the same model agrees far less.
    other = torch.roll(ids, 512, 0).numpy() == trace.topk_ids
    assert other.mean() < 0.5


def test_model_is_trained(model: Any) -> None:
    """Far fewer bits a byte than uniform (8), and than the text's own byte frequencies give."""
    trace = load_trace(SMALL)
    spans = trace.meta["windows"]
    bits, _ = _run(model, spans)
    for name in data.text_names():
        mine = [b for b, span in zip(bits, spans, strict=True) if span["text"] == name]
        counts = Counter(data.encode(data.sample_text(name)))
        total = sum(counts.values())
        entropy = -sum(n / total * math.log2(n / total) for n in counts.values())
        # The median, as one window of shlex.py lists accented letters, which training hardly had.
        assert statistics.median(mine) < min(2.0, entropy - 2.0)


def test_experts_are_not_interchangeable(model: Any) -> None:
    """Sending every token to another expert costs bits, so the routing matters."""
    import torch

    spans = load_trace(SMALL).meta["windows"][::4]
    before, _ = _run(model, spans)
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    kept = [gate.detach().clone() for gate in gates]
    try:
        with torch.no_grad():
            for gate in gates:
                gate.copy_(gate.roll(1, 0))
        after, _ = _run(model, spans)
    finally:
        with torch.no_grad():
            for gate, old in zip(gates, kept, strict=True):
                gate.copy_(old)
    assert min(a - b for a, b in zip(after, before, strict=True)) > 1.0


# Users' traces


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Random ids (duplicates and empty slots too), weights and expert count."""
    tokens, layers, top_k = (draw(st.integers(1, high)) for high in (20, 3, 4))
    experts = draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kind = draw(st.sampled_from(["int16", "int32", "int64"]))
    ids = rng.integers(-1, experts, (tokens, layers, top_k)).astype(kind)
    weights = rng.random((tokens, layers, top_k))
    return ids, weights.astype(draw(st.sampled_from(["float16", "float32", "float64"]))), experts


@settings(deadline=None)
@given(routing=routings(), where=st.sampled_from(["meta", "key", "nowhere"]), flat=st.booleans())
def test_users_trace_round_trips(
    tmp_path_factory: pytest.TempPathFactory,
    routing: tuple[np.ndarray, np.ndarray, int],
    where: str,
    flat: bool,
) -> None:
    ids, weights, experts = routing
    if flat:
        ids, weights = ids[:, 0], weights[:, 0]
    places: dict[str, dict[str, Any]] = {
        "meta": {"meta": json.dumps({"experts": experts, "who": "me"})},
        "key": {"experts": experts},
        "nowhere": {},
    }
    extra = places[where]
    path = tmp_path_factory.mktemp("trace") / "mine.npz"
    np.savez(path, topk_ids=ids, topk_weights=weights, **extra)
    trace = load_trace(path)
    assert trace.name == "mine"
    assert trace.topk_ids.ndim == 3
    np.testing.assert_array_equal(trace.topk_ids.reshape(ids.shape), ids)
    np.testing.assert_array_equal(trace.topk_weights.reshape(ids.shape), weights.astype(np.float32))
    assert trace.experts == (max(int(ids.max()) + 1, 1) if where == "nowhere" else experts)
    assert trace.meta == ({"experts": experts, "who": "me"} if where == "meta" else {})


def test_weights_default_to_even(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, topk_ids=np.zeros((3, 2, 4), np.uint8))
    assert (load_trace(str(path)).topk_weights == 0.25).all()


GOOD_IDS = np.arange(24).reshape(4, 2, 3) % 5
BAD_MEMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"ids": GOOD_IDS}, "topk_ids is missing"),
    "real ids": ({"topk_ids": GOOD_IDS + 0.0}, "must hold integers, got float64"),
    "one dimension": ({"topk_ids": GOOD_IDS.ravel()}, r"\[tokens, layers, top_k\].*\(24,\)"),
    "no tokens": ({"topk_ids": GOOD_IDS[:0]}, r"none of them 0.*\(0, 2, 3\)"),
    "huge id": ({"topk_ids": GOOD_IDS.astype(np.uint64) + (1 << 63)}, "must fit 32 bits"),
    "too few experts": ({"topk_ids": GOOD_IDS, "experts": 4}, "reach 4, but there are 4 experts"),
    "no experts": ({"topk_ids": GOOD_IDS, "experts": 0}, "positive integer, got 0"),
    "real experts": ({"topk_ids": GOOD_IDS, "experts": 8.0}, "experts must be one integer"),
    "experts as text": (
        {"topk_ids": GOOD_IDS, "meta": '{"experts": "8"}'},
        "positive integer, got '8'",
    ),
    "weights of another shape": (
        {"topk_ids": GOOD_IDS, "topk_weights": np.ones((4, 3, 2))},
        r"topk_ids' shape \(4, 2, 3\), got \(4, 3, 2\)",
    ),
    "weights as text": (
        {"topk_ids": GOOD_IDS, "topk_weights": np.full((4, 2, 3), "1")},
        "must hold real numbers",
    ),
    "nan": ({"topk_ids": GOOD_IDS, "topk_weights": np.full((4, 2, 3), np.nan)}, "be finite"),
    "overflow": ({"topk_ids": GOOD_IDS, "topk_weights": np.full((4, 2, 3), 1e300)}, "be finite"),
    "meta no JSON": ({"topk_ids": GOOD_IDS, "meta": "{"}, "meta is not JSON"),
    "meta nested deep": ({"topk_ids": GOOD_IDS, "meta": "[" * 100_000}, "meta is not JSON"),
    "meta a list": ({"topk_ids": GOOD_IDS, "meta": "[]"}, "JSON object, got list"),
    "meta a number": ({"topk_ids": GOOD_IDS, "meta": 3}, "meta must be one string"),
    "objects": ({"topk_ids": np.array([[[{}]]])}, "cannot be read .*: it holds Python objects"),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_bad_trace_names_path_and_problem(tmp_path: Path, case: str) -> None:
    members, problem = BAD_MEMBERS[case]
    path = tmp_path / "users.npz"
    np.savez(path, **members)
    with pytest.raises(ValueError, match=rf"users\.npz: .*{problem}"):
        load_trace(path)


def test_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    for content in (b"", b"not a trace", b"PK\x03\x04", b"\x80\x04."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.npz: cannot be read"):
            load_trace(path)
    path.write_bytes(pickle.dumps({"topk_ids": 1}))
    with pytest.raises(ValueError, match=r"cannot be read .*: damaged, or no npz file") as caught:
        load_trace(path)
    assert "pickle" not in str(caught.value)
    with path.open("wb") as file:
        np.save(file, GOOD_IDS)
    with pytest.raises(ValueError, match="single array"):
        load_trace(path)
    with pytest.raises(ValueError, match=f"neither a file nor a shipped trace.*{SMALL}"):
        load_trace(tmp_path)
    with pytest.raises(ValueError, match=r"'nothing'.*neither a file"):
        load_trace("nothing")
    with pytest.raises(TypeError, match="name_or_path"):
        load_trace(b"t.npz")  # type: ignore[arg-type]


@settings(deadline=None, max_examples=200)
@given(
    cut=st.integers(0, 2000) | st.none(),
    flips=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 255)), max_size=4),
    packed=st.booleans(),
)
def test_damaged_file_is_a_value_error_or_intact(
    tmp_path_factory: pytest.TempPathFactory,
    cut: int | None,
    flips: list[tuple[int, int]],
    packed: bool,
) -> None:
    buffer = io.BytesIO()
    save = np.savez_compressed if packed else np.savez
    save(buffer, topk_ids=GOOD_IDS.astype(np.uint8), topk_weights=GOOD_IDS + 0.5, meta="{}")
    raw = bytearray(buffer.getvalue())
    for place, change in flips:
        raw[place % len(raw)] ^= change
    path = tmp_path_factory.mktemp("trace") / "damaged.npz"
    path.write_bytes(raw[:cut])
    try:
        trace = load_trace(path)
    except ValueError as error:
        problem = str(error)
    else:
        assert trace.topk_ids.max() < trace.experts
        assert np.isfinite(trace.topk_weights).all()
        return
    assert "damaged.npz" in problem
