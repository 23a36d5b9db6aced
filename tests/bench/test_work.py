"""FLOPs and bytes, against counts made by hand."""

import numpy as np
import pytest

from fedjaxsim.bench import problems
from fedjaxsim.bench.systems import work_of
from fedjaxsim.bench.work import (
    cnn_flops,
    dense_flops,
    gru_flops,
    round_bytes,
    transformer_flops,
)
from fedjaxsim.models import linear
from fedjaxsim.tasks import softmax


def test_a_linear_layer_computes_outputs_and_the_gradient_of_its_weights():
    # x (1, 3) times W (3, 2): 6 multiplications and 6 additions; xᵀ times the error the same.
    assert dense_flops((3, 2)) == 12 + 12


def test_layers_after_the_first_also_compute_the_gradient_of_their_inputs():
    # 3·4 and 4·2 products: forward 24 + 16, weights 24 + 16, and 16 for the hidden layer.
    assert dense_flops((3, 4, 2)) == 24 + 16 + 24 + 16 + 16


def test_the_cnn_of_the_papers_counts_what_its_shapes_say():
    # 24×24 outputs of 5×5×1 → 32, 8×8 outputs of 5×5×32 → 64, 4·4·64 = 1024 → 62.
    first, second, last = 24 * 24 * 25 * 32, 8 * 8 * 25 * 32 * 64, 1024 * 62
    forward = 2 * (first + second + last)
    backward = 2 * (first + second + last) + 2 * (second + last)
    assert cnn_flops(28, 62) == forward + backward
    # The round of docs/benchmarks.md: 100 clients with 3 batches of 10.
    assert 100 * 30 * cnn_flops(28, 62) == pytest.approx(65.6e9, rel=1e-3)


def test_gates_and_outputs_of_a_gru_count_for_every_token():
    # 2 embedded numbers and 2 units into 6 gates, then 2 and 3 units into 9; 3 units into 5.
    assert gru_flops(7, (2, 3), 5) == 3 * 2 * 7 * ((2 + 2) * 6 + (2 + 3) * 9 + 3 * 5)


def test_attention_counts_the_pairs_that_are_not_behind():
    # 4 tokens make 10 pairs, each with a score and a share of 6 numbers.
    dense = 6 * 18 + 6 * 6 + 6 * 24 + 24 * 6
    assert transformer_flops(4, (6,), 5) == 3 * 2 * (4 * dense + 10 * 2 * 6 + 4 * 6 * 5)


def test_own_parameters_move_twice_a_client_and_shared_ones_twice_a_round():
    # 2 clients with 5 floats each way, 4 examples of 3 floats, 7 shared floats each way.
    assert round_bytes(2, 5, 4, 3, 7) == 4 * (2 * 2 * 5 + 4 * 3 + 2 * 7)


@pytest.mark.parametrize(
    ("algorithm", "floats"),
    # d = 3 and c = 2 make 8 parameters; 10 clients read 20 examples.
    [("fedavg", 60 + 16), ("pmtl", 160 + 60 + 16), ("local", 160 + 60)],
)
def test_only_personal_algorithms_move_parameters_of_every_client(algorithm, floats):
    task = softmax(linear((3,), 2), 2)
    work = work_of(algorithm, task, 10, 10, 20, dense_flops((3, 2)), 3)
    assert work == (20 * 24, 4 * floats, 10)


def test_random_writers_are_as_many_and_as_large_as_those_of_femnist():
    train, test = problems.femnist_counts()
    images = train + test
    assert (len(images), images.min(), images.max()) == (206, 5, 69)
    # The 206 writers have 6,237 images.
    assert images.sum() == pytest.approx(6237, rel=0.01)
    assert np.abs(test - images / 5).max() <= 0.5
