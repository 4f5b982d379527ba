"""Measures a machine: what the ranks that are running do, as a profile for the planner.

All ranks measure at the same time, as they work at the same time in training. What is measured:

    attention   the kernel at several lengths, forward and backward, as many samples as make up one
                stream of tokens
    dense       norms, projections and MLP of one layer, forward and backward, as autograd runs them
    exchanges   a node's forward without its kernel, all nodes of a degree at once, for several
                numbers of tokens; and keys and values on their way to the next rank of a ring, and
                to all ranks at once; a line is fitted to each
    merging     outputs of the same queries for parts of their keys, added up
    launches    the kernel on one token: the latency of a phase
    bias        gradients of all layers summed over the ranks, and an Adam step

Each time is the median of repeats; of the ranks, the slowest counts for exchanges and the median
for work. How far the fitted lines are from what they were fitted to is kept in the profile.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, override

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_nsp.cost.cost_model import BWD_DENSE_FACTOR
from megatron_nsp.cost.models import Model
from megatron_nsp.cost.node_cost import (
    BWD_ATTENTION_FACTOR,
    sent_bytes_per_token,
    ulysses_sent_bytes,
)
from megatron_nsp.cost.profile import AttentionRate, ExchangeRate, Profile, measured_tiers
from megatron_nsp.plan.heads import is_admissible
from megatron_nsp.plan.layout import rank_layout
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import ULYSSES, Split
from megatron_nsp.runtime.backends import mechanism
from megatron_nsp.runtime.backends.base import ForwardPass, NodeCall, NodeTensors
from megatron_nsp.runtime.backends.blocks import Rows
from megatron_nsp.runtime.backends.merged import Merged
from megatron_nsp.runtime.executor import run_exchange
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import (
    AttentionKernel,
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
)

Say = Callable[[str], None]
Work = Callable[[], None]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        seconds: least time for each measurement.
        lengths: sample lengths at which attention is measured, ascending.
        stream_tokens: tokens of a stream; longer samples make it longer.
        exchange_tokens: tokens that a rank holds in an exchange.
    """

    seconds: float
    lengths: tuple[int, ...]
    stream_tokens: int
    exchange_tokens: tuple[int, ...]


CPU_EFFORT = Effort(0.3, (16, 64, 256, 1024, 4096), 2048, (8, 128, 1024, 4096))
GPU_EFFORT = Effort(
    0.3,
    (128, 512, 2048, 8192, 32768, 131072),
    32768,
    (16, 256, 2048, 8192, 32768),
)


class _DenseLayer(nn.Module):
    """What a layer does outside attention, for timing alone."""

    def __init__(self, model: Model, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        how: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
        width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self.norms = nn.ModuleList(
            nn.RMSNorm(model.hidden, dtype=dtype, device=device) for _ in range(2)
        )
        self.qkv = nn.Linear(model.hidden, width, **how)
        self.out = nn.Linear(model.num_heads * model.head_dim, model.hidden, **how)
        self.up = nn.Linear(model.hidden, (2 if model.is_gated else 1) * model.active_width, **how)
        self.down = nn.Linear(model.active_width, model.hidden, **how)
        self.is_gated, self.attended = model.is_gated, model.num_heads * model.head_dim

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.qkv(self.norms[0](x))[..., : self.attended])
        hidden = self.up(self.norms[1](x))
        if self.is_gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * value
        else:
            hidden = nn.functional.gelu(hidden)
        result: Tensor = x + self.down(hidden)
        return result


