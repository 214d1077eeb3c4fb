import math

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_snr

from trainer.config.sections import ObjectiveConfig
from trainer.models.objectives.base import squared_error, total_loss
from trainer.models.objectives.diffusion import diffuse, diffusion_target, draw_timestep, min_snr_weight
from trainer.models.objectives.flow_matching import (
    Shift,
    ShiftLine,
    add_noise,
    draw_sigma,
    empirical_mu,
    shift_factor,
    shift_sigma,
    sigma_at,
    velocity,
)
from trainer.rng import SampleRng

DENSITIES = ["logit_normal", "uniform", "mode", "cosmap"]
QUANTILES = torch.linspace(0, 1, 1002)[1:-1]


def test_logit_normal_quantiles_are_those_of_the_normal_through_a_sigmoid():
    sigma = sigma_at(ObjectiveConfig(logit_mean=0.5, logit_std=2.0), torch.tensor([0.15865525, 0.5, 0.84134475]))
    torch.testing.assert_close(sigma, torch.sigmoid(torch.tensor([0.5 - 2, 0.5, 0.5 + 2])), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("mean", "noise"), [(0.5, 0.602), (0.0, 0.5), (-0.5, 0.398)])
def test_a_logit_mean_above_0_means_more_noise_and_the_opposite_in_diffusers_scripts(mean, noise):
    """Mean of a logit-normal number with standard deviation 1, by numerical integration."""
    normal = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
    density = torch.exp(-normal.square() / 2) / math.sqrt(2 * math.pi)
    expected = float(torch.trapezoid(torch.sigmoid(mean + normal) * density, normal))
    quantiles = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    sigma = sigma_at(ObjectiveConfig(logit_mean=mean), quantiles)
    assert float(sigma.mean()) == pytest.approx(expected, abs=1e-4)
    assert float(sigma.mean()) == pytest.approx(noise, abs=1e-3)
    # As in the scripts: u picks one of 1000 sigmas, which run from noise to data.
    u = compute_density_for_timestep_sampling(
        "logit_normal", 100_000, logit_mean=mean, logit_std=1.0, generator=torch.Generator().manual_seed(0)
    )
    sigmas = FlowMatchEulerDiscreteScheduler(1000).sigmas
    assert float(sigmas[(u * 1000).long()].mean()) == pytest.approx(1 - noise, abs=5e-3)


def test_uniform_density_is_the_drawn_number_itself():
    assert sigma_at(ObjectiveConfig(density="uniform"), QUANTILES).equal(QUANTILES)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1.29, 1.75])
