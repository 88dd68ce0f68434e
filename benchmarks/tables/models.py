"""Whole models in transformers."""

from __future__ import annotations

from collections.abc import Iterable

from .rows import Row, Rows, commits, markdown, newest, one_or_range

NEAR = 0.1
"""A prediction of a whole model's gain that is off by no more than this is near."""
Step = tuple[str, str, int]
"""A model, a phase and its tokens."""


def load_steps(rows: Iterable[Row]) -> dict[Step, Rows]:
    """Rows of whole models by step and contestant."""
    found: dict[Step, Rows] = newest(
        rows, lambda row: (row["model"], row["phase"], row["T"]), lambda row: row["contestant"]
    )
    return found


def ours_of_steps(steps: dict[Step, Rows]) -> list[Row]:
    return [
        row
        for rows in steps.values()
        for name, row in sorted(rows.items())
        if name in ("weave", "weave:optimize") and "gain" in row
    ]


def whole_models_words(rows: Iterable[Row]) -> str:
    """What whole models gain, and how near the prediction is."""
    ours = ours_of_steps(load_steps(rows))
    if not ours:
        return ""
    said = []
    for phase in dict.fromkeys(row["phase"] for row in ours):
        gains = [row["gain"] for row in ours if row["phase"] == phase]
        said.append(f"{one_or_range(gains, '.2f')} times the tokens a second in {phase}")
    layers = dict.fromkeys(
        f"{row['model']}: {row['layers']} of {row['of_layers']} layers" for row in ours
    )
    near = sum(abs(row["predicted_off"]) <= NEAR for row in ours)
    far = [row for row in ours if abs(row["predicted_off"]) > NEAR]
    text = (
        f"In transformers, whole models with random weights ({', '.join(layers)}; "
        f"{commits(ours)}): "
        f"{', '.join(said)}, over the fastest of transformers' own experts in CUDA graphs. What "
        f"`weave-moe advise` predicts from transformers' times is within {NEAR:.0%} in {near} of "
        f"{len(ours)}"
    )
    if far:
        names = [
            f"{row['model']} {row['phase']} {row['T']:,} as `{row['contestant']}` "
            f"({row['predicted_gain']:.2f} predicted, {row['gain']:.2f} measured)"
            for row in far
        ]
        text += f"; not in {', '.join(names)}"
    return f"{text}."


def whole_models_table(rows: Iterable[Row]) -> str:
    """A row a step and way of ours."""
    steps = load_steps(rows)
    lines = []
    for row in ours_of_steps(steps):
        other = steps[row["model"], row["phase"], row["T"]][row["against"]]
        lines.append(
            [
                *(row["model"], row["phase"], f"{row['T']:,}", f"`{row['contestant']}`"),
                f"{row['tokens_per_s']:,.0f}",
                f"{other['tokens_per_s']:,.0f} ({row['against'].partition(':')[2]})",
                f"{row['gain']:.2f} ± {row['spread']:.2f}",
                f"{row['predicted_gain']:.2f}",
                f"{other['share']:.0%}",
            ]
        )
    head = ["model", "phase", "tokens", "ours", "tokens/s", "transformers' best, tokens/s"]
    head += ["gain", "predicted", "experts' share with transformers' best"]
    return markdown(head, lines) if lines else ""
