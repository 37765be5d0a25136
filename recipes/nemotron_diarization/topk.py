"""The indices of the k largest values, with torch's choice among equal ones.

`torch.topk` on the CPU is C++'s `std::nth_element`, or `std::partial_sort` where k is small beside n. Which of several
equal values they keep follows from their algorithms (libstdc++'s introselect and heap select), so where it matters
those are run, step by step. Without equal values at the edge the set is the same whatever finds it.
"""

from __future__ import annotations

import numpy as np

_SMALL = 64  # `partial_sort` when k * 64 <= n


def top_indices(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest of `values` (no NaN), in no order."""
    if count <= 0:
        return np.zeros(0, np.int64)
    chosen = np.argpartition(-values, count - 1)[:count]
    edge = values[chosen].min()
    # Equal -inf are as good as each other: nothing is ever read of them.
    if np.isneginf(edge) or int((values >= edge).sum()) == count:
        return chosen
    order = _Order(values)
    if count * _SMALL <= len(values):
        order.heap_select(0, count, len(values))
    else:
        order.nth_element(count - 1)
    return np.array(order.index[:count])


class _Order:
    """A permutation of indices under the order "larger first", rearranged as libstdc++ does."""

    def __init__(self, values: np.ndarray):
        self.values: list[float] = values.tolist()
        self.index = list(range(len(self.values)))

    def _before(self, a: int, b: int) -> bool:
        return self.values[a] > self.values[b]

    def _swap(self, a: int, b: int) -> None:
        self.index[a], self.index[b] = self.index[b], self.index[a]

    def nth_element(self, nth: int) -> None:
        index, before = self.index, self._before
        first, last = 0, len(index)
        depth = 2 * (last.bit_length() - 1)
        while last - first > 3:
            if depth == 0:
                self.heap_select(first, nth + 1, last)
                self._swap(first, nth)
                return
            depth -= 1
            cut = self._partition(first, last)
            if cut <= nth:
                first = cut
            else:
                last = cut
        for position in range(first + 1, last):
            item, hole = index[position], position
            while hole > first and before(item, index[hole - 1]):
                index[hole] = index[hole - 1]
                hole -= 1
            index[hole] = item

    def _partition(self, first: int, last: int) -> int:
        index, before = self.index, self._before
        self._median_to_first(first, first + 1, first + (last - first) // 2, last - 1)
        pivot, low, high = index[first], first + 1, last
        while True:
            while before(index[low], pivot):
                low += 1
            high -= 1
            while before(pivot, index[high]):
                high -= 1
            if low >= high:
                return low
            self._swap(low, high)
            low += 1

    def _median_to_first(self, to: int, a: int, b: int, c: int) -> None:
        x, y, z = (self.index[place] for place in (a, b, c))
        before = self._before
        if before(x, y):
            median = b if before(y, z) else c if before(x, z) else a
        else:
            median = a if before(x, z) else c if before(y, z) else b
        self._swap(to, median)

    def heap_select(self, first: int, middle: int, last: int) -> None:
        """The `middle - first` largest of the range come first; the heap's root is the least of them."""
        index, size = self.index, middle - first
        for parent in range((size - 2) // 2, -1, -1):
            self._sift(first, parent, size, index[first + parent])
        for position in range(middle, last):
            if self._before(index[position], index[first]):
                item, index[position] = index[position], index[first]
                self._sift(first, 0, size, item)

    def _sift(self, first: int, hole: int, size: int, item: int) -> None:
        index, before, top = self.index, self._before, hole
        child = hole
        while child < (size - 1) // 2:
            child = 2 * (child + 1)
            if before(index[first + child], index[first + child - 1]):
                child -= 1
            index[first + hole] = index[first + child]
            hole = child
        if size % 2 == 0 and child == (size - 2) // 2:
            child = 2 * child + 1
            index[first + hole] = index[first + child]
            hole = child
        while hole > top and before(index[first + (hole - 1) // 2], item):
            index[first + hole] = index[first + (hole - 1) // 2]
            hole = (hole - 1) // 2
        index[first + hole] = item
