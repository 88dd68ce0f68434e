"""What ships with the package to run on: a small MoE language model, routing traces, two texts.

The model is a transformers ``Qwen3MoeForCausalLM`` over bytes; a trace holds the experts that a
learned router chose for every token and layer. PROVENANCE.md beside this file says where each file
comes from and under which licence. Importing this module needs numpy only.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BEGIN",
    "END",
    "VOCAB",
    "Trace",
    "decode",
    "encode",
    "load_trace",
    "model_path",
    "sample_text",
    "text_names",
    "trace_names",
]

BEGIN = 256
"""Token id before a document's first byte."""
END = 257
"""Token id after a document's last byte; also what padding uses."""
VOCAB = 264
"""Rows of the model's embedding: 256 bytes, the two marks, six unused ones for alignment."""

_HERE = Path(__file__).resolve().parent


def encode(text: str, *, begin: bool = False) -> list[int]:
    """Token ids of ``text``: its UTF-8 bytes, after ``BEGIN`` if ``begin``.

    Raises TypeError if ``text`` is no str, ValueError if it has no UTF-8 form (lone surrogates).
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    ids = list(text.encode("utf-8"))
    return [BEGIN, *ids] if begin else ids


def decode(ids: Iterable[int]) -> str:
    """The text of token ids; marks and unused rows are dropped, broken UTF-8 becomes U+FFFD.

    Raises ValueError for an id outside [0, VOCAB).
    """
    data = bytearray()
    for item in ids:
        token = int(item)
        if not 0 <= token < VOCAB:
            raise ValueError(f"ids must lie in [0, {VOCAB}), got {token}")
        if token < BEGIN:
            data.append(token)
    return data.decode("utf-8", errors="replace")


def model_path() -> Path:
    """Folder of the shipped model, for ``AutoModelForCausalLM.from_pretrained``."""
    return _HERE / "model"


def text_names() -> list[str]:
    """Names that :func:`sample_text` takes."""
    return sorted(path.stem for path in (_HERE / "texts").glob("*.txt"))


def sample_text(name: str) -> str:
    """A shipped text, which the model was not trained on. Raises ValueError for another name."""
    if name not in text_names():
        raise ValueError(f"name must be one of {', '.join(text_names())}, got {name!r}")
    # Bytes first: read_text would turn "\r\n" into "\n" and shift the offsets that traces name.
    return (_HERE / "texts" / f"{name}.txt").read_bytes().decode("utf-8")


@dataclass(frozen=True, eq=False)
class Trace:
    """Routing of a run of tokens through the MoE layers of one model.

    topk_ids: int64 [tokens, layers, top_k], experts in the router's order; an id < 0 is an empty
        slot ("skip"), every other id is < experts.
    topk_weights: float32 [tokens, layers, top_k], finite; 1 / top_k each where the file has none.
    experts: number of experts a layer.
    meta: the file's metadata, empty where it has none.
    """

    name: str
    topk_ids: NDArray[np.int64]
    topk_weights: NDArray[np.float32]
    experts: int
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens recorded."""
        return int(self.topk_ids.shape[0])

    @property
    def layers(self) -> int:
        """MoE layers recorded."""
        return int(self.topk_ids.shape[1])

    @property
    def top_k(self) -> int:
        """Slots a token."""
        return int(self.topk_ids.shape[2])


def trace_names() -> list[str]:
    """Names of the shipped traces."""
    return sorted(path.stem for path in (_HERE / "traces").glob("*.npz"))


