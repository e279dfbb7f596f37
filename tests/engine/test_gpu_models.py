"""What the GPU tests judge answers by."""

from types import SimpleNamespace

from gpu_models import FAR, gap_where_parted

from flyweight.engine.request import TokenLogprob


def answer(*tops):
    return SimpleNamespace(
        logprobs=[TokenLogprob(max(top, key=top.get), max(top.values()), top) for top in tops]
    )


def test_the_gap_where_answers_part_is_that_of_the_other_token():
    begin, tie = {5: -0.1, 6: -3.0}, {718: -4.393, 401: -4.393, 113: -4.409}
    assert gap_where_parted(answer(begin, tie), answer(begin, tie)) is None
    assert (
        abs(gap_where_parted(answer(begin, tie), answer(begin, {113: -4.393, 718: -4.408})) - 0.016)
        < 1e-6
    )
    assert gap_where_parted(answer(begin, tie), answer({9: -0.1}, tie)) == FAR
