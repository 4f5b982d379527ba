"""Pure tests of `megatron-nsp report`: pages are well formed and show what the plan says."""

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import pyplot

from megatron_nsp.cli import main
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.models import known_model
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import Node, SPTree
from megatron_nsp.report.figures import bucket_edges, routing_shares, token_and_work_shares
from megatron_nsp.simulator import StepSettings
from megatron_nsp.simulator.compare import Setting

LOG = """\
nsp step 1 | samples: 9 | tokens: 300 | targets: 291 | \
epoch: 1, documents drawn: 9 | predicted: 12.5 ms | imbalance: 1.050 | \
tokens per degree: 1: 100% | plan: 1.0 ms, waited 0.2 ms
 [2026-11-30] iteration        1/       2 | lm loss: 5.500000E+00 | loss scale: 1.0 |
nsp step 2 | samples: 4 | tokens: 310 | targets: 306 | \
epoch: 2, documents drawn: 13 | predicted: 14.5 ms | imbalance: 1.010 | \
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


def section_of(html: str, name: str) -> str:
    """What stands below a heading."""
    return html.split(f"<h2>{name}</h2>")[1].split("</section>")[0]


def rows(html: str, section: str) -> list[list[str]]:
    """The cells of a section's table, its head left out."""
    table = ElementTree.fromstring(section_of(html, section))
    return [[cell.text or "" for cell in row] for row in table.findall("tr")[1:]]


def span(rect: ElementTree.Element) -> tuple[float, float]:
    """Left and right edge."""
    left = float(rect.get("x"))
    return left, left + float(rect.get("width"))


def rects(html: str, section: str) -> list[ElementTree.Element]:
    """The rectangles of a section."""
    drawing = re.findall(r"<svg.*?</svg>", section_of(html, section), re.DOTALL)[0]
    return ElementTree.fromstring(drawing).findall("rect")


def node_of(tree: SPTree, rect: ElementTree.Element) -> Node:
    """The node that a rectangle says it is."""
    degree, index = re.match(r"node (\d+):(\d+): ", rect[0].text).groups()
    return tree.node(int(degree), int(index))


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
    tree = plan.tree
    assert plan.num_micro_batches == 2
    for number in range(2):
        shown = {
            node_of(tree, rect): rect for rect in rects(html, f"Nodes of micro-batch {number}")
        }
        assert set(shown) == set(tree.nodes())
        for node, rect in shown.items():
            label, held = tree.label(node), plan.samples_of(node, number)
            tokens = int(plan.lengths[held].sum())
            tip = f"node {label}: {len(held)} samples, {tokens:,} tokens"
            tip += f", {plan.backend_of(node, number)}" if tree.degree(node) > 1 else ""
            assert rect[0].text == (tip if len(held) else f"node {label}: nothing")
            # It lies over its ranks, whose leaves stand side by side in the order of ranks.
            leaves = [span(shown[tree.node(1, rank)]) for rank in tree.ranks(node)]
            assert leaves == sorted(leaves)
            assert span(rect) == pytest.approx((leaves[0][0], leaves[-1][1]), abs=0.02)
        rows_of_depths = [
            {shown[n].get("y") for n in tree.nodes() if n.depth == d} for d in range(4)
        ]
        assert [len(ys) for ys in rows_of_depths] == [1] * 4
        tops = [float(y) for ys in rows_of_depths for y in ys]
        assert tops == sorted(set(tops))
    assert ("ring 8x1" in html) == bool(plan.splits)


