"""Streams differ from each other, and keep their numbers: with others no training is repeated."""

from __future__ import annotations

import numpy as np

from recprune.training.random_streams import Stream, stream_generator, torch_seed


def test_a_stream_is_the_generator_of_seed_number_and_step() -> None:
    assert [(stream.name, stream.value) for stream in Stream] == [
        ("EPOCH_ORDER", 1),
        ("WINDOWS", 2),
        ("STEP", 3),
        ("VALIDATION_USERS", 4),
        ("CODES", 5),
    ]
    for stream in Stream:
        expected = np.random.default_rng([7, stream.value, 5, 3]).random(4)
        assert np.array_equal(stream_generator(7, stream, 5, 3).random(4), expected)


def test_torch_gets_63_bits_that_differ_by_stream_epoch_step_and_worker() -> None:
    assert torch_seed(0, Stream.STEP, 0, 0) == 3291213472928352369
    seeds = [
        torch_seed(seed, stream, epoch, number, *worker)
        for seed in (0, 1)
        for stream in Stream
        for epoch in (0, 1)
        for number in (0, 1)
        for worker in ((), (1,))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
