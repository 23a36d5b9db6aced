"""Which noise a run drew: fingerprints of settings, and the history of streams."""

import functools
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.models import linear, softmax
from fedjaxsim.privacy import streams
from fedjaxsim.privacy.doors import gaussian_gram
from fedjaxsim.privacy.events import Stream
from fedjaxsim.privacy.mechanisms import gaussian

KEY = jax.random.key(0)
TASK = softmax(linear((4,), 3), 3)


def made_of(value):
    return lambda x: x * value


def test_every_setting_has_its_own_fingerprint():
    settings = [
        1, 1.0, True, None, "1", (1,), [1], {"a": 1}, {"b": 1}, (1, 2), ((1,), 2),
        np.float32(1), np.zeros(2), np.zeros((2, 1)), np.ones(2),
        made_of(1.0), made_of(2.0), functools.partial(made_of, 1), functools.partial(made_of, 2),
        fedavg(TASK), pmtl(TASK), pmtl(softmax(linear((4,), 4), 4)),
        pmtl(TASK, server_optimizer=optimizers.server(optax.adam)),
        pmtl(TASK, optimizers.local(optax.sgd, optax.cosine_decay_schedule(1.0, 10))),
        pmtl(TASK, optimizers.local(optax.sgd, optax.cosine_decay_schedule(1.0, 11))),
        gaussian(), gaussian([1.0, 2.0]), gaussian([1.0, 3.0]), gaussian_gram(),
        gaussian_gram(psd_deviations=3.0),
        eval("lambda x: x + 1"), eval("lambda x: x - 1"), eval("lambda x: x + 2"),
    ]  # fmt: skip
    found = [tuple(streams.fingerprint(setting).tolist()) for setting in settings]
    assert len(set(found)) == len(settings)
    assert tuple(streams.COMMON) not in found
    again = [pmtl(TASK), gaussian([1.0, 2.0]), made_of(1.0)]
    places = [20, 26, 15]
    for place, setting in zip(places, again, strict=True):
        assert found[place] == tuple(streams.fingerprint(setting).tolist())


def test_a_fingerprint_is_the_same_in_every_process():
    program = (
        "from fedjaxsim.privacy import streams; from fedjaxsim.algorithms.pmtl import pmtl;"
        "from fedjaxsim.models import linear, softmax;"
        "print(*streams.fingerprint(pmtl(softmax(linear((4,), 3), 3)), {'a', 'b', 'c'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    ours = streams.fingerprint(pmtl(TASK), {"c", "a", "b"})
    assert done.stdout.split() == [str(word) for word in ours], done.stderr


def fingerprint(number):
    return np.array([number, 7], np.uint32)


def opened(*steps):
    """The history after (fingerprint, round, rounds charged so far)."""
    history = streams.none()
    for number, round_, charged in steps:
        history = streams.opened(history, KEY, fingerprint(number), round_, charged)
    return history


def test_a_stream_that_goes_on_is_one_stream():
    found = streams.drawn(opened((1, 0, 0), (1, 10, 10), (1, 25, 25)), 30)
    assert found is not None
    [stream] = found
    assert (stream.first, stream.rounds) == (0, 30)


def test_settings_that_change_open_another_stream():
    found = streams.drawn(opened((1, 0, 0), (2, 10, 10), (1, 25, 25)), 30)
    assert found is not None
    assert [(stream.first, stream.rounds) for stream in found] == [(0, 10), (10, 15), (25, 5)]
    assert found[0].digest == found[2].digest != found[1].digest


def test_a_stream_from_which_nothing_was_drawn_is_forgotten():
    found = streams.drawn(opened((1, 0, 0), (2, 0, 0), (3, 0, 0)), 4)
    assert found is not None
    assert [stream.rounds for stream in found] == [4]
    assert streams.drawn(opened((1, 0, 0)), 0) == ()


def test_rounds_that_start_again_are_seen_however_the_state_was_made():
    # Round 0 again after ten: the state was put together by hand.
    found = streams.drawn(opened((1, 0, 0), (1, 0, 10)), 15)
    assert found is not None
    assert [(stream.first, stream.rounds) for stream in found] == [(0, 10), (0, 5)]
    assert found[0].shares(found[1])


def test_what_is_not_known_is_said_to_be_unknown():
    many = opened(*((number, number, number) for number in range(streams.PLACES + 1)))
    assert streams.drawn(many, 100) is None
    assert streams.drawn(streams.none(), 3) is None
    assert streams.drawn(streams.none(), 0) == ()


@pytest.mark.parametrize(
    ("first", "rounds", "shared"), [(0, 5, False), (0, 6, True), (9, 1, True), (10, 9, False)]
)
def test_streams_share_noise_where_their_rounds_meet(first, rounds, shared):
    one = Stream("a", 5, 5)
    assert one.shares(Stream("a", first, rounds)) is shared
    assert not one.shares(Stream("b", first, rounds))


def test_the_digest_does_not_show_the_key():
    key = jax.random.key(2**31 - 5)
    words = {f"{int(word):08x}" for word in np.ravel(jax.random.key_data(key))}
    found = streams.drawn(streams.opened(streams.none(), key, fingerprint(1), 0, 0), 1)
    assert found is not None
    assert len(found[0].digest) == 32
    assert not any(word in found[0].digest for word in words if int(word, 16))
