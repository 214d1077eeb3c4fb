"""Preference training (DPO): the loss of pairs of a chosen and a rejected answer or image.

DPO raises the probability of the chosen one of a pair above that of the rejected one, both measured against a
reference: the model itself with its adapter switched off, in the same step and on the same inputs. Source: Direct
Preference Optimization (arXiv 2305.18290), eq. 7. See DECISIONS 162.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import adapters
from trainer.config.schema import RunConfig
from trainer.config.sections import NoAdapter
from trainer.models.base import ImageFamily, ModelFamily, MultimodalFamily, TextFamily
from trainer.models.build import BuiltModel
from trainer.models.objectives.base import Batch, Example, Items, Loss, Objective
from trainer.rng import SampleRng
from trainer.system.errors import InputError


class _Preferences(Objective):
    """The loss of pairs.

    Attributes:
        metrics: `margins`, mean reward margin (the logit of the DPO loss), and `accuracies`, the share of pairs with a
            positive margin.
        beta: `objective.dpo_beta`.
    """

    beta: float

    fields = frozenset({"dpo_beta"})
    metrics = ("margins", "accuracies")

    def __init__(self, cfg: RunConfig) -> None:
        super().__init__(cfg)
        assert cfg.objective.dpo_beta is not None
        self.beta = cfg.objective.dpo_beta

    @classmethod
    def is_wanted(cls, cfg: RunConfig) -> bool:
        return cfg.objective.compares_pairs

    def warnings(self, cfg: RunConfig) -> tuple[str, ...]:
        if isinstance(cfg.adapter, NoAdapter) or cfg.adapter.start is None:
            return ()
        return (
            f"objective.dpo_beta: the adapter goes on from {cfg.adapter.start}, but is compared with the model without "
            "any adapter; to compare with what that adapter learned, merge it first and train the merged model",
        )

    def check(self, built: BuiltModel) -> None:
        own = [name for name in built.trainables if name not in built.adapter.parameters]
        if own:
            raise InputError(
                f"objective.dpo_beta: {own[0]} is trained itself, so that the model without its adapter is not the one "
                "that training began with; train only an adapter, or leave objective.dpo_beta out"
            )


class TextPreferences(_Preferences):
    """Pairs of answers: documents 2n and 2n + 1 of a row are the chosen and the rejected answer of one pair."""

    @classmethod
    def suits(cls, family: type[ModelFamily]) -> bool:
        return issubclass(family, TextFamily)

    def loss(self, family: ModelFamily, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        assert isinstance(family, TextFamily)
        answers = Answers(batch)
        references: list[Tensor] = []
        found: list[Loss] = []

        def note(losses: Tensor) -> Tensor:
            references.append(answers.scores(losses))
            return torch.zeros_like(losses)

        def compare(losses: Tensor) -> Tensor:
            """Compute the loss of the pairs, and return its derivative by the loss of each token."""
            with torch.enable_grad():
                scores = answers.scores(losses).requires_grad_()
                found.append(pair_loss(self.beta * answers.differences(scores - references[0]), answers.weight))
                (gradient,) = torch.autograd.grad(found[0].total, scores)
            return answers.of_tokens(-gradient)

        with adapters.switched_off(model), torch.no_grad():
            family.weighted_loss(model, batch, note)
        slope = family.weighted_loss(model, batch, compare)
        # Weighted by its own derivative, the sum of the tokens' losses has the gradient of the loss, but not its value.
        total = found[0].total.detach() + slope - slope.detach()
        return Loss(total, found[0].weight, metrics=found[0].metrics, tokens=answers.num_tokens)


class ImagePreferences(_Preferences):
    """Pairs of images, from examples whose "rejected" are the latents of the image that is not preferred.

    Of both images of a pair the error of the predicted velocity (or noise) is compared with the reference's, at the
    same timestep and noise. Source: Diffusion-DPO (arXiv 2311.12908), eq. 14, whose factor T is part of beta; for
    flow matching arXiv 2501.13918, with a constant beta. The squared norm is the mean over the latent's numbers, as
    in the published code, so that beta does not depend on the image's size.
    """

    images_per_example = 2

    @classmethod
    def suits(cls, family: type[ModelFamily]) -> bool:
        return issubclass(family, ImageFamily) and not issubclass(family, MultimodalFamily)

    def items(self, examples: Sequence[Example], weights: Sequence[float], rng: SampleRng) -> Items:
        """Chosen images, then rejected ones; those of a pair draw equal random numbers, as they share an index."""
        chosen = [{key: tensor for key, tensor in example.items() if key != "rejected"} for example in examples]
        rejected = [own | {"latents": example["rejected"]} for own, example in zip(chosen, examples, strict=True)]
        return [*chosen, *rejected], [*weights, *weights], SampleRng(rng.seed, (*rng.indices, *rng.indices), rng.device)

    def loss(self, family: ModelFamily, model: nn.ModuleDict, batch: Batch, rng: SampleRng) -> Loss:
        with adapters.switched_off(model), torch.no_grad():
            reference = _errors(family.loss(model, batch, rng))
        chosen, rejected = (_errors(family.loss(model, batch, rng)) - reference).chunk(2)
        return pair_loss(-self.beta / 2 * (chosen - rejected), batch["weight"].chunk(2)[0])


def pair_loss(margins: Tensor, weight: Tensor) -> Loss:
    """Sum of -log sigmoid(margin) over the pairs, with `_Preferences.metrics`.

    Args:
        margins: Any shape, one number per pair.
        weight: The same shape, 0 for padding.
    """
    count = weight.sum()
    found = margins.detach()
    metrics = torch.stack([(found * weight).sum(), count, ((found > 0) * weight).sum(), count]).view(2, 2)
    return Loss(-(F.logsigmoid(margins) * weight).sum(), count, metrics=metrics)


class Answers:
    """Which answer each predicted token of a batch belongs to.

    Attributes:
        weight: (B, ceil(L / 2)) weight of the pairs of each row, 0 where it has no more.
        num_tokens: Number of tokens in the loss.
    """

    def __init__(self, batch: Batch) -> None:
        documents, following = batch["documents"], batch["predicted"] + 1
        self._shape = documents.shape
        length = documents.shape[1]
        self._places = following // length * length + documents.flatten()[following].clamp(min=0)
        self._loss_mask = batch["loss_mask"].flatten()[following]
        num_pairs = (documents.amax(dim=1, keepdim=True) + 1) // 2
        is_pair = torch.arange((length + 1) // 2, device=documents.device) < num_pairs
        self.weight = is_pair * batch["weight"][:, None]
        self.num_tokens = (batch["loss_mask"] * batch["weight"][:, None]).sum()

    def scores(self, losses: Tensor) -> Tensor:
        """The log-probability of each answer, (B, L), 0 where a row has no more. losses: (n,) of the tokens."""
        empty = losses.new_zeros(self._shape.numel())
        return empty.index_add(0, self._places, -losses * self._loss_mask).view(self._shape)

    def of_tokens(self, values: Tensor) -> Tensor:
        """The value of each token's answer, 0 where it is not in the loss, (n,). values: (B, L)."""
        return values.flatten()[self._places] * self._loss_mask

    def differences(self, values: Tensor) -> Tensor:
        """Chosen minus rejected of each pair, (B, ceil(L / 2)). values: (B, L) of the answers."""
        padded = F.pad(values, (0, 1))
        return padded[:, :-1:2] - padded[:, 1::2]


def _errors(loss: Loss) -> Tensor:
    assert loss.errors is not None, "the family's loss has no errors of its items"
    return loss.errors
