"""Pure tests of `megatron-nsp report`: pages are well formed and show what the plan says."""

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_nsp.cli import main
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.models import known_model
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.report.figures import bucket_edges, routing_shares, token_and_work_shares
from megatron_nsp.simulator import StepSettings
from megatron_nsp.simulator.compare import Setting

LOG = """\
nsp step 1 | samples: 9 | tokens: 300 | targets: 291 | predicted: 12.5 ms | imbalance: 1.050 | \
tokens per degree: 1: 100% | plan: 1.0 ms, waited 0.2 ms
 [2026-11-30] iteration        1/       2 | lm loss: 5.500000E+00 | loss scale: 1.0 |
nsp step 2 | samples: 4 | tokens: 310 | targets: 306 | predicted: 14.5 ms | imbalance: 1.010 | \
tokens per degree: 4: 100% | plan: 1.0 ms, waited 0.0 ms | carried to the next step: 3 | \
exposed in step 1: 8.5 ms
 [2026-11-30] iteration        2/       2 | lm loss: 5.250000E+00 | loss scale: 1.0 |
"""


def page_of(source: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The page of a file, checked to be well formed and to load nothing from elsewhere."""
    output = source.with_suffix(".html")
    assert main(["report", str(source), str(output)]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    html = output.read_text()
    assert "http" not in html and "<script" not in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
    return html


def rects(html: str, section: str) -> list[ElementTree.Element]:
    """The rectangles of a section."""
    part = html.split(f"<h2>{section}</h2>")[1].split("</section>")[0]
    return ElementTree.fromstring(re.findall(r"<svg.*?</svg>", part, re.DOTALL)[0]).findall("rect")


@pytest.fixture(params=["ulysses", "ring"])
def planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Path:
    """A plan of two micro-batches."""
    words = "plan --lengths 9000,4000,4000,700,500,60 --ranks 8 --token-budget 1400 --json"
    assert main([*words.split(), "--backend", request.param]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    return tmp_path / "plan.json"


def test_a_plan_shows_every_node_and_the_tokens_of_every_rank(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, data = page_of(planned, capsys), json.loads(planned.read_text())
    plan = Plan.from_dict(data["plan"])
    assert plan.num_micro_batches == 2
    for number in range(2):
        nodes = [rect[0].text for rect in rects(html, f"Nodes of micro-batch {number}")]
        assert len(nodes) == 15
        active = {plan.tree.label(node) for node in plan.active_nodes(number)}
        shown = {re.match(r"node (\S+):", tip)[1] for tip in nodes if "nothing" not in tip}
        assert shown == active
        bars = rects(html, f"Tokens of the ranks of micro-batch {number}")
        tokens = [float(bar[0].text.split()[-2].replace(",", "")) for bar in bars]
        assert tokens == plan.token_load(number).tolist()
        for node in plan.active_nodes(number):
            tip = next(tip for tip in nodes if tip.startswith(f"node {plan.tree.label(node)}:"))
            assert plan.tree.degree(node) == 1 or tip.endswith(plan.backend_of(node, number))
    assert ("ring 8x1" in html) == bool(plan.splits)
    assert html.count("up to ") == 4 and "not possible: sample 0 of 9000 tokens needs" in html
    assert "Queues in one layer of micro-batch 1" in html


def test_the_loads_of_the_ranks_add_up_to_the_plan_s(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, data = page_of(planned, capsys), json.loads(planned.read_text())
    load_ms = [0.0] * 8
    for number in range(2):
        for bar in rects(html, f"Load of the ranks of micro-batch {number}"):
            rank, _, value = re.match(
                r"rank (\d+): degree (\d+) ([\d.,]+) ms", bar[0].text
            ).groups()
            load_ms[int(rank)] += float(value.replace(",", ""))
    assert load_ms == pytest.approx([load / 1e3 for load in data["load_us"]], abs=0.5)


def test_no_queue_runs_two_steps_at_once(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = page_of(planned, capsys)
    lanes: dict[str, list[tuple[float, float]]] = {}
    for rect in rects(html, "Queues in one layer of micro-batch 0"):
        start = float(rect.get("x"))
        lanes.setdefault(rect.get("y"), []).append((start, start + float(rect.get("width"))))
    assert len(lanes) > 8
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.03 for a, b in pairwise(spans))


def test_many_ranks_share_bars_and_one_rank_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks, lengths in ((1, "0"), (1, "5"), (512, "70000,40,3")):
        assert main(f"plan --lengths {lengths} --ranks {ranks} --json".split()) == 0
        source = tmp_path / f"{ranks}.json"
        source.write_text(capsys.readouterr().out)
        html = page_of(source, capsys)
        assert len(rects(html, "Tokens of the ranks")) == min(ranks, 128)


def test_a_log_shows_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.log").write_text(LOG)
    html = page_of(tmp_path / "run.log", capsys)
    for part in (
        "lm loss",
        "predicted imbalance",
        "14.5 ms",
        "1 to 2",
        "waiting for plans",
        "8.5 ms",
    ):
        assert part in html
    assert "<td>steps that left samples out or carried some</td><td>1</td>" in html


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing here", "there is no line `nsp step ...` in this log"),
        ("{", "not JSON"),
        ("{}", "this is not what `megatron-nsp plan --json` prints: KeyError 'plan'"),
        ('{"plan": []}', "this is not what `megatron-nsp plan --json` prints: TypeError"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (tmp_path / "x").write_text(content)
    assert main(["report", str(tmp_path / "x"), str(tmp_path / "x.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert main(["report", str(tmp_path / "none"), str(tmp_path / "x.html")]) == 2
    assert main(["report", str(tmp_path / "x"), "/no/such/x.html"]) == 2


def test_figures_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.png"
    words = "simulate --lengths wikipedia --batch-tokens 100K --max-len 32K --ranks 8 --batches 2"
    for more in ("", " --ablation --model qwen3-8b --recompute full"):
        assert main(f"{words} --plot {path}{more}".split()) == 0
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 50_000
        capsys.readouterr()
    assert main(f"{words} --plot {tmp_path}/none/x.png".split()) == 2
    assert "--plot takes a .png in a folder that exists" in capsys.readouterr().err


def test_shares_that_the_figures_show() -> None:
    tree = SPTree(4, (1, 2, 4))
    lengths = np.array([10, 1500, 1600, 9000])
    edges = bucket_edges(lengths)
    assert edges.tolist() == [1, 1024, 2048, 4096, 8192, 16384]
    nodes = [tree.node(1, 0), tree.node(1, 1), tree.node(2, 0), tree.node(4, 0)]
    shares = routing_shares([Plan.from_nodes(tree, lengths, nodes)], edges)
    assert shares[:, 0].tolist() == [1, 0, 0]
    assert shares[:, 1].tolist() == [0.5, 0.5, 0] and shares[:, 4].tolist() == [0, 0, 1]
    cost = CostModel(load_profile("h100-ib"), known_model("qwen3-8b").shape(), tree)
    setting = Setting(cost, None, None, 9000, StepSettings())
    tokens, work = token_and_work_shares(lengths, edges, setting)
    assert tokens.tolist() == pytest.approx(np.array([10, 3100, 0, 0, 9000]) / 12110)
    assert work.sum() == pytest.approx(1) and work[4] > tokens[4]
