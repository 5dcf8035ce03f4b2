"""Arithmetic of the roofline, selection of cases, and the shapes that cases promise."""

import pytest

from minitriton.bench import catalog
from minitriton.bench.cases_products import group_ends, tile_tables
from minitriton.bench.measure import summary
from minitriton.bench.roofline import AboveRoof, Ceilings, Work, fraction

CEILINGS = Ceilings(copy=4e12, read=4.4e12, cached=8e12, rates={"fp32": 5e13, "bf16": 8e14})
COPY = Work(bytes=4e9, flop=1e9)  # one millisecond
MATMUL = Work(bytes=4e8, flop=8e11, rate="bf16")  # one millisecond


def test_intensity_and_roof():
    assert COPY.intensity == 0.25
    assert CEILINGS.roof(COPY) == 1e12
    assert CEILINGS.floor(COPY) == pytest.approx(1e-3)
    assert CEILINGS.floor(COPY, warm=True) == pytest.approx(5e-4)
    assert CEILINGS.roof(MATMUL) == 8e14
    assert CEILINGS.floor(MATMUL) == pytest.approx(1e-3)
    assert (CEILINGS.bound(COPY), CEILINGS.bound(MATMUL)) == ("memory", "compute")


def test_fraction_of_the_roof():
    assert fraction(COPY, 2e-3, CEILINGS) == pytest.approx(0.5)
    assert fraction(COPY, 2e-3, CEILINGS, warm=True) == pytest.approx(0.25)
    assert fraction(MATMUL, 1.25e-3, CEILINGS) == pytest.approx(0.8)


def test_a_little_above_the_measured_ceiling_is_possible():
    assert fraction(MATMUL, 0.95e-3, CEILINGS) > 1
    assert fraction(COPY, 0.93e-3, CEILINGS) > 1  # reading is faster than copying


@pytest.mark.parametrize(
    ("work", "seconds", "warm"),
    [(COPY, 8e-4, False), (COPY, 3.9e-4, True), (MATMUL, 8e-4, False), (MATMUL, 8e-4, True)],
)
def test_above_the_roof_is_an_error(work, seconds, warm):
    with pytest.raises(AboveRoof, match="above the roof"):
        fraction(work, seconds, CEILINGS, warm=warm)


@pytest.mark.parametrize("wrong", [(0, 1, "fp32"), (1, 0, "fp32"), (1, 1, "fp12")])
def test_work_is_checked(wrong):
    with pytest.raises(ValueError, match="no work"):
        Work(*wrong)


def test_quantiles():
    found = summary([5.0, 1.0, 2.0, 4.0, 3.0])
    assert found == {"median": 3.0, "q20": 2.0, "q80": 5.0, "rounds": 5}


def test_titles_are_unique_and_quick_is_a_part_of_full():
    full = [spec.title for spec in catalog.select("full")]
    quick = [spec.title for spec in catalog.select("quick")]
    assert len(set(full)) == len(full)
    assert len(set(quick)) == len(quick) and set(quick) < set(full)


def test_a_dry_run_has_every_family_once():
    dry = [spec.family for spec in catalog.select("dry")]
    assert sorted(dry) == sorted(catalog.families())


def test_selection():
    only = catalog.select("full", ["gelu,softmax", "add"])
    assert {spec.family for spec in only} == {"gelu", "softmax", "add"}
    assert catalog.select("full", []) == catalog.select("full")
    title = "matmul 8192x8192x8192 B[N,K]"
    assert next(spec.title for spec in catalog.select("quick", [title, "gelu"])) == title


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(catalog.UnknownFamily, match="did you mean softmax") as caught:
        catalog.select("full", ["sofmax"])
    assert all(name in str(caught.value) for name in catalog.families())


def test_groups_cover_all_rows():
    ends = group_ends(16, 16384)
    assert ends == sorted(ends) and ends[-1] == 16384 and len(ends) == 16
    groups, firsts, counts = tile_tables([8, 8, 40], 16)
    assert (groups, firsts, counts) == ([0, 2, 2], [0, 8, 24], [8, 16, 16])
