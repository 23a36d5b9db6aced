"""The papers' settings: reference values, and that no paper's number is sound as stated."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent


@pytest.fixture(scope="module")
def claims(script):
    return script("published_claims")


def find(claims, text):
    (claim,) = [claim for claim in claims.CLAIMS if text in claim.setting]
    return claim


@pytest.mark.parametrize(
    ("text", "adjacency", "expected", "digits"),
    [
        ("FEMNIST, σ = 9.69", "zero_out", 13.57, 5e-3),
        pytest.param("CelebA, σ = 9.69", "zero_out", 76.25, 5e-3, marks=pytest.mark.thorough),
        ("CelebA, σ = 0.65", "zero_out", 1.4148, 6e-5),
        ("CelebA, σ = 0.65", "replace", 1.4596, 6e-5),
        ("FEMNIST, σ = 0.05", "zero_out", 2.214, 6e-4),
        ("FEMNIST, σ = 0.05", "replace", 5.526, 6e-4),
        ("as in the text (z = σQ)", "zero_out", 2.308, 6e-4),
    ],
)
def test_sound_values(claims, text, adjacency, expected, digits):
    assert claims.sound(find(claims, text), adjacency) == pytest.approx(expected, abs=digits)


@pytest.mark.parametrize(
    ("text", "expected", "digits"),
    [
        ("FEMNIST, σ = 0.02, γ = 0.2, T = 1000", 5.29866, 6e-6),
        ("σ = 1 on the sum", 5.39555, 6e-6),
        ("CelebA, σ = 0.65", 0.465, 6e-4),
        # √(2 ln 125000)/9.69, printed as 0.5.
        ("CelebA, σ = 9.69", 0.49998, 6e-6),
    ],
)
def test_the_papers_own_methods(claims, text, expected, digits):
    assert claims.published(find(claims, text)) == pytest.approx(expected, abs=digits)


def test_stated_numbers_follow_from_the_papers_methods(claims):
    for claim in claims.CLAIMS:
        by_method = claims.published(claim)
        if claim.epsilon is not None and by_method is not None and claim.method != "clt":
            assert by_method == pytest.approx(claim.epsilon, rel=0.01)


def test_wishart_noise_has_no_epsilon(claims):
    wishart = [claim for claim in claims.CLAIMS if claim.paper == "MP-MTL"]
    assert len(wishart) == 2
    for verdict in claims.table(wishart):
        assert verdict.published is verdict.zero_out is verdict.replace is None


@pytest.mark.thorough
def test_no_setting_is_as_private_as_its_method_says(claims):
    cheap = [claim for claim in claims.CLAIMS if claim.sampling == "fixed"]
    for verdict in claims.table(cheap):
        assert verdict.published is not None
        assert verdict.zero_out is not None
        assert verdict.replace is not None
        assert verdict.published < verdict.zero_out < verdict.replace


def test_a_stronger_delta_costs_more(claims):
    claim = find(claims, "FEMNIST, σ = 0.05")
    strong = claims.sound(claim, "zero_out", delta=1 / 2050)
    assert strong is not None
    assert strong > 2.214
