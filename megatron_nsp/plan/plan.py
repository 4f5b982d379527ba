"""A plan: which node and which micro-batch every sample of a batch runs in.

A plan is a value. Every rank computes it from the same lengths and the same configuration, so it
holds nothing that depends on the rank, and `digest` lets ranks check that they agree.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.heads import is_admissible
from megatron_nsp.plan.split import ULYSSES, Split, rank_tokens
from megatron_nsp.plan.tree import Node, SPTree

CARRIED = -1

Splits = Mapping[tuple[int, Node], Split]
"""How nodes divide attention, by micro-batch and node; a node that is not there: Ulysses."""


def _frozen(values: npt.ArrayLike) -> IntArray:
    array = np.array(values, dtype=np.int64).reshape(-1)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Plan:
    """Assignment of `n` samples to nodes of `tree`.

    Attributes:
        tree: the SP tree of the domain.
        lengths: `[n]` tokens of each sample, at least 1.
        depth: `[n]` depth of each sample's node.
        index: `[n]` index of each sample's node within its depth.
        micro_batch: `[n]` the micro-batch each sample runs in; `CARRIED` (-1) for a sample left for
            the next step.
        num_micro_batches: micro-batches of the step; those without samples are filler ones.
        token_budget: most tokens a rank may hold in one micro-batch; None = no limit.
        splits: how nodes divide attention among their ranks.
    """

    tree: SPTree
    lengths: IntArray
    depth: IntArray
    index: IntArray
    micro_batch: IntArray
    num_micro_batches: int = 1
    token_budget: int | None = None
    splits: Splits = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Makes the arrays read-only copies, so that a plan can be shared and hashed.

        The node of a carried sample says nothing: it is set to the first leaf.
        """
        others = {key: split for key, split in sorted(self.splits.items()) if split != ULYSSES}
        object.__setattr__(self, "splits", others)
        for name in ("lengths", "depth", "index", "micro_batch"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        if len(self.depth) == len(self.index) == len(self.micro_batch):
            is_carried = self.micro_batch == CARRIED
            leaf = self.tree.depth_of(1)
            object.__setattr__(self, "depth", _frozen(np.where(is_carried, leaf, self.depth)))
            object.__setattr__(self, "index", _frozen(np.where(is_carried, 0, self.index)))

    @classmethod
    def from_nodes(
        cls,
        tree: SPTree,
        lengths: npt.ArrayLike,
        nodes: "list[Node] | tuple[Node, ...]",
        micro_batch: npt.ArrayLike | None = None,
        num_micro_batches: int = 1,
        token_budget: int | None = None,
        splits: Splits | None = None,
    ) -> "Plan":
        """A forced plan: one node a sample, checked by `validate`.

        Raises:
            ValueError: see `validate`.
        """
        plan = cls(
            tree=tree,
            lengths=_frozen(lengths),
            depth=_frozen([node.depth for node in nodes]),
            index=_frozen([node.index for node in nodes]),
            micro_batch=_frozen(np.zeros(len(nodes)) if micro_batch is None else micro_batch),
            num_micro_batches=num_micro_batches,
            token_budget=token_budget,
            splits=splits or {},
        )
        plan.validate()
        return plan

    def followed_by(self, lengths: npt.ArrayLike) -> "Plan":
        """The plan of a longer batch, whose further samples are all carried."""
        more = _frozen(lengths)
        no_node = np.zeros(len(more), dtype=np.int64)
        return Plan(
            tree=self.tree,
            lengths=np.concatenate([self.lengths, more]),
            depth=np.concatenate([self.depth, no_node]),
            index=np.concatenate([self.index, no_node]),
            micro_batch=np.concatenate([self.micro_batch, np.full(len(more), CARRIED)]),
            num_micro_batches=self.num_micro_batches,
            token_budget=self.token_budget,
            splits=self.splits,
        )

    @property
    def num_samples(self) -> int:
        """Samples in the batch, carried ones included."""
        return len(self.lengths)

    @property
    def carried(self) -> IntArray:
        """Samples left for the next step."""
        return np.flatnonzero(self.micro_batch == CARRIED)

    def node_of(self, sample: int) -> Node:
        """The node `sample` runs in."""
        return Node(int(self.depth[sample]), int(self.index[sample]))

    @cached_property
    def _streams(self) -> dict[tuple[int, Node], IntArray]:
        """The samples of every active node of every micro-batch, in stream order.

        A stream is ordered longest first, ties by sample number: the order in which a byte budget
        would save samples, and the same on every rank.
        """
        order = np.lexsort((np.arange(self.num_samples), -self.lengths))
        order = order[self.micro_batch[order] != CARRIED]
        order = order[np.lexsort((self.index[order], self.depth[order], self.micro_batch[order]))]
        keys = np.stack([self.micro_batch[order], self.depth[order], self.index[order]], axis=1)
        starts = np.flatnonzero(np.any(np.diff(keys, axis=0, prepend=-2), axis=1))
        streams = {}
        for start, samples in zip(starts, np.split(order, starts[1:]), strict=False):
            micro_batch, depth, index = (int(value) for value in keys[start])
            samples.flags.writeable = False
            streams[micro_batch, Node(depth, index)] = samples
        return streams

    def samples_of(self, node: Node, micro_batch: int = 0) -> IntArray:
        """The samples of `node`, in stream order (read-only; empty when the node is inactive)."""
        return self._streams.get((micro_batch, node), _frozen([]))

    def split_of(self, node: Node, micro_batch: int = 0) -> Split:
        """How `node` divides attention among its ranks."""
        return self.splits.get((micro_batch, node), ULYSSES)

    def backend_of(self, node: Node, micro_batch: int = 0) -> str:
        """What divides attention among the ranks of `node`, for people: for example `usp 2x4`."""
        split, degree = self.split_of(node, micro_batch), self.tree.degree(node)
        sizes = f" {split.num_members}x{degree // split.num_members}"
        return split.label(degree) + (sizes if split != ULYSSES else "")

    def active_nodes(self, micro_batch: int = 0) -> tuple[Node, ...]:
        """The nodes that hold at least one sample, roots first."""
        return tuple(sorted(node for key, node in self._streams if key == micro_batch))

    def active_path(self, rank: int, micro_batch: int = 0) -> tuple[Node, ...]:
        """The active nodes that hold `rank`, root first."""
        return tuple(node for node in self.tree.path(rank) if (micro_batch, node) in self._streams)

    def token_load(self, micro_batch: int = 0) -> IntArray:
        """`[num_ranks]` tokens each rank stores in `micro_batch`, without filler tokens."""
        load = np.zeros(self.tree.num_ranks, dtype=np.int64)
        for (batch, node), samples in self._streams.items():
            if batch == micro_batch:
                split = self.split_of(node, micro_batch)
                load[self.tree.ranks(node)] += rank_tokens(
                    self.lengths[samples], self.tree.degree(node), split
                )
        return load

    def over_budget_tokens(self) -> int:
        """Tokens by which the fullest rank of any micro-batch exceeds the budget, or 0."""
        if self.token_budget is None:
            return 0
        loads = [int(self.token_load(m).max()) for m in range(self.num_micro_batches)]
        return max(0, max(loads, default=0) - self.token_budget)

    def validate(self) -> None:
        """Checks that the plan is complete and fits its tree and budget.

        Raises:
            ValueError: a length below 1, an unknown node or micro-batch, arrays of different
                lengths, ring members that do not divide a node, or a rank above the token budget;
                the message names the numbers.
        """
        sizes = {len(a) for a in (self.lengths, self.depth, self.index, self.micro_batch)}
        if len(sizes) != 1:
            raise ValueError(
                f"a plan needs one node and one micro-batch a sample, got arrays of {sorted(sizes)}"
            )
        nodes_at = np.array([self.tree.num_nodes(d) for d in range(self.tree.num_depths)])
        is_depth = (self.depth >= 0) & (self.depth < self.tree.num_depths)
        is_node = is_depth & (self.index >= 0)
        is_node &= self.index < nodes_at[np.where(is_depth, self.depth, 0)]
        is_batch = (self.micro_batch >= CARRIED) & (self.micro_batch < self.num_micro_batches)
        for sample in np.flatnonzero(~((self.lengths >= 1) & is_node & is_batch))[:1]:
            raise ValueError(self._complaint(int(sample)))
        for (micro_batch, node), split in self.splits.items():
            if (micro_batch, node) not in self._streams:
                raise ValueError(
                    f"a node without samples is split: depth {node.depth}, index {node.index}, "
                    f"micro-batch {micro_batch}"
                )
            split.validate(self.tree.degree(node))
        if over := self.over_budget_tokens():
            raise ValueError(
                f"a rank holds {over + (self.token_budget or 0)} tokens, over the token budget of "
                f"{self.token_budget}"
            )

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Checks that every node's heads divide over the ranks that share them.

        Raises:
            ValueError: names the first node whose heads do not, and the numbers.
        """
        for micro_batch, node in self._streams:
            split, degree = self.split_of(node, micro_batch), self.tree.degree(node)
            split.backend.check_heads(degree, num_heads, num_kv_heads)
            inside = degree // split.num_members
            if not is_admissible(inside, num_heads, num_kv_heads):
                raise ValueError(
                    f"node {self.tree.label(node)} cannot split {num_heads} query and "
                    f"{num_kv_heads} key/value heads over {inside} ranks evenly"
                )

    def _complaint(self, sample: int) -> str:
        if self.lengths[sample] < 1:
            return f"sample {sample} has {self.lengths[sample]} tokens, at least 1 needed"
        if not CARRIED <= self.micro_batch[sample] < self.num_micro_batches:
            return (
                f"sample {sample} is in micro-batch {self.micro_batch[sample]}, "
                f"of {self.num_micro_batches}"
            )
        return (
            f"sample {sample} is on node (depth {self.depth[sample]}, index {self.index[sample]}), "
            f"which a tree of {self.tree.num_ranks} ranks and degrees {list(self.tree.degrees)} "
            "does not have"
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything the plan says, in hexadecimal; equal plans have equal digests."""
        header = (self.tree.num_ranks, self.tree.degrees, self.num_micro_batches, self.token_budget)
        state = hashlib.sha256(repr(header).encode())
        for array in (self.lengths, self.depth, self.index, self.micro_batch):
            state.update(array.astype("<i8").tobytes())
        if self.splits:
            state.update(repr([(b, *node, *s) for (b, node), s in self.splits.items()]).encode())
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Plans are equal when they say the same."""
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        """Hash of the digest."""
        return hash(self.digest)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values; `nodes` lists every active node with its samples."""
        return {
            "num_ranks": self.tree.num_ranks,
            "degrees": list(self.tree.degrees),
            "num_micro_batches": self.num_micro_batches,
            "token_budget": self.token_budget,
            "nodes": [
                {
                    "micro_batch": micro_batch,
                    "degree": self.tree.degree(node),
                    "index": node.index,
                    "samples": samples.tolist(),
                    "lengths": self.lengths[samples].tolist(),
                    **self.split_of(node, micro_batch).to_dict(),
                }
                for (micro_batch, node), samples in sorted(
                    self._streams.items(), key=lambda item: item[0]
                )
            ],
            "carried": [
                {"sample": int(sample), "length": int(self.lengths[sample])}
                for sample in self.carried
            ],
            "digest": self.digest,
        }

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Plan":
        """The inverse of `to_dict`.

        Raises:
            ValueError: the plan breaks a rule of `validate`, or its digest does not match.
        """
        tree = SPTree(int(data["num_ranks"]), tuple(data["degrees"]))
        rows = [
            (sample, length, tree.node(entry["degree"], entry["index"]), entry["micro_batch"])
            for entry in data["nodes"]
            for sample, length in zip(entry["samples"], entry["lengths"], strict=True)
        ]
        leaf = tree.node(1, 0)
        rows += [(entry["sample"], entry["length"], leaf, CARRIED) for entry in data["carried"]]
        rows.sort()
        if [row[0] for row in rows] != list(range(len(rows))):
            raise ValueError(
                f"a plan numbers its {len(rows)} samples 0..{len(rows) - 1}, each once"
            )
        plan = cls.from_nodes(
            tree,
            [row[1] for row in rows],
            [row[2] for row in rows],
            [row[3] for row in rows],
            data["num_micro_batches"],
            data["token_budget"],
            {
                (entry["micro_batch"], tree.node(entry["degree"], entry["index"])): split
                for entry in data["nodes"]
                if (split := Split.from_dict(entry)) != ULYSSES
            },
        )
        if "digest" in data and data["digest"] != plan.digest:
            raise ValueError(f"the plan's digest is {plan.digest}, the file says {data['digest']}")
        return plan

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))