def test_mode_density_equals_that_of_diffusers(scale):
    drawn = torch.rand(500, generator=torch.Generator().manual_seed(0))
    expected = compute_density_for_timestep_sampling(
        "mode", 500, mode_scale=scale, generator=torch.Generator().manual_seed(0)
    )
    ours = sigma_at(ObjectiveConfig(density="mode", mode_scale=scale), drawn)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_cosmap_density_has_the_log_signal_to_noise_ratio_of_the_cosine_schedule():
    quantile = QUANTILES.double()
    sigma = sigma_at(ObjectiveConfig(density="cosmap"), quantile)
    cosine = 2 * torch.log(torch.cos(math.pi / 2 * quantile) / torch.sin(math.pi / 2 * quantile))
    torch.testing.assert_close(2 * torch.log((1 - sigma) / sigma), cosine, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("density", DENSITIES)
def test_timesteps_stay_within_0_and_1_up_to_the_last_number_that_can_be_drawn(density):
    quantile = torch.tensor([0.0, 2**-24, 0.5, 1 - 2**-24])
    sigma = shift_sigma(sigma_at(ObjectiveConfig(density=density), quantile), 7.5)
    assert sigma.isfinite().all() and sigma.min() >= 0 and sigma.max() <= 1


@pytest.mark.parametrize(("tokens", "factor"), [(1024, 1.88), (2304, 2.33), (4096, 3.16), (9216, 7.51)])
def test_linear_shift_of_512_768_1024_and_1536_pixels_is_the_measured_one(tokens, factor):
    assert round(shift_factor(ObjectiveConfig(shift="linear"), Shift(), tokens), 2) == factor


@pytest.mark.parametrize(("tokens", "factor"), [(1024, 5.48), (2304, 6.27), (4096, 7.56), (9216, 7.51)])
def test_empirical_shift_of_512_768_1024_and_1536_pixels_is_the_measured_one(tokens, factor):
    assert round(shift_factor(ObjectiveConfig(shift="empirical"), Shift(), tokens), 2) == factor


@pytest.mark.parametrize("line", [ShiftLine(), ShiftLine(few=100, many=8192, low=0.25, high=0.9)])
def test_a_shift_line_runs_through_its_two_points(line):
    assert line.mu(line.few) == line.low
    assert line.mu(line.many) == pytest.approx(line.high, abs=1e-12)


def test_linear_shift_follows_the_familys_line():
    family = Shift(ShiftLine(many=8192, high=0.9))
    assert shift_factor(ObjectiveConfig(shift="linear"), family, 8192) == pytest.approx(math.exp(0.9))


def test_auto_is_the_familys_constant_and_without_one_its_line():
    assert shift_factor(ObjectiveConfig(), Shift(constant=6.93), 4096) == 6.93
    assert shift_factor(ObjectiveConfig(shift="linear"), Shift(constant=6.93), 4096) == pytest.approx(math.exp(1.15))
    assert shift_factor(ObjectiveConfig(), Shift(), 4096) == pytest.approx(math.exp(1.15))


def test_empirical_mu_of_more_than_4300_tokens_ignores_the_number_of_steps():
    assert empirical_mu(4301, 4) == empirical_mu(4301, 200)
    assert empirical_mu(4300, 4) > empirical_mu(4300, 200)


def test_constant_shift_is_the_configured_factor_and_none_is_1():
    family = Shift(constant=6.93)
    assert shift_factor(ObjectiveConfig(shift="constant", shift_factor=2.5), family, 4096) == 2.5
    assert shift_factor(ObjectiveConfig(shift="none"), family, 4096) == 1.0


def test_shift_by_3_moves_one_half_to_three_quarters_and_leaves_the_ends():
    assert shift_sigma(torch.tensor([0.0, 0.5, 1.0]), 3.0).tolist() == [0.0, 0.75, 1.0]


def test_a_timestep_depends_on_the_sample_index_and_not_on_the_batch_it_is_drawn_in():
    cfg = ObjectiveConfig(shift="linear")
    together = draw_sigma(cfg, Shift(), 1024, SampleRng(7, [10, 11, 12]))
    alone = torch.cat([draw_sigma(cfg, Shift(), 1024, SampleRng(7, [index])) for index in (10, 11, 12)])
    assert together.equal(alone)
    assert together.dtype == torch.float32
    assert len(set(together.tolist())) == 3


def test_drawn_timesteps_follow_the_shifted_density():
    sigma = draw_sigma(ObjectiveConfig(shift="linear"), Shift(), 4096, SampleRng(0, range(4000)))
    assert sigma.median().item() == pytest.approx(math.exp(1.15) / (1 + math.exp(1.15)), abs=0.02)


def test_one_euler_step_along_the_exact_velocity_recovers_the_data():
    latents, noise = torch.randn(2, 5, 4, 3, 3, generator=torch.Generator().manual_seed(0)).unbind()
    sigma = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])
    step = sigma.view(5, 1, 1, 1) * velocity(latents, noise)
    torch.testing.assert_close(add_noise(latents, noise, sigma) - step, latents, atol=1e-6, rtol=0)


