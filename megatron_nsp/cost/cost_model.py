"""The cost model: what a sample costs at each degree, phase by phase (NSP paper, section 4.1.2).

Per layer and pass a node runs a prologue and an epilogue (all-to-all) and a compute phase. A sample
of L tokens at degree d, H query and K key/value heads of D elements, V of values, Kd = max(K // d,
1) and W = H/d D + Kd (D + V) of q, k and v:

    compute    L^2 H (D + V) / d flops forward (causal; less in layers with a window), 2.5 times
               that backward
    prologue   L/d (d-1) W elements sent forward (q, k, v), L/d (d-1) H/d V backward
    epilogue   (L - L/d) H/d V elements forward (the output), (L - L/d) W backward
    dense      L/d tokens of projections, MLP and output layer, backward twice the forward
    experts    L/d tokens to their experts and back, the same backward; a node smaller than the
               expert-parallel group shares this work with all of the group's ranks

All of them add up over the samples of a node, so a sample has one time per degree and pass. Times
are for the whole model and spread a node's tokens evenly: the floors of the real slices move at
most one token a rank, and every member of a node must predict the same.

An active node also costs each of its ranks a latency per layer, pass and phase: three phases, or
only the compute phase at degree 1, where nothing is exchanged.

That is Ulysses. What a node costs that has ring members is in `node_cost.py`; of the transfers
between members only what their node's compute does not hide counts, which depends on all of its
samples together. So a search, which needs one time a sample, takes every sample to be alone in its
node, split in the way that is best for it; a plan is scored with the splits it has.

A profile may hold one model's fitted times instead (`FittedModel`); then heads and flops play no
part and there is Ulysses alone.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_nsp.config import MOST_TOKENS, RECOMPUTE
from megatron_nsp.cost.node_cost import SplitCost, fitted_share
from megatron_nsp.cost.profile import Profile
from megatron_nsp.cost.score import NodeTimes, PlanScore, SampleTimes, node_numbers
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.arrays import BoolArray, FloatArray, IntArray
from megatron_nsp.plan.backends import NodeHeads, backend_choices
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.saving import SavedSizes
from megatron_nsp.plan.split import ULYSSES, Split, possible_splits
from megatron_nsp.plan.tree import SPTree

BWD_DENSE_FACTOR = 2.0
"""Backward flops of a linear layer over forward: gradients of input and weight."""


@dataclass(frozen=True)
class CostModel:
    """Times of samples on the nodes of a tree.

    Attributes:
        profile: what the machine can do.
        shape: what the model needs.
        tree: the SP tree; its degrees are the columns of every `[n, K+1]` array, ascending.
        backend: how nodes may be split: one of `backend_choices()`.
        recompute: what a backward pass runs again, one of `config.RECOMPUTE`; attention with its
            exchanges.
        recompute_share: share of the layers that it is; whole layers, the first of a stage.
        save_tokens: tokens of a rank whose attention output is saved instead.
        overlap: whether the executor streams, so that ring members' transfers hide under compute.

    Raises:
        ValueError: the backend or what is recomputed is unknown, its share is not one, the backend
            cannot split the heads at a degree of the tree, or the profile has no rate for an
            exchange.
    """

    profile: Profile
    shape: ModelShape
    tree: SPTree
    backend: str = "ulysses"
    recompute: str = "none"
    recompute_share: float = 1.0
    save_tokens: int = 0
    overlap: bool = True

    def __post_init__(self) -> None:
        """Refuses trees that the backend cannot serve."""
        if self.recompute not in RECOMPUTE:
            raise ValueError(
                f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute}"
            )
        if not 0 <= self.recompute_share <= 1:
            raise ValueError(f"recompute_share must be from 0 to 1, got {self.recompute_share}")
        if self.backend not in backend_choices():
            raise ValueError(f"no SP backend {self.backend}, only {', '.join(backend_choices())}")
        if self.profile.fitted is not None and self.backend not in ("auto", "ulysses"):
            raise ValueError(
                f"profile {self.profile.name} holds the times of one model with Ulysses, "
                f"not with {self.backend}"
            )
        for degree, splits in zip(self.tree.degrees, self.splits, strict=True):
            if not splits:
                raise ValueError(
                    f"degree {degree} cannot split {self.shape.num_heads} query and "
                    f"{self.shape.num_kv_heads} key/value heads evenly"
                )
        if None in (self.profile.intra_bytes_per_s, self.profile.inter_bytes_per_s):
            self._ask_for_rates()

    def _ask_for_rates(self) -> None:
        """Lets the profile refuse what its rates leave out now, not when the first plan is made."""
        for degree, splits in zip(self.tree.degrees, self.splits, strict=True):
            for how in (self.of(degree, split) for split in splits):
                for phase in Phase:
                    for number in range(2):
                        how.phase_latency_us(phase, number)
        self.dense_us_per_token(Pass.FWD)

    @cached_property
    def splits(self) -> tuple[tuple[Split, ...], ...]:
        """`[K+1]` the ways in which nodes of each degree may be split, Ulysses first."""
        if self.profile.fitted is not None:
            return ((ULYSSES,),) * len(self.tree.degrees)
        together = self.profile.ranks_together(self.shape.stride)
        heads = self.shape.num_heads, self.shape.num_kv_heads, together
        return tuple(
            possible_splits(self.backend, NodeHeads(degree, *heads)) for degree in self.tree.degrees
        )

    @property
    def is_ulysses(self) -> bool:
        """Whether there is nothing to choose: no node may have ring members."""
        return all(splits == (ULYSSES,) for splits in self.splits)

    @cached_property
    def ulysses_degrees(self) -> tuple[int, ...]:
        """The degrees that Ulysses can serve."""
        return tuple(
            degree
            for degree, splits in zip(self.tree.degrees, self.splits, strict=True)
            if ULYSSES in splits
        )

    def of(self, degree: int, split: Split = ULYSSES) -> SplitCost:
        """What the attention of nodes of this degree costs, split in this way."""
        key = degree, Split(*split.backend.priced_as(split.num_members))
        if key not in self._split_costs:
            self._split_costs[key] = SplitCost(self.profile, self.shape, *key, self.overlap)
        return self._split_costs[key]

    @cached_property
    def _split_costs(self) -> dict[tuple[int, Split], SplitCost]:
        return {}

    def dense_us_per_token(self, pass_: Pass) -> float:
        """Time of one token outside attention: projections, MLPs, experts, output layer."""
        shape, fitted = self.shape, self.profile.fitted
        if fitted is not None:
            return fitted_share(fitted, pass_) * fitted.linear_us
        flops = shape.num_layers * (shape.dense_flops_per_token - shape.expert_flops_per_token)
        flops += shape.output_flops_per_token
        factor = 1.0 if pass_ is Pass.FWD else BWD_DENSE_FACTOR
        own_us = factor * flops * 1e6 / self.profile.dense_flops_per_s
        return own_us + self.expert_us_per_token(pass_)

    def expert_us_per_token(self, pass_: Pass) -> float:
        """The part of it that experts take, with the exchanges there and back."""
        shape = self.shape
        factor = 1.0 if pass_ is Pass.FWD else BWD_DENSE_FACTOR
        each_us = factor * shape.expert_flops_per_token * 1e6 / self.profile.dense_flops_per_s
        if shape.expert_degree > 1:
            rate = self.profile.exchange_rate("experts", shape.expert_degree, shape.stride)
            each_us += shape.expert_bytes_per_token * 1e6 / rate.bytes_per_s
        return shape.num_layers * each_us

    def attention_us(
        self,
        how: SplitCost,
        lengths: IntArray,
        is_saved: BoolArray,
        node: IntArray | None = None,
        size: int = 0,
    ) -> tuple[FloatArray, FloatArray]:
        """Attention of nodes in both passes, with what is computed again; latency left out.

        Args:
            how: degree and split of the nodes.
            lengths: `[n]` tokens of their samples.
            is_saved: `[n]` whether a sample's output is saved.
            node: `[n]` the node of each sample; None = every sample is alone in one.
            size: number of nodes.

        Returns:
            `[size]` forward and backward, or `[n]`.
        """

        def run(pass_: Pass, runs: BoolArray | None) -> FloatArray:
            sums = how.round_us(lengths, pass_), np.asarray(lengths, dtype=np.float64)
            if runs is not None:
                sums = np.where(runs, sums[0], 0.0), np.where(runs, sums[1], 0.0)
            if node is not None:
                sums = (
                    np.bincount(node, weights=sums[0], minlength=size),
                    np.bincount(node, weights=sums[1], minlength=size),
                )
            return how.attention_us(pass_, *sums)

        both = {pass_: run(pass_, None) for pass_ in Pass}
        if self.recompute != "none":
            again = self.recompute_pass
            both[again] = both[again] + self.recompute_share * run(Pass.FWD, ~is_saved)
        return both[Pass.FWD], both[Pass.BWD]

    def _dense_us(self, lengths: IntArray) -> tuple[FloatArray, FloatArray]:
        """`[n, K+1]` what each sample costs outside attention in both passes."""
        per_token = {pass_: self.dense_us_per_token(pass_) for pass_ in Pass}
        if self.recompute == "full":
            again_us = self.recompute_share * self.dense_us_per_token(Pass.FWD)
            per_token[self.recompute_pass] += again_us
        tokens = np.asarray(lengths, dtype=np.float64)[:, None]
        degrees = np.array(self.tree.degrees)
        return tokens * (per_token[Pass.FWD] / degrees), tokens * (per_token[Pass.BWD] / degrees)

    def is_saved(self, lengths: IntArray) -> BoolArray:
        """`[n, K+1]` whether a sample's attention output is expected to be saved at a degree.

        The longest samples of the batch that all ranks together have room for, at degrees at which
        one rank has room for its part.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        order = np.argsort(-tokens, kind="stable")
        is_long = np.zeros(len(tokens), dtype=bool)
        is_long[order] = np.cumsum(tokens[order]) <= self.save_tokens * self.tree.num_ranks
        fits = tokens[:, None] <= self.save_tokens * np.array(self.tree.degrees)
        saved: BoolArray = is_long[:, None] & fits
        return saved

    def with_saving(self, budget_bytes: float, sizes: SavedSizes) -> "CostModel":
        """The cost model that plans for attention outputs of so many bytes saved on each rank.

        Args:
            budget_bytes: most bytes that a rank may save in a micro-batch; may be infinite.
            sizes: the sizes of what is saved; of at least one layer.
        """
        tokens = min(budget_bytes / sizes.bytes_per_token, MOST_TOKENS)
        return replace(self, save_tokens=int(tokens))

    @property
    def recompute_pass(self) -> Pass:
        """The pass that recomputation is counted with.

        It runs in backward. Ranks that share experts wait for one another in it, as in forward and
        before the rest of backward, so its slowest rank is that of forward.
        """
        return Pass.FWD if self.shape.expert_degree > 1 else Pass.BWD

    def sample_times(self, lengths: IntArray) -> SampleTimes:
        """Both passes of every sample of a batch, alone in its node, with the node latencies.

        At each degree a sample has the split that is best for it, the first of equal ones. What
        its split has of latency beyond that of the least is added to its time.
        """
        return self._best_times(lengths, self._split_times(lengths))

    def search_times(self, lengths: IntArray) -> list[SampleTimes]:
        """The times that are worth a search of their own.

        Where a plan may choose among splits, Ulysses alone at the degrees that it can serve, and
        then every degree with its best split if that makes a difference: so that no plan is worse
        for the choice.
        """
        split_times, served = self._split_times(lengths), self.ulysses_degrees
        best = self._best_times(lengths, split_times)
        if self.backend != "auto" or self.is_ulysses:
            return [best]
        alone = [
            (times_us[:1], latency_us[:1])
            for degree, (times_us, latency_us) in zip(self.tree.degrees, split_times, strict=True)
            if degree in served
        ]
        plain = replace(self, backend="ulysses", tree=SPTree(self.tree.num_ranks, served))
        times = plain._best_times(lengths, alone)
        if served == self.tree.degrees and all(
            np.array_equal(one, other)
            for one, other in (
                (times.fwd_us, best.fwd_us),
                (times.bwd_us, best.bwd_us),
                (times.latency_us, best.latency_us),
            )
        ):
            return [best]
        return [times, best]

    def bound_times(self, lengths: IntArray) -> SampleTimes:
        """Times that no plan is below, pass by pass.

        Latency apart, with all transfers between members hidden.
        """
        least_us = [
            (times_us.min(axis=0)[None], latency_us.min()[None])
            for times_us, latency_us in self._split_times(lengths, hides_transfers=True)
        ]
        return self._best_times(lengths, least_us)

    def _split_times(
        self, lengths: IntArray, hides_transfers: bool = False
    ) -> list[tuple[FloatArray, FloatArray]]:
        """`[K+1]` of `[splits, 2, n]` attention in both passes and `[splits]` latency in one."""
        is_saved, found = self.is_saved(lengths), []
        for k, degree in enumerate(self.tree.degrees):
            ways = [self.of(degree, split) for split in self.splits[k]]
            if hides_transfers:
                ways = [replace(how, hides_transfers=True) for how in ways]
            times_us = [self.attention_us(how, lengths, is_saved[:, k]) for how in ways]
            found.append((np.array(times_us), np.array([how.latency_us for how in ways])))
        return found

    def _best_times(
        self, lengths: IntArray, split_times: list[tuple[FloatArray, FloatArray]]
    ) -> SampleTimes:
        each_us, least_latency_us = [], []
        for times_us, latency_us in split_times:
            least_latency_us.append(latency_us.min())
            times_us = times_us + (latency_us - latency_us.min())[:, None, None]
            best = times_us.sum(axis=1).argmin(axis=0)
            each_us.append(times_us[best, :, np.arange(len(best))])
        fwd_us, bwd_us = (np.stack([us[:, which] for us in each_us], axis=1) for which in range(2))
        dense_us = self._dense_us(lengths)
        return self._times(
            lengths, fwd_us + dense_us[0], bwd_us + dense_us[1], np.array(least_latency_us)
        )

    def _times(
        self, lengths: IntArray, fwd_us: FloatArray, bwd_us: FloatArray, latency_us: FloatArray
    ) -> SampleTimes:
        return SampleTimes(
            tree=self.tree,
            lengths=lengths,
            fwd_us=fwd_us,
            bwd_us=bwd_us,
            latency_us=latency_us,
            bias_us=self.profile.bias_us,
            expert_us=self._expert_us(lengths),
            expert_degree=self.shape.expert_degree,
        )

    def _expert_us(self, lengths: IntArray) -> FloatArray | None:
        """`[n, 2]` work of the samples' experts in both passes, where groups share it."""
        if self.shape.expert_degree == 1 or self.profile.fitted is not None:
            return None
        each_us = np.array([self.expert_us_per_token(pass_) for pass_ in Pass])
        if self.recompute == "full":
            each_us[0] *= 1.0 + self.recompute_share  # see recompute_pass
        expert_us: FloatArray = np.asarray(lengths, dtype=np.float64)[:, None] * each_us
        return expert_us

    def score(self, plan: Plan) -> PlanScore:
        """The times of a plan, its nodes split as it says."""
        assert plan.tree == self.tree, f"{plan.tree=} {self.tree=}"
        column = self.tree.column_of_depth(plan.depth)
        latency_us = np.zeros(len(self.tree.degrees))
        times = self._times(plan.lengths, *self._dense_us(plan.lengths), latency_us)
        return times.score(
            column, plan.index, plan.micro_batch, plan.num_micro_batches, self._node_times(plan)
        )

    def _node_times(self, plan: Plan) -> NodeTimes:
        """Attention of every node of a plan."""
        is_saved = self.is_saved(plan.lengths)
        placed = np.flatnonzero(plan.micro_batch != CARRIED)
        column = self.tree.column_of_depth(plan.depth[placed])
        node, size = node_numbers(
            self.tree, column, plan.index[placed], plan.micro_batch[placed], plan.num_micro_batches
        )
        found = list(dict.fromkeys([ULYSSES, *plan.splits.values()]))
        which = np.zeros(size, dtype=np.int64)
        for (micro_batch, entry), split in plan.splits.items():
            at = np.array([self.tree.column_of_depth(entry.depth), entry.index, micro_batch])
            number, _ = node_numbers(self.tree, at[:1], at[1:2], at[2:], 0)
            which[number] = found.index(split)
        total = NodeTimes(*(np.zeros(size) for _ in range(3)))
        for k, degree in enumerate(self.tree.degrees):
            for number in np.unique(which[node[column == k]]).tolist():
                here = (column == k) & (which[node] == number)
                rows, how = placed[here], self.of(degree, found[number])
                fwd_us, bwd_us = self.attention_us(
                    how, plan.lengths[rows], is_saved[rows, k], node[here], size
                )
                total.fwd_us[:] += fwd_us
                total.bwd_us[:] += bwd_us
                total.latency_us[np.unique(node[here])] = how.latency_us
        return total
