"""What a run must have in common with its checkpoint: everything that decides what it draws."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.training.global_vars import unset_global_variables

from megatron_nsp.cost.profile import load_profile
from megatron_nsp.mcore import pretrain
from megatron_nsp.mcore.resume import OtherDrawError, compare, draw_settings
from tests.data_maker import write_documents
from tests.mcore.launch import MODEL, MOE

pytestmark = pytest.mark.usefixtures("help_texts")

BUDGET = "--nsp-token-budget 400"
WHOLE = "--recompute-granularity full --recompute-method"
OTHER_PLANS = {
    "--nsp-backend ring": "--nsp-backend auto, this run has ring",
    "--no-nsp-overlap": "--no-nsp-overlap False, this run has True",
    "--nsp-max-degree 2": "--nsp-degrees .* on 4 ranks, this run has .* on 4 ranks",
    "--window-size 20,0": "a model whose num_windowed_layers is 0, this run has 2",
    f"{WHOLE} uniform": "recomputation none, attention in 0 layers, this run has full, attention i",
    f"{WHOLE} block --recompute-num-layers 1": "in 0 layers, this run has full, attention in 1",
    "--bf16": "a model whose bytes_per_element is 4, this run has 2",
    f"{' '.join(MOE)} --expert-model-parallel-size 2": "a model whose dense_flops_per_token is",
}

Settings = Callable[[str], dict]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """The settings of a job of four ranks, by its flags."""
    write_documents(tmp_path / "docs", [512, 5, 7], seed=0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")

    def of_flags(flags: str) -> dict:
        unset_global_variables()
        argv = ["pretrain_nsp.py", *MODEL, "--data-path", str(tmp_path / "docs"), *flags.split()]
        monkeypatch.setattr("sys.argv", argv)
        return draw_settings(pretrain.parse_job()[1])

    return of_flags


@pytest.mark.parametrize("change", OTHER_PLANS)
def test_what_changes_the_plan_is_free_only_where_nothing_is_carried(
    settings: Settings, change: str
) -> None:
    compare(settings(""), settings(change))
    with pytest.raises(OtherDrawError, match=OTHER_PLANS[change]) as caught:
        compare(settings(BUDGET), settings(f"{BUDGET} {change}"))
    assert "\n" not in str(caught.value)


def test_a_budget_is_named_itself_not_what_it_makes_matter(settings: Settings) -> None:
    message = "made with --nsp-token-budget None, this run has 400"
    with pytest.raises(OtherDrawError, match=message):
        compare(settings(""), settings(BUDGET))


def test_the_layout_of_the_input_changes_no_plan(settings: Settings) -> None:
    compare(settings(BUDGET), settings(f"{BUDGET} --nsp-input-layout static:2"))


def test_other_weights_draw_other_documents(settings: Settings, tmp_path: Path) -> None:
    write_documents(tmp_path / "more", [3, 4], seed=0)
    weighted = "--data-path {} {docs} {} {more}"
    names = {name: str(tmp_path / name) for name in ("docs", "more")}
    before = settings(weighted.format(1, 3, **names))
    compare(before, settings(weighted.format("1.0", 3, **names)))
    message = "weights of --data-path 1 from document 0 on, 3 from document 3 on, this run has "
    with pytest.raises(OtherDrawError, match=f"{message}1 from"):
        compare(before, settings(weighted.format(1, 4, **names)))
    with pytest.raises(OtherDrawError, match=f"{message}None"):
        compare(before, settings(f"--data-path {names['docs']} {names['more']}"))


def test_a_profile_is_known_by_its_numbers(settings: Settings, tmp_path: Path) -> None:
    path, profile = tmp_path / "machine.json", load_profile("cpu-gloo").to_dict()
    flags = f"{BUDGET} --nsp-profile {path}"
    path.write_text(json.dumps(profile))
    before = settings(flags)
    compare(before, settings(flags))
    profile["dense_flops_per_s"] *= 2
    path.write_text(json.dumps(profile))
    with pytest.raises(OtherDrawError, match=r"cpu-gloo, numbers \w+, this run has"):
        compare(before, settings(flags))