def test_bars_are_as_tall_as_the_tokens_of_the_ranks(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, data = page_of(planned, capsys), json.loads(planned.read_text())
    plan = Plan.from_dict(data["plan"])
    for number in range(2):
        bars = rects(html, f"Tokens of the ranks of micro-batch {number}")
        load = plan.token_load(number)
        assert [bar[0].text for bar in bars] == [
            f"rank {rank}: tokens {tokens:,.1f} tokens" for rank, tokens in enumerate(load.tolist())
        ]
        tall = np.array([float(bar.get("height")) for bar in bars])
        assert tall / tall.max() == pytest.approx(load / load.max(), abs=1e-3)
        feet = [float(bar.get("y")) + float(bar.get("height")) for bar in bars]
        assert feet == pytest.approx([feet[0]] * 8, abs=0.02)
        lefts = [span(bar) for bar in bars]
        assert all(a[1] <= b[0] for a, b in pairwise(lefts))


def test_smaller_degrees_are_what_planning_with_them_gives(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, data = page_of(planned, capsys), json.loads(planned.read_text())
    backend = data["profile"]["backend"]
    found = rows(html, "Other degrees")
    assert [row[0] for row in found] == ["up to 1", "up to 2", "up to 4", "up to 8"]
    words = "plan --lengths 9000,4000,4000,700,500,60 --ranks 8 --token-budget 1400 --json"
    for name, step, tokens in found:
        largest = ["--max-degree", name.removeprefix("up to ")]
        status = main([*words.split(), "--backend", backend, *largest])
        printed = capsys.readouterr()
        if status:
            reason = printed.err.strip().split("error: ")[1]
            assert step == "not possible: " + reason.replace(
                "--token-budget", "the token budget of"
            )
            continue
        other = json.loads(printed.out)
        assert step == f"{other['step_us'] / 1e3:,.1f} ms"
        assert tokens == f"{max(map(max, other['token_load_by_micro_batch'])):,}"


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
        lanes.setdefault(rect.get("y"), []).append(span(rect))
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
        plan = Plan.from_dict(json.loads(source.read_text())["plan"])
        bars = rects(page_of(source, capsys), "Tokens of the ranks")
        # Of each run of ranks the fullest is shown, by its own number.
        runs = plan.token_load().reshape(-1, max(ranks // 128, 1))
        fullest = runs.argmax(axis=1) + np.arange(len(runs)) * runs.shape[1]
        assert [bar[0].text for bar in bars] == [
            f"rank {rank}: tokens {tokens:,.1f} tokens"
            for rank, tokens in zip(fullest.tolist(), runs.max(axis=1).tolist(), strict=True)
        ]


def test_a_log_shows_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.log").write_text(LOG)
    html = page_of(tmp_path / "run.log", capsys)
    assert rows(html, "Summary") == [
        ["steps", "2"],
        ["first and last", "1 to 2"],
        ["epoch and documents drawn at the end", "2, 13"],
        ["steps that left samples out or carried some", "1"],
    ]
    for section, values, top in (
        ("loss", [5.5, 5.25], "5.5 "),
        ("predicted step", [12.5, 14.5], "14.5 ms"),
        ("predicted imbalance", [1.05, 1.01], "1.05 "),
        ("tokens", [300, 310], "310 "),
        ("samples", [9, 4], "9 "),
        ("waiting for plans", [0.2, 0.0], "0.2 ms"),
        ("exposed communication, last rank", [8.5], "8.5 ms"),
    ):
        drawing = ElementTree.fromstring(section_of(html, section))
        largest, zero = drawing.findall("text")[:2]
        assert (largest.text, zero.text) == (top, "0")
        points = [point.split(",") for point in drawing.find("polyline").get("points").split()]
        lefts = [float(x) for x, _ in points]
        assert lefts == sorted(set(lefts)) and len(points) == len(values)
        heights = float(zero.get("y")) - np.array([float(y) for _, y in points])
        assert heights / heights.max() == pytest.approx(np.array(values) / max(values), abs=1e-3)


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


def test_figures_of_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drawn, close = tmp_path / "figures.png", [], pyplot.close
    monkeypatch.setattr(pyplot, "close", drawn.append)
    words = "simulate --lengths wikipedia --batch-tokens 100K --max-len 32K --ranks 8 --batches 2"
    for more in ("", " --ablation --model qwen3-8b --recompute full"):
        assert main(f"{words} --json --plot {path}{more}".split()) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        data = json.loads(capsys.readouterr().out)
        (figure,) = drawn
        drawn.clear()
        mean_us = {name: np.mean(row["step_us"]) for name, row in data["policies"].items()}
        base_us = mean_us[data["reference"]]
        lengths, shares, times, parts, routing, ablation = figure.axes
        names = [label.get_text() for label in times.get_yticklabels()]
        widths = [bar.get_width() for bar in times.containers[0]]
        assert dict(zip(names, widths, strict=True)) == pytest.approx(
            {name: mean_us[name] / base_us for name in names}
        )
        assert set(names) == set(mean_us)
        stacked = np.sum([[bar.get_height() for bar in one] for one in parts.containers], axis=0)
        assert stacked == pytest.approx(widths, rel=1e-6)
        for axis, num_sets in ((lengths, 1), (shares, 2)):
            sums = [sum(bar.get_height() for bar in one) for one in axis.containers]
            assert sums == pytest.approx([100] * num_sets)
        assert np.sum(routing.images[0].get_array(), axis=0).max() == pytest.approx(100)
        parts_named = len(data.get("ablation", [])) - 1 if more else 0
        assert sum(len(one) for one in ablation.containers) == parts_named
        close(figure)
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