class Profiler:
    """Measures on one rank; every rank of the job must make the same calls.

    Args:
        model: the model whose sizes are measured.
        groups: the tree's groups.
        kernel: the attention kernel.
        device: where to measure.
        dtype: of activations and weights.
        effort: how much is measured.
        say: told what is measured next.
    """

    def __init__(
        self,
        model: Model,
        groups: NestedGroups,
        kernel: AttentionKernel,
        device: torch.device,
        dtype: torch.dtype,
        effort: Effort,
        say: Say,
    ) -> None:
        self.model, self.groups, self.kernel = model, groups, kernel
        self.device, self.dtype, self.effort, self.say = device, dtype, effort, say

    def measure(self, name: str, provenance: str, ranks_per_host: int) -> Profile:
        """Everything, as a profile."""
        attention = self.attention_rates()
        dense_flops_per_s = self._dense()
        exchanges, residuals = self._exchanges()
        latency_us = self._launch_us()
        table = exchanges.get("ulysses") or exchanges.get("ring", {})
        inside, between = measured_tiers(
            {degree: rate.bytes_per_s for degree, rate in table.items()}, ranks_per_host
        )
        memory = None
        if self.device.type == "cuda":
            memory = float(torch.cuda.get_device_properties(self.device).total_memory)
        return Profile(
            name=name,
            is_estimate=False,
            provenance=provenance,
            date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            attention=attention,
            dense_flops_per_s=dense_flops_per_s,
            intra_bytes_per_s=inside,
            inter_bytes_per_s=between,
            ranks_per_host=ranks_per_host,
            latency_us=latency_us,
            bias_us=self._bias_us(),
            exchanges=exchanges,
            memory_bytes=memory,
            merged_elements_per_s=self._merging(),
            residuals=residuals,
        )

    def _time(self, work: Callable[[], object]) -> float:
        """Median seconds of the work; all ranks repeat it equally often."""
        work()
        self._synchronise()
        started = time.perf_counter()
        work()
        self._synchronise()
        once = time.perf_counter() - started
        repeats = self._agree(max(3, min(50, int(self.effort.seconds / max(once, 1e-9)))))
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            started = time.perf_counter()
            work()
            self._synchronise()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _agree(self, number: int) -> int:
        """The least number of any rank."""
        tensor = torch.tensor([number], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor.item())

    def _over_ranks(self, seconds: float, choose: Callable[[Sequence[float]], float]) -> float:
        """One number of all ranks' times."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, seconds)
        return float(choose(gathered))

    def _heads(self, tokens: int, num_heads: int) -> Tensor:
        shape = (tokens, num_heads, self.model.head_dim)
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def attention_rates(self) -> dict[int, AttentionRate]:
        """Throughput of the kernel by length."""
        model, rates = self.model, {}
        mask = AttentionMask(model.head_dim**-0.5)
        for length in self.effort.lengths:
            self.say(f"attention on samples of {length} tokens")
            count = max(1, self.effort.stream_tokens // length)
            samples = SampleBounds(np.arange(count + 1) * length)
            q, dout = (self._heads(count * length, model.num_heads) for _ in range(2))
            k, v = (self._heads(count * length, model.num_kv_heads) for _ in range(2))
            call = VarlenCall(samples, mask)
            state = AttentionState(q, k, v, *self.kernel.forward(q, k, v, call))

            def fwd(args: tuple = (q, k, v, call)) -> None:
                self.kernel.forward(*args)

            def bwd(args: tuple = (dout, state, call)) -> None:
                self.kernel.backward(*args)

            flops = 2.0 * length**2 * count * model.num_heads * model.head_dim
            fwd_s, bwd_s = (self._over_ranks(self._time(w), statistics.median) for w in (fwd, bwd))
            rates[length] = AttentionRate(flops / fwd_s, BWD_ATTENTION_FACTOR * flops / bwd_s)
        return rates

    def _dense(self) -> float:
        self.say("dense work of one layer")
        model, tokens = self.model, self.effort.stream_tokens
        layer = _DenseLayer(model, self.dtype, self.device)
        x = torch.randn(tokens, model.hidden, dtype=self.dtype, device=self.device)
        x.requires_grad_()

        def both() -> None:
            layer(x).sum().backward()

        seconds = self._over_ranks(self._time(both), statistics.median)
        parameters = model.attention_parameters
        parameters += model.num_matrices * model.hidden * model.active_width
        return 2.0 * parameters * tokens * (1 + BWD_DENSE_FACTOR) / seconds

    def _exchanges(self) -> tuple[dict[str, dict[int, ExchangeRate]], dict[str, float]]:
        """Rates by backend and degree, and how far each line is from its points."""
        tables: dict[str, dict[int, ExchangeRate]] = {}
        residuals, model = {}, self.model
        for degree in self.groups.tree.degrees[1:]:
            backends = ["ring", "gather"]
            if is_admissible(degree, model.num_heads, model.num_kv_heads):
                backends.insert(0, "ulysses")
            for backend in backends:
                work = self._both_exchanges if backend == "ulysses" else self._to_members
                sizes, seconds = [], []
                for tokens in self.effort.exchange_tokens:
                    self.say(f"{backend} exchanges among {degree} ranks, {tokens} tokens a rank")
                    run, sent_bytes, count = work(degree, tokens, backend)
                    sizes.append(sent_bytes / count)
                    seconds.append(self._over_ranks(self._time(run), max) / count)
                rate, residual = fit_line(np.array(sizes), np.array(seconds))
                tables.setdefault(backend, {})[degree] = rate
                residuals[f"{backend} exchange of degree {degree}"] = residual
        return tables, residuals

    def _node(self, degree: int, tokens: int, split: Split) -> tuple[NodeCall, NodeTensors]:
        """A node of one sample, and this rank's rows of it."""
        model, tree = self.model, self.groups.tree
        node = tree.node_at(tree.depth_of(degree), self.groups.rank)
        plan = Plan.from_nodes(tree, [tokens * degree], [node], splits={(0, node): split})
        (part,) = rank_layout(plan, self.groups.rank).slices
        mask = AttentionMask(model.head_dim**-0.5)
        q, out = (self._heads(part.num_tokens, model.num_heads) for _ in range(2))
        k, v = (self._heads(part.num_tokens, model.num_kv_heads) for _ in range(2))
        rows, group = mechanism(split, mask).prepare(part, mask), self.groups.group(node)
        return NodeCall(part, rows, group, self.kernel, mask), NodeTensors(q, k, v, out)

    def _to_members(self, degree: int, tokens: int, outer: str) -> tuple[Work, int, int]:
        """Keys and values sent to other ring members once, the bytes, and 1 exchange."""
        split = Split(degree, outer)
        call, tensors = self._node(degree, tokens, split)
        forward = _forward(call, tensors)
        forward.receive(0, run_exchange(forward.prologue(0)))

        def send() -> None:
            forward.receive(1, run_exchange(forward.prologue(1)))

        shape = self.model.shape(bytes_per_element=tensors.q_THD.element_size())
        each = sent_bytes_per_token(Pass.FWD, Phase.PROLOGUE, 1, degree, split, shape)
        return send, round(each * tokens * degree), 1

    def _both_exchanges(self, degree: int, tokens: int, _: str) -> tuple[Work, int, int]:
        """A node's forward without its kernel, the bytes a rank sends in it, and 2 exchanges.

        Packing and unpacking belong to an exchange: they take as long as the network does where
        that is fast.
        """
        model = self.model
        call, tensors = self._node(degree, tokens, ULYSSES)
        attended = self._heads(tokens * degree, model.num_heads // degree)
        kernel = _NoKernel(attended, attended[..., 0].float().transpose(0, 1).contiguous())
        call = replace(call, kernel=kernel)

        def both() -> None:
            forward = _forward(call, tensors)
            forward.receive(0, run_exchange(forward.prologue(0)))
            forward.compute(0)
            forward.finish(run_exchange(forward.epilogue()))

        shape = model.shape(bytes_per_element=attended.element_size())
        sent = [
            ulysses_sent_bytes(Pass.FWD, phase, tokens, tokens * degree, degree, shape)
            for phase in Phase
        ]
        return both, sum(sent), 2

    def _merging(self) -> float:
        self.say("merging")
        tokens, model = self.effort.stream_tokens, self.model
        q, out = (self._heads(tokens, model.num_heads) for _ in range(2))
        lse = out[..., 0].float().transpose(0, 1).contiguous()
        merged, rows = Merged(q, model.head_dim), Rows(None, tokens)

        def merge() -> None:
            merged.merge(rows, out, lse)

        return out.numel() / self._over_ranks(self._time(merge), statistics.median)

    def _launch_us(self) -> float:
        self.say("launches")
        model = self.model
        q = self._heads(1, model.num_heads)
        k, v = (self._heads(1, model.num_kv_heads) for _ in range(2))
        call = VarlenCall(SampleBounds(np.array([0, 1])), AttentionMask(model.head_dim**-0.5))

        def launch() -> None:
            self.kernel.forward(q, k, v, call)

        return 1e6 * self._over_ranks(self._time(launch), statistics.median)

    def _bias_us(self) -> float:
        self.say("gradients and optimizer")
        layer = _DenseLayer(self.model, self.dtype, self.device)
        parameters = list(layer.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.Adam(parameters)
        flat = torch.zeros(sum(p.numel() for p in parameters), device=self.device)

        def step() -> None:
            dist.all_reduce(flat)
            optimizer.step()

        return 1e6 * self.model.num_layers * self._over_ranks(self._time(step), max)


def _forward(call: NodeCall, tensors: NodeTensors) -> ForwardPass:
    return mechanism(call.part.split, call.mask).forward(call, tensors, has_backward=False)


class _NoKernel(AttentionKernel):
    """Gives out what it was given: an exchange without the attention in between."""

    name = "none"

    def __init__(self, out_SHV: Tensor, lse_HS: Tensor) -> None:
        self.result = out_SHV, lse_HS

    @override
    def forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        return self.result

    @override
    def backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("only forward is timed")


def fit_line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[ExchangeRate, float]:
    """The latency and rate that fit times best, relative to each time.

    Returns:
        The rate, and the root of the mean square of the relative errors.
    """
    weights = 1.0 / seconds
    design = np.stack([weights, sizes * weights], axis=1)
    fitted, *_ = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)
    latency, slope = float(fitted[0]), float(fitted[1])
    if latency < 0 or slope <= 0:  # noise: a line through the origin, or the largest size alone
        latency, slope = 0.0, float(seconds[-1] / sizes[-1])
    error = (latency + sizes * slope) * weights - 1.0
    return ExchangeRate(1.0 / slope, latency * 1e6), float(np.sqrt(np.mean(error**2)))
