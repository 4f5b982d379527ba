"""Cutting a sorted batch, for FlexSP: into micro-batches, and into buckets of alike lengths.

Both cuts are exact, and both work on samples longest first:

    lengths         9 9 7 5 5 4 2 1         starts are the places where a run begins
    micro-batches  [9] [9 7] [5 5 4 2 1]    starts 0 1 3: no largest sum is below 17
    buckets        [9 9 7] [5 5 4] [2 1]    starts 0 3 6: rounded up to 9, 5 and 2, 4 tokens more
"""

import numpy as np

from megatron_nsp.plan.arrays import IntArray


def micro_batch_starts(lengths: IntArray, num_parts: int) -> IntArray:
    """Cuts samples into consecutive runs so that the largest token sum is as small as can be.

    Args:
        lengths: `[n]` tokens, descending, n at least 1.
        num_parts: runs wanted; with fewer samples every sample is a run.

    Returns:
        `[m]` where each run begins; none is empty.
    """
    num_parts = min(num_parts, len(lengths))
    done = np.cumsum(lengths)
    low, high = max(int(lengths[0]), -(-int(done[-1]) // num_parts)), int(done[-1])
    while low < high:
        middle = (low + high) // 2
        if len(_runs(done, middle, num_parts)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return np.array(_runs(done, low, num_parts), dtype=np.int64)


def _runs(done: IntArray, limit: int, num_parts: int) -> list[int]:
    """Starts of the longest runs below the limit, cut short where samples would run out."""
    starts, start = [], 0
    while start < len(done):
        starts.append(start)
        before = int(done[start - 1]) if start else 0
        stop = int(np.searchsorted(done, before + limit, side="right"))
        start = max(min(stop, len(done) - (num_parts - len(starts))), start + 1)
        if len(starts) > num_parts:
            break
    return starts


def bucket_starts(lengths: IntArray, most: int) -> IntArray:
    """Cuts samples into buckets so that rounding up to the longest of each adds the fewest tokens.

    Dynamic programming over the distinct lengths: with b buckets the first j lengths cost

        least[b][j] = min over i of least[b - 1][i] + (tokens to round lengths i..j-1 up to i)

    Args:
        lengths: `[n]` tokens, descending, n at least 1.
        most: the most buckets.

    Returns:
        `[K]` where each bucket begins.
    """
    longest, first = np.unique(-lengths, return_index=True)
    longest = -longest
    count = np.diff(np.append(first, len(lengths)))
    samples = np.append(0, np.cumsum(count))
    tokens = np.append(0, np.cumsum(count * longest))
    num_lengths = len(longest)
    least = longest[0] * samples - tokens
    cuts = [np.zeros(num_lengths + 1, dtype=np.int64)]
    for _ in range(1, min(most, num_lengths)):
        before, least, cut = least, least.copy(), np.zeros(num_lengths + 1, dtype=np.int64)
        for j in range(1, num_lengths + 1):
            added = longest[:j] * (samples[j] - samples[:j]) - (tokens[j] - tokens[:j])
            cut[j] = int((before[:j] + added).argmin())
            least[j] = before[cut[j]] + added[cut[j]]
        cuts.append(cut)
    starts, j = [], num_lengths
    for cut in reversed(cuts):
        if j == 0:
            break
        j = int(cut[j])
        starts.append(int(first[j]))
    return np.array(starts[::-1], dtype=np.int64)
