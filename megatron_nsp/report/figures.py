"""Figures of a comparison as one PNG, after those of the NSP paper (Figures 2 and 7 to 10).

matplotlib is imported here alone, when a figure is drawn: the extra `viz`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nsp.plan.arrays import FloatArray, IntArray
from megatron_nsp.plan.plan import Plan
from megatron_nsp.simulator.ablation import FULL
from megatron_nsp.simulator.compare import Comparison, Setting, Trial

_PARTS = {
    "attention": "attention",
    "dense": "dense",
    "recompute": "run again",
    "exposed": "exchanges",
    "waited": "waiting",
    "sharding": "sharded parameters",
    "bias": "bias",
    "idle": "idle at the end",
}
_SHOWN_TRIALS = ("auto", "search")


def draw(
    path: Path,
    comparison: Comparison,
    trials: Sequence[Trial],
    batches: Sequence[IntArray],
    setting: Setting,
    ablation: Mapping[str, FloatArray],
) -> None:
    """Draws all figures.

    Args:
        path: the .png to write.
        comparison: the policies side by side.
        trials: what it was made from.
        batches: the lengths of each batch.
        setting: what they share.
        ablation: steps without one component, or nothing.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError("figures need matplotlib: pip install 'megatron-nsp[viz]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(18, 10), layout="constrained")
    lengths = np.concatenate([*batches, np.zeros(0, dtype=np.int64)])
    edges = bucket_edges(lengths)
    _lengths(axes[0, 0], lengths, edges)
    _shares(axes[0, 1], lengths, edges, setting)
    _times(axes[0, 2], comparison)
    _breakdown(axes[1, 0], comparison)
    _routing(axes[1, 1], trials, edges, setting)
    _ablation(axes[1, 2], ablation)
    figure.suptitle(f"simulated, profile {setting.cost.profile.name}: predictions")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bucket_edges(lengths: IntArray) -> IntArray:
    """Powers of two from 1K to above the longest sample; the first bucket starts at 1."""
    top = max(int(lengths.max(initial=1)), 1024)
    count = int(top).bit_length() - 10
    return np.array([1, *(1024 << i for i in range(count + 1))])


def token_and_work_shares(
    lengths: IntArray, edges: IntArray, setting: Setting
) -> tuple[FloatArray, FloatArray]:
    """`[buckets]` share of all tokens, and of all time at degree 1, in each bucket."""
    times = setting.cost.sample_times(lengths)
    work = times.fwd_us[:, 0] + times.bwd_us[:, 0]
    bucket = np.digitize(lengths, edges) - 1
    size = len(edges) - 1
    tokens = np.bincount(bucket, weights=lengths, minlength=size)[:size]
    total = np.bincount(bucket, weights=work, minlength=size)[:size]
    return tokens / max(tokens.sum(), 1e-12), total / max(total.sum(), 1e-12)


def routing_shares(plans: Sequence[Plan], edges: IntArray) -> FloatArray:
    """`[degrees, buckets]` share of a bucket's samples at each degree, which add up to 1."""
    tree = plans[0].tree
    counts = np.zeros((len(tree.degrees), len(edges) - 1))
    for plan in plans:
        bucket = np.digitize(plan.lengths, edges) - 1
        np.add.at(counts, (tree.column_of_depth(plan.depth), bucket), 1.0)
    shares: FloatArray = counts / np.maximum(counts.sum(axis=0), 1.0)
    return shares


def _names(edges: IntArray) -> list[str]:
    return [f"<{edge // 1024}K" for edge in edges[1:]]


def _lengths(axis: Any, lengths: IntArray, edges: IntArray) -> None:
    counts = np.histogram(lengths, edges)[0]
    axis.bar(_names(edges), 100 * counts / max(int(counts.sum()), 1))
    axis.set(title="lengths", ylabel="samples, %", yscale="log")
    axis.tick_params(axis="x", rotation=45)


def _shares(axis: Any, lengths: IntArray, edges: IntArray, setting: Setting) -> None:
    tokens, work = token_and_work_shares(lengths, edges, setting)
    place = np.arange(len(tokens))
    axis.bar(place - 0.2, 100 * tokens, 0.4, label="tokens")
    axis.bar(place + 0.2, 100 * work, 0.4, label="time at degree 1")
    axis.set(title="tokens against time", ylabel="%")
    axis.set_xticks(place, _names(edges), rotation=45)
    axis.legend()


def _times(axis: Any, comparison: Comparison) -> None:
    rows = comparison.rows
    base = next(row for row in rows if row.policy == comparison.reference)
    means = [float(np.mean(row.step_us) / np.mean(base.step_us)) for row in rows]
    axis.barh([row.policy for row in rows], means)
    limit = 1.2 * min(max(means), 3.0)  # hopeless policies run out of it
    for place, mean in enumerate(means):
        axis.text(min(mean, 0.88 * limit), place, f" {1 / mean:.2f}x", va="center")
    axis.axvline(1.0, color="gray", linestyle="--")
    axis.set(title=f"time of a step over {comparison.reference}", xlim=(0, limit))
    axis.invert_yaxis()


def _breakdown(axis: Any, comparison: Comparison) -> None:
    names = [row.policy for row in comparison.rows]
    base = next(row for row in comparison.rows if row.policy == comparison.reference)
    scale = [float(np.mean(row.step_us) / np.mean(base.step_us)) for row in comparison.rows]
    start = np.zeros(len(names))
    for part, label in _PARTS.items():
        values = np.array(
            [row.shares[part] * by for row, by in zip(comparison.rows, scale, strict=True)]
        )
        axis.bar(names, values, bottom=start, label=label)
        start += values
    axis.set(title="where the time goes, mean rank", ylim=(0, min(start.max(), 3) * 1.05))
    axis.tick_params(axis="x", rotation=60)
    axis.legend(fontsize=8)


def _routing(
    axis: Any,
    trials: Sequence[Trial],
    edges: IntArray,
    setting: Setting,
) -> None:
    plans = [
        trial.plan for trial in trials if trial.policy in _SHOWN_TRIALS and trial.plan is not None
    ]
    axis.set(title="samples of a length at each degree, %")
    if not plans:
        return
    shares = 100 * routing_shares(plans, edges)
    axis.imshow(shares, aspect="auto", cmap="Blues", origin="lower")
    axis.set_xticks(range(len(edges) - 1), _names(edges), rotation=45)
    degrees = setting.cost.tree.degrees
    axis.set_yticks(range(len(degrees)), [str(degree) for degree in degrees])
    for (row, bucket), value in np.ndenumerate(shares):
        if value >= 0.5:
            axis.text(bucket, row, f"{value:.0f}", ha="center", va="center", fontsize=8)


def _ablation(axis: Any, ablation: Mapping[str, FloatArray]) -> None:
    axis.set(title="longer without one component, %")
    if not ablation:
        axis.text(0.5, 0.5, "--ablation", ha="center")
        return
    whole = float(np.sum(ablation[FULL]))
    names = [name for name in ablation if name != FULL]
    values = [100 * (float(np.sum(ablation[name])) / whole - 1) for name in names]
    axis.bar(names, values)
    for place, value in enumerate(values):
        axis.text(place, value, f"{value:.1f}", ha="center")
