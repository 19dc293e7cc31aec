"""Chunked log-probabilities against the plain computation, value and gradient, in float64."""

import pytest
import torch

from trainer.logprobs import chunked_logprobs


def inputs(tokens: int = 7, bias: bool = True, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 5, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=dtype, requires_grad=True)
    offset = torch.randn(11, generator=generator, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(0, 11, (tokens,), generator=generator)
    return hidden, weight, offset, targets, torch.randn(tokens, generator=generator, dtype=dtype)


def plain(hidden, weight, bias, targets, temperature):
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_value_and_gradient_equal_the_plain_computation(temperature, chunk, bias):
    hidden, weight, offset, targets, upstream = inputs(bias=bias)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    expected, expected_entropy = plain(hidden, weight, offset, targets, temperature)
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), leaves)
    actual, entropy = chunked_logprobs(hidden, weight, offset, targets, temperature, chunk)
    gradients = torch.autograd.grad((actual * upstream).sum(), leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-12)


def test_a_second_backward_over_the_same_graph_gives_the_same_gradient():
    hidden, weight, _, targets, upstream = inputs(bias=False)
    logprobs, _ = chunked_logprobs(hidden, weight, None, targets, 1.0, 3)
    first = torch.autograd.grad((logprobs * upstream).sum(), [hidden, weight], retain_graph=True)
    second = torch.autograd.grad((logprobs * upstream).sum(), [hidden, weight])
    torch.testing.assert_close(first, second)


def test_the_entropy_carries_no_gradient():
    hidden, weight, _, targets, _ = inputs(bias=False)
    assert not chunked_logprobs(hidden, weight, None, targets, 1.0, 3)[1].requires_grad


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_entropy_carries_the_gradient_of_the_plain_computation_where_it_is_asked_to(temperature, chunk):
    hidden, weight, bias, targets, upstream = inputs()
    leaves = [hidden, weight, bias]
    expected_logprobs, expected_entropy = plain(hidden, weight, bias, targets, temperature)
    expected = torch.autograd.grad((expected_entropy * upstream + 0.3 * expected_logprobs).sum(), leaves)
    logprobs, entropy = chunked_logprobs(hidden, weight, bias, targets, temperature, chunk, entropy_gradient=True)
    gradients = torch.autograd.grad((entropy * upstream + 0.3 * logprobs).sum(), leaves)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-12)


def test_both_outputs_pass_a_numerical_check_of_their_gradients():
    hidden, weight, bias, targets, _ = inputs(tokens=4)
    assert torch.autograd.gradcheck(
        lambda *leaves: chunked_logprobs(*leaves, targets, 0.7, 3, entropy_gradient=True), (hidden, weight, bias)
    )


def test_a_token_without_any_probability_leaves_the_gradient_of_the_entropy_finite():
    hidden, weight, _, targets, _ = inputs(bias=False)
    bias = torch.zeros(11, dtype=torch.float64)
    bias[3] = -torch.inf
    _, entropy = chunked_logprobs(hidden, weight, bias, targets.clamp(max=2), 1.0, 4, entropy_gradient=True)
    entropy.sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_no_token_gives_zero_gradients_so_that_every_rank_can_take_part():
    hidden, weight, _, targets, _ = inputs(tokens=0, bias=False)
    logprobs, entropy = chunked_logprobs(hidden, weight, None, targets, 1.0, 4)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


def test_a_token_without_any_probability_leaves_the_entropy_finite():
    hidden, weight, _, targets, _ = inputs(bias=False)
    bias = torch.zeros(11, dtype=torch.float64)
    bias[3] = -torch.inf
    logprobs, entropy = chunked_logprobs(hidden, weight, bias, targets.clamp(max=2), 1.0, 4)
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()


def test_bfloat16_inputs_are_normalised_in_float32():
    hidden, weight, _, targets, _ = inputs(bias=False, dtype=torch.bfloat16)
    logprobs, _ = chunked_logprobs(hidden, weight, None, targets, 1.0, 3)
    logprobs.sum().backward()
    expected, _ = plain(hidden.float(), weight.float(), None, targets, 1.0)
    assert logprobs.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs, expected, rtol=0.02, atol=0.02)


def test_logits_never_exist_for_more_tokens_than_a_chunk(monkeypatch):
    sizes = []
    original = torch.nn.functional.linear

    def recording(hidden, weight, bias=None):
        sizes.append(hidden.shape[0])
        return original(hidden, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", recording)
    hidden, weight, _, targets, _ = inputs(bias=False)
    chunked_logprobs(hidden, weight, None, targets, 1.0, 3)[0].sum().backward()
    assert sizes == [1, 3, 3, 3, 1]  # forward over three chunks; backward recomputes all but the last, a full one


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 4), (1.0, 0)])
def test_a_temperature_or_chunk_that_is_not_positive_is_refused(temperature, chunk):
    hidden, weight, _, targets, _ = inputs()
    with pytest.raises(ValueError, match=r"must be|above 0"):
        chunked_logprobs(hidden, weight, None, targets, temperature, chunk)
