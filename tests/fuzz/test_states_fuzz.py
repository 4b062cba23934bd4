"""The first cases of tests/fuzz/states.py and tests/fuzz/state_damage.py, in every run of the tests."""

from __future__ import annotations

from tests.fuzz import state_damage, states
from tests.fuzz.state_memory import Plane, addresses


def test_random_states_between_all_pairs_of_engines_and_ranks():
    assert len(states.PAIRS) == 8 * 8 * 4 * 4
    counts = states.run(256, 0)
    assert counts["converted, digests equal"] > 60
    assert counts["converted, groups replicated"] > 60


def test_the_reading_of_engines_is_one_of_its_own():
    """By hand, from the shapes that engines were seen to have: Falcon-H1 of 176 channels, and a small delta rule."""
    planes = [Plane("conv", (176, 3), 4, ((176, 1),)), Plane("ssm", (8, 16, 24), 4, ((8, 1),))]
    tensor, byte = addresses("vllm.sd", planes, 0, 2, 5, 65536)  # page 3 of layer 1: [3, 176]
    assert (tensor[1, 3, 7, 2], byte[1, 3, 7, 2]) == (1, 3 * 65536 + 4 * (2 * 176 + 7))
    tensor, byte = addresses("vllm.sd", planes, 1, 2, 5, 65536)
    assert (tensor[1, 3, 2, 5, 9], byte[1, 3, 2, 5, 9]) == (1, 3 * 65536 + 2112 + 4 * ((2 * 16 + 5) * 24 + 9))
    tensor, byte = addresses("transformers", planes, 0, 2, 5)  # [5, 176, 4]
    assert (tensor[1, 3, 7, 2], byte[1, 3, 7, 2]) == (2, 4 * ((3 * 176 + 7) * 4 + 3))
    tensor, byte = addresses("sglang.host", planes, 0, 2, 5)  # pages of 26,688 bytes in bf16; here 28,800: 24,576, then 4,224
    assert (tensor[1, 3, 7, 2], byte[1, 3, 7, 2]) == (0, 3 * 28800 + 24576 + 2112 + 4 * (7 * 3 + 2))
    planes = [Plane("delta", (2, 3, 5), 2, ((2, 1),))]
    tensor, byte = addresses("sglang", planes, 0, 2, 5)  # [2, 5, 2, value 5, key 3]
    assert (tensor[1, 3, 1, 2, 4], byte[1, 3, 1, 2, 4]) == (0, 2 * (((1 * 5 + 3) * 2 + 1) * 15 + 4 * 3 + 2))


def test_damage_shows_on_every_way():
    trials = 10
    for damage, counts in state_damage.run(trials).items():
        assert sum(counts.values()) == trials * len(state_damage.ways_of(damage)), damage
        assert counts["digest: another digest"] == (0 if damage == "missing_part" else trials), damage
    assert (len(state_damage.DAMAGE), len(state_damage.WAYS)) == (7, 8)
