"""What is told of several ranks."""

from flatout.observe.human import exposed_share, ranks_line, slowest_rank


def test_the_slowest_rank_is_named_against_the_median():
    assert slowest_rank([1.0, 1.0, 1.3, 1.0]) == "rank 2, 30.0% above the median"
    assert slowest_rank([1.0, 1.0, 1.006]) == "rank 2, 0.6% above the median"
    assert slowest_rank([1.0, 1.001]) == "none, all within 0.5%"
    assert slowest_rank([0.0, 0.0]) == "none, all within 0.5%"


def test_waiting_is_a_share_of_a_ranks_own_time():
    assert exposed_share(1.0, 3.0) == 0.25
    assert exposed_share(0.0, 0.0) == 0.0
    assert ranks_line([3.0, 6.0], 1.0) == (
        "slowest rank: rank 1, 100.0% above the median; rank 0 waits 25.0% of its time for gradients"
    )
