from cpref.exactness import Errors
from cpref.show.errors import growth


def errors(size):
    return Errors(size, size, 2 * size, size)


def test_the_growth_of_errors_is_told_in_its_title_and_its_words():
    by_ranks = {
        "fp32": {2: errors(2e-3), 8: errors(3e-3)},
        "exact": {2: errors(1e-3), 8: errors(1.5e-3)},
    }
    picture = growth(by_ranks, errors(1e-3), "torch.bfloat16")
    assert "on 8 ranks is 1.50 times that on 2" in picture.figure.get_suptitle()
    assert "dk, fp32: 4.00e-03 on 2 ranks, 6.00e-03 on 8" in picture.alt
    assert picture.png().startswith(b"\x89PNG")
