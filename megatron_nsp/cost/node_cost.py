"""What the attention of a node costs, for every way of splitting it (`split.py`).

A node of degree d is R ring members of u = d / R ranks. Of each token of its samples a rank sends
in one layer, with n = max(K/u, 1) key/value heads, H/u query heads, D elements a head and V of
values, and W = H/u D + n (D + V):

    inside a member  (u - 1) / d W there, (R^-1 - d^-1) H/u V back; backward the reverse
    between members  n (D + V) / R in each of R - 1 rounds (ring), R - 1 times that (gather);
                     backward sends as much again, and returns the gradients of the keys: at most
                     as much, and some member of a ring that much in each round

The heads and tails that members hold make the rounds of a ring equal, so a round is 1/R of the
node's kernel work, at the rate of samples of L/R tokens; merging what a round gave moves H V / d
elements more. The transfer of a round runs under the compute of the round before, so only what is
left of it adds to the time:

    forward    compute   0     1     2    ...   R-1
               transfer  P1    P2    P3         -
    backward   compute   0     1     2    ...   R-1      -
               transfer  P1    P2    R1 P3      R(R-2)   R(R-1)

With its latency, a transfer is hidden up to the time of all samples of the node together and of the
kernel's launch. What is gathered is not hidden at all, nor is what is exchanged inside a member:
other nodes may hide it, which the planner does not count. Without streaming nothing is hidden. In
layers with a sliding window members send one another only the few keys before their chunks, which
are not counted.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_nsp.cost.profile import ExchangeRate, FittedModel, Profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.arrays import FloatArray, IntArray
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.split import ULYSSES, Split

BWD_ATTENTION_FACTOR = 2.5
"""Backward flops of flash attention over forward: five matrix products instead of two."""


def ulysses_sent_bytes[Tokens: (int, float)](
    pass_: Pass,
    phase: Phase,
    rank_tokens: Tokens,
    stream_tokens: Tokens,
    degree: int,
    shape: ModelShape,
) -> Tokens:
    """Bytes one rank of a Ulysses node sends to the others in one phase of one layer.

    Args:
        pass_: forward or backward.
        phase: the phase; compute sends nothing.
        rank_tokens: tokens of the stream that the rank holds (T).
        stream_tokens: tokens of the whole stream (S).
        degree: ranks of the node (d).
        shape: heads and element size.
    """
    own_heads = shape.num_heads // degree
    own_kv_heads = max(shape.num_kv_heads // degree, 1)
    out_width = own_heads * shape.value_dim
    qkv_width = own_heads * shape.head_dim + own_kv_heads * (shape.head_dim + shape.value_dim)
    width = {
        (Pass.FWD, Phase.PROLOGUE): qkv_width,  # q, k and v of all heads, to where they belong
        (Pass.FWD, Phase.EPILOGUE): out_width,  # the output of this rank's heads
        (Pass.BWD, Phase.PROLOGUE): out_width,  # the output's gradient
        (Pass.BWD, Phase.EPILOGUE): qkv_width,  # dq, dk and dv of this rank's heads
    }.get((pass_, phase), 0)
    if phase is Phase.PROLOGUE:
        return rank_tokens * ((degree - 1) * width * shape.bytes_per_element)
    return (stream_tokens - rank_tokens) * (width * shape.bytes_per_element)


def sent_bytes_per_token(
    pass_: Pass, phase: Phase, number: int, degree: int, split: Split, shape: ModelShape
) -> float:
    """Bytes that the busiest rank sends in a phase of one layer for each token of its node.

    Args:
        pass_: forward or backward.
        phase: the phase.
        number: the round.
        degree: ranks of the node.
        split: how they divide attention.
        shape: heads and element size.
    """
    members, inside = split.num_members, degree // split.num_members
    if not phase.is_between_members(number):
        return ulysses_sent_bytes(pass_, phase, 1.0 / degree, 1.0 / members, inside, shape)
    if phase not in split.phases(pass_, number):
        return 0.0
    kv_heads = max(shape.num_kv_heads // inside, 1)
    width = kv_heads * (shape.head_dim + shape.value_dim)
    peers = split.backend.num_peers(members)
    return peers / members * width * shape.bytes_per_element


@dataclass(frozen=True)
class SplitCost:
    """Times of the attention of a node of one degree, split in one way, all layers.

    Attributes:
        profile: what the machine can do.
        shape: what the model needs.
        degree: ranks of the node.
        split: how they divide attention.
        overlap: whether transfers run under compute.
        hides_transfers: take transfers between members to cost nothing, for a lower bound.
    """

    profile: Profile
    shape: ModelShape
    degree: int
    split: Split = ULYSSES
    overlap: bool = True
    hides_transfers: bool = False

    @cached_property
    def num_calls(self) -> int:
        """Rounds with a kernel call, of equal work."""
        return sum(self.has_call(number) for number in range(self.split.num_rounds))

    def has_call(self, number: int) -> bool:
        """Whether there is such a round, with a kernel call."""
        split = self.split
        return number < split.num_rounds and split.backend.has_call(number, split.num_members)

    def round_us(self, lengths: IntArray, pass_: Pass) -> FloatArray:
        """`[n]` compute time of each sample in one of the rounds."""
        shape, fitted, calls = self.shape, self.profile.fitted, self.num_calls
        tokens = np.asarray(lengths, dtype=np.float64)
        if fitted is not None:
            return (
                tokens * tokens * (fitted_share(fitted, pass_) * fitted.quadratic_us / self.degree)
            )
        factor = 1.0 if pass_ is Pass.FWD else BWD_ATTENTION_FACTOR
        width = shape.head_dim + shape.value_dim
        flops_per_pair = factor * shape.num_heads * width * shape.num_layers
        rates = self.profile.attention_flops_per_s(tokens / calls, pass_ is Pass.FWD)
        pairs = shape.square_tokens(tokens)
        kernel_us = pairs * (flops_per_pair * 1e6 / rates / self.degree / calls)
        merged = self.profile.merged_elements_per_s
        if self.split.num_members == 1 or merged is None:
            return kernel_us
        elements = shape.num_layers * shape.num_heads * shape.value_dim / self.degree
        return kernel_us + tokens * (elements * 1e6 / merged)

    def exchange_us_per_token(self, pass_: Pass, phase: Phase, number: int = 0) -> float:
        """Time that one token of the node adds to an exchange."""
        key = pass_, phase, number
        if key not in self._exchanges_us:
            self._exchanges_us[key] = self._exchange_us_per_token(*key)
        return self._exchanges_us[key]

    @cached_property
    def _exchanges_us(self) -> dict[tuple[Pass, Phase, int], float]:
        return {}

    def _exchange_us_per_token(self, pass_: Pass, phase: Phase, number: int) -> float:
        if self.degree == 1 or phase is Phase.COMPUTE:
            return 0.0
        if self.profile.fitted is not None:
            is_exchange = phase in (Phase.PROLOGUE, Phase.EPILOGUE)
            share = 0.5 * fitted_share(self.profile.fitted, pass_) if is_exchange else 0.0
            sent = share * self.profile.fitted.exchange_bytes_per_token / self.degree
        else:
            # What members see of one another's keys in a window is next to nothing.
            layers = self.shape.num_layers
            if phase.is_between_members(number):
                layers -= self.shape.num_windowed_layers
            sent = layers * sent_bytes_per_token(
                pass_, phase, number, self.degree, self.split, self.shape
            )
        rate = self._rate(phase, number)
        return sent * 1e6 / rate.bytes_per_s if rate is not None else 0.0

    def phase_latency_us(self, phase: Phase, number: int = 0) -> float:
        """What one phase costs beyond its work, in one layer."""
        if phase is Phase.COMPUTE:
            return self.profile.latency_us if self.has_call(number) else 0.0
        rate = self._rate(phase, number)
        return rate.latency_us if rate is not None else 0.0

    def _rate(self, phase: Phase, number: int) -> ExchangeRate | None:
        """The rate of an exchange; None where nothing is sent."""
        stride, num_rounds = self.shape.stride, self.split.num_rounds
        if phase.is_between_members(number):
            is_sent = 0 < number < num_rounds
            return self.profile.members_rate(self.split, self.degree, stride) if is_sent else None
        inside = self.degree // self.split.num_members
        return self.profile.exchange_rate("ulysses", inside, stride) if inside > 1 else None

    @cached_property
    def latency_us(self) -> float:
        """What the node adds to each of its ranks in a pass, transfers between members left out."""
        launches = self.num_calls * self.profile.latency_us
        exchanges = sum(self.phase_latency_us(phase) for phase in (Phase.PROLOGUE, Phase.EPILOGUE))
        return self.shape.num_layers * (exchanges + launches)

    def attention_us(self, pass_: Pass, round_us: FloatArray, tokens: FloatArray) -> FloatArray:
        """`[n]` time of the attention of n nodes in one pass, `latency_us` left out.

        Args:
            pass_: forward or backward.
            round_us: `[n]` sum of `round_us` over each node's samples.
            tokens: `[n]` their tokens; 0 for a node without samples.
        """
        us_per_token = self.exchange_us_per_token(pass_, Phase.PROLOGUE)
        us_per_token += self.exchange_us_per_token(pass_, Phase.EPILOGUE)
        total_us: FloatArray = self.num_calls * round_us + tokens * us_per_token
        if self.split.num_members > 1 and not self.hides_transfers:
            exposed_us = self._exposed_us(pass_, round_us, tokens)
            total_us = total_us + np.where(tokens > 0, exposed_us, 0.0)
        return total_us

    def _exposed_us(self, pass_: Pass, round_us: FloatArray, tokens: FloatArray) -> FloatArray:
        """`[n]` what the transfers between members add, see the top of the page."""
        there_us, back_us = (
            self.shape.num_layers * self.phase_latency_us(phase, 1)
            + tokens * self.exchange_us_per_token(pass_, phase, 1)
            for phase in (Phase.PROLOGUE, Phase.RETURN)
        )
        rounds, is_bwd = self.split.num_rounds, pass_ is Pass.BWD
        if not (self.overlap and self.has_call(0)):  # no kernel runs before all keys are there
            return (rounds - 1) * (there_us + back_us * is_bwd)
        # Of round r the keys go forth under round r - 1; their gradients go back under round r + 1.
        num_back = max(rounds - 2, 0) if is_bwd else 0
        num_both = max(rounds - 3, 0) if is_bwd else 0
        busy_us = round_us + self.shape.num_layers * self.profile.latency_us
        exposed_us = back_us * is_bwd  # those of the last round go back under nothing
        for transfer_us, count in (
            (there_us, rounds - 1 - num_both),
            (back_us, num_back - num_both),
            (there_us + back_us, num_both),
        ):
            if count:
                exposed_us = exposed_us + count * np.maximum(transfer_us - busy_us, 0.0)
        return exposed_us


def fitted_share(fitted: FittedModel, pass_: Pass) -> float:
    """The share of a fitted model's times that belongs to a pass."""
    return fitted.fwd_share if pass_ is Pass.FWD else 1.0 - fitted.fwd_share