def load_trace(name_or_path: str | os.PathLike[str]) -> Trace:
    """A shipped trace by name, or any npz file by path.

    A file needs the key ``topk_ids``, integers [tokens, layers, top_k] or, for one layer,
    [tokens, top_k]. Optional: ``topk_weights`` of the same shape, ``experts`` (an integer) and
    ``meta`` (a JSON object as a string; its "experts" counts where that key is absent). With
    neither, experts is the largest id plus one.

    Raises ValueError, naming the path and the problem, for a file that is missing or breaks this.
    """
    name = os.fspath(name_or_path)
    if not isinstance(name, str):
        raise TypeError(f"name_or_path must be a str or a path, got {type(name_or_path).__name__}")
    if name in trace_names():
        return _read_trace(_HERE / "traces" / f"{name}.npz", name)
    path = Path(name)
    if not path.is_file():
        known = ", ".join(trace_names()) or "none"
        raise ValueError(f"trace {name!r} is neither a file nor a shipped trace (shipped: {known})")
    return _read_trace(path, path.stem)


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    wanted = ("topk_ids", "topk_weights", "experts", "meta")
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it holds a single array")
            arrays = {key: archive[key] for key in wanted if key in archive.files}
    except (
        # What numpy and zipfile raise for files that are cut, damaged or of another kind.
        ValueError,
        OSError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
        MemoryError,
    ) as error:
        what = str(error)
        # numpy's own words for a file of another kind advise to load it unsafely.
        if "pickle" in what:
            objects = what.startswith("Object arrays")
            what = "it holds Python objects" if objects else "damaged, or no npz file"
        raise ValueError(f"trace {path}: cannot be read as an npz archive: {what}") from error
    for key, value in arrays.items():
        # numpy hands members without its own header back as bytes.
        if not isinstance(value, np.ndarray):
            raise ValueError(f"trace {path}: {key} is not a numpy array")
    return arrays


def _read_trace(path: Path, name: str) -> Trace:
    arrays = _read_arrays(path)

    def bad(problem: str) -> ValueError:
        return ValueError(f"trace {path}: {problem}")

    if "topk_ids" not in arrays:
        raise bad("the key topk_ids is missing")
    ids = arrays["topk_ids"]
    if ids.dtype.kind not in "iu":
        raise bad(f"topk_ids must hold integers, got {ids.dtype}")
    if ids.ndim == 2:
        ids = ids[:, None, :]
    if ids.ndim != 3 or 0 in ids.shape:
        raise bad(
            "topk_ids must be [tokens, layers, top_k] or [tokens, top_k], none of them 0, "
            f"got shape {arrays['topk_ids'].shape}"
        )
    if int(ids.max()) >= 1 << 31 or int(ids.min()) < -(1 << 31):
        raise bad("topk_ids must fit 32 bits")
    ids = np.ascontiguousarray(ids, dtype=np.int64)

    meta: dict[str, Any] = {}
    if "meta" in arrays:
        text = arrays["meta"]
        if text.dtype.kind != "U" or text.ndim != 0:
            raise bad("meta must be one string")
        try:
            loaded = json.loads(str(text[()]))
        except (ValueError, RecursionError) as error:
            raise bad(f"meta is not JSON: {error}") from error
        if not isinstance(loaded, dict):
            raise bad(f"meta must be a JSON object, got {type(loaded).__name__}")
        meta = loaded

    experts: Any
    if "experts" in arrays:
        if arrays["experts"].dtype.kind not in "iu" or arrays["experts"].ndim != 0:
            raise bad("experts must be one integer")
        experts = int(arrays["experts"])
    else:
        experts = meta.get("experts", max(int(ids.max()) + 1, 1))
    if isinstance(experts, bool) or not isinstance(experts, int) or experts < 1:
        raise bad(f"experts must be a positive integer, got {experts!r}")
    if int(ids.max()) >= experts:
        raise bad(f"topk_ids reach {int(ids.max())}, but there are {experts} experts")

    weights: NDArray[np.float32]
    if "topk_weights" in arrays:
        raw = arrays["topk_weights"]
        if raw.dtype.kind not in "fiu":
            raise bad(f"topk_weights must hold real numbers, got {raw.dtype}")
        if raw.shape != arrays["topk_ids"].shape:
            raise bad(
                f"topk_weights must have topk_ids' shape {arrays['topk_ids'].shape}, "
                f"got {raw.shape}"
            )
        with np.errstate(over="ignore"):
            weights = np.ascontiguousarray(raw.reshape(ids.shape), dtype=np.float32)
        if not np.isfinite(weights).all():
            raise bad("topk_weights must be finite in float32")
    else:
        weights = np.full(ids.shape, 1.0 / ids.shape[2], dtype=np.float32)
    return Trace(name=name, topk_ids=ids, topk_weights=weights, experts=experts, meta=meta)