def test_sigma_0_is_data_and_sigma_1_is_noise():
    latents, noise = torch.full((2, 1, 2, 2), 3.0), torch.full((2, 1, 2, 2), 5.0)
    noisy = add_noise(latents, noise, torch.tensor([0.0, 1.0]))
    assert noisy.flatten(1).tolist() == [[3.0] * 4, [5.0] * 4]


def test_squared_error_averages_within_an_item():
    prediction = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert squared_error(prediction, torch.zeros(2, 2)).tolist() == [5.0, 4.0]


def test_loss_sums_errors_by_weight_and_counts_every_item_but_padding():
    loss = total_loss(torch.tensor([5.0, 4.0, 81.0]), torch.tensor([1.0, 0.5, 0.0]))
    assert loss.total.item() == 1.0 * 5.0 + 0.5 * 4.0
    assert loss.weight.item() == 2


@pytest.mark.parametrize("shape", [(2, 3, 2, 4), (2, 3, 1, 2, 4)], ids=["image", "film"])
def test_a_mask_weights_the_errors_of_its_pixels_whatever_dims_stand_before_them(shape):
    prediction = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(1))
    expected = [(prediction[i].square() * mask[i]).mean().item() for i in range(2)]
    assert squared_error(prediction, torch.zeros(shape), mask).tolist() == pytest.approx(expected)


def test_squared_error_of_bf16_predictions_is_computed_in_fp32():
    prediction = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    errors = squared_error(prediction, torch.full((1, 4096), 1e-3))
    assert errors.dtype == torch.float32
    assert errors.item() == pytest.approx(0.999**2, abs=1e-6)


# Discrete diffusion


@pytest.mark.parametrize("count", [1, 3, 513, 1000, 4096])
def test_integer_timesteps_are_uniform_over_all_there_are(count):
    drawn = draw_timestep(count, SampleRng(0, range(2000)))
    assert drawn.dtype == torch.int64
    assert drawn.min() >= 0 and drawn.max() < count
    assert drawn.float().mean() == pytest.approx((count - 1) / 2, abs=0.03 * count)


def test_the_largest_number_that_can_be_drawn_is_the_last_timestep():
    counts = torch.arange(1, 5000)
    assert ((1 - 2**-24) * counts.float()).long().equal(counts - 1)


@pytest.mark.parametrize("zero_snr", [False, True])
def test_diffused_latents_and_targets_equal_those_of_diffusers_scheduler(zero_snr):
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", rescale_betas_zero_snr=zero_snr)
    latents, noise = torch.randn(2, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([0, 100, 500, 999])
    alpha_bar = scheduler.alphas_cumprod[timesteps]
    expected = scheduler.add_noise(latents, noise, timesteps)
    torch.testing.assert_close(diffuse(latents, noise, alpha_bar), expected, atol=1e-6, rtol=0)
    velocities = scheduler.get_velocity(latents, noise, timesteps)
    ours = diffusion_target("v_prediction", latents, noise, alpha_bar)
    torch.testing.assert_close(ours, velocities, atol=1e-6, rtol=0)
    assert diffusion_target("epsilon", latents, noise, alpha_bar) is noise


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_weights_are_those_of_diffusers_signal_to_noise_ratio(gamma):
    scheduler = DDPMScheduler(beta_schedule="scaled_linear")
    timesteps = torch.arange(1000)
    snr = compute_snr(scheduler, timesteps)
    for prediction, scale in (("epsilon", snr), ("v_prediction", snr + 1)):
        weight = min_snr_weight(prediction, scheduler.alphas_cumprod, gamma)
        torch.testing.assert_close(weight, snr.clamp(max=gamma) / scale, atol=1e-6, rtol=1e-4)


def test_min_snr_weight_without_any_signal_is_1_for_noise_and_0_for_velocity():
    nothing = torch.zeros(1)
    assert min_snr_weight("epsilon", nothing, 5.0).item() == 1.0
    assert min_snr_weight("v_prediction", nothing, 5.0).item() == 0.0
