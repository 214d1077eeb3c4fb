"""The loss of a language model without the logits of all its tokens at once.

A vocabulary of 152,000 makes the logits of 2,048 tokens and their gradients larger than all else that a LoRA keeps for
backward. Here the network runs once up to its last hidden states; its own head then computes the logits of a few
predicted tokens at a time, and their gradients are taken at once, in forward. A recompute in backward, as
`torch.utils.checkpoint` does it, would see other weights: those of bf16 compute exist in forward only (see
`trainer.parallel.parallelize`). See DECISIONS 161.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.adapters.dropout import SampleDropout

CHUNK = 512
"""Tokens at a time: enough for a fast product with the head. Their logits take 0.15 GB in bf16 at a vocabulary of
152,000. The plan has a size at which the second chunk begins (`TEXT_SIDES` in trainer/plan/simulate/tables.py)."""
ROWS = 96
"""Tokens at a time whose logits are there in fp32, several times over."""

ROUTERS = "output_router_logits"
"""As transformers calls the argument that asks for the logits of the routers of experts."""
Weigh = Callable[[Tensor], Tensor]
"""Losses of tokens, (n,) -> the weight of each, (n,)."""
Head = Callable[[Tensor], Tensor]
"""Hidden states, (n, width) -> logits, (n, vocabulary)."""


def sum_losses_in_chunks(model: nn.Module, tokens: int = CHUNK) -> None:
    """Let a causal model of transformers also return the sum of its tokens' losses, in chunks where it can.

    `forward` then takes three more arguments: `predicted` (n,), which of the B * L tokens are followed by one that is
    predicted; `targets` (n,), the tokens that follow; `token_weights` (n,), the weight of the loss of each, or a
    function that returns them for these losses, (n,) without gradient. With them it returns the weighted sum of the
    losses, a scalar, and the logits of the routers of experts, if they are requested.

    Args:
        model: The model, changed in place.
        tokens: Number of tokens at a time.
    """
    model.forward = _WithLoss(model, tokens)


def can_split(model: Any) -> bool:
    """Whether the model's `forward` calls its decoder, then its head, which may get any number of tokens."""
    forward = type(model).forward
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except OSError:
        return False
    calls_decoder = f"self.{model.base_model_prefix}(" in source and model.base_model is not model
    return calls_decoder and "logits_to_keep" in inspect.signature(forward).parameters


class _WithLoss:
    """`forward` of a model."""

    def __init__(self, model: Any, tokens: int) -> None:
        self._model, self._tokens = model, tokens
        self._forward, self._splits = model.forward, can_split(model)

    def __call__(
        self,
        *args: Any,
        predicted: Tensor | None = None,
        targets: Tensor | None = None,
        token_weights: Tensor | Weigh | None = None,
        **kwargs: Any,
    ) -> Any:
        if predicted is None or targets is None or token_weights is None:
            return self._forward(*args, **kwargs)
        if not self._splits:
            output = self._forward(*args, **kwargs)
            return _whole_sum(output.logits, predicted, targets, token_weights), output.get("router_logits") or ()
        # A model that itself is asked for its routers' logits computes a loss of its own from them and the mask.
        asked = {ROUTERS: kwargs.pop(ROUTERS)} if ROUTERS in kwargs else {}
        kwargs |= dict.fromkeys(asked, False)
        with _decoder(self._model, asked) as decoder:
            if any(isinstance(module, SampleDropout) and module.p > 0 for module in _head_modules(self._model)):
                logits = self._forward(*args, **kwargs).logits
                total = _whole_sum(logits, predicted, targets, token_weights)
                return total, decoder.output.get("router_logits") or ()
            self._forward(*args, **kwargs, logits_to_keep=1)
            routers = decoder.output.get("router_logits") or ()
            hidden: Tensor = decoder.output.last_hidden_state

            def head(states: Tensor) -> Tensor:
                decoder.states = states[None]
                logits: Tensor = self._forward(*args, **kwargs).logits[0]
                return logits

            states = hidden.flatten(0, 1).index_select(0, predicted)
            if not isinstance(token_weights, Tensor):
                with torch.no_grad():
                    found = torch.cat([losses for _, losses in _losses(head, states, targets, self._tokens)])
                token_weights = token_weights(found)
                if not torch.is_grad_enabled():
                    return (found * token_weights).sum(), routers
            if not torch.is_grad_enabled():
                parts = _losses(head, states, targets, self._tokens)
                total = torch.stack([(losses * token_weights[part]).sum() for part, losses in parts]).sum()
                return total, routers
            # The trained parameters outside of the decoder, those that the two share included.
            held = (parameter for module in _head_modules(self._model) for parameter in module._parameters.values())
            trained = list({id(p): p for p in held if p is not None and p.requires_grad}.values())
            total = _Sum.apply(head, states, targets, token_weights, self._tokens, *trained)  # type: ignore[no-untyped-call]
            return total, routers


class _Sum(torch.autograd.Function):
    """The sum of weighted losses, whose gradients are taken in forward."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, states: Tensor, targets: Tensor, weights: Tensor, rows: int, *parameters: Tensor
    ) -> Tensor:
        total = torch.zeros((), device=states.device)
        by_state = torch.empty_like(states)
        by_parameter: list[Tensor | None] = [None] * len(parameters)
        for part in _parts(len(states), rows):
            with torch.enable_grad():
                piece = states[part].detach().requires_grad_()
                logits = head(piece)
            losses, by_logits = _losses_and_gradient(logits.detach(), targets[part], weights[part])
            total += (losses * weights[part]).sum()
            found = torch.autograd.grad(logits, [piece, *parameters], by_logits, allow_unused=True)
            by_state[part] = found[0]
            del logits, by_logits, piece
            by_parameter = [_added(sum_, new) for sum_, new in zip(by_parameter, found[1:], strict=True)]
        ctx.save_for_backward(by_state, *by_parameter)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_state, *by_parameter = ctx.saved_tensors
        # In place: the gradient of a head may take gigabytes.
        scaled = [None if found is None else found.mul_(gradient) for found in (by_state, *by_parameter)]
        return None, scaled[0], None, None, None, *scaled[1:]


def _whole_sum(logits: Tensor, predicted: Tensor, targets: Tensor, token_weights: Tensor | Weigh) -> Tensor:
    """The weighted sum of the losses from the logits of all tokens, (B, L, vocabulary)."""
    losses = F.cross_entropy(logits.flatten(0, 1).index_select(0, predicted).float(), targets, reduction="none")
    weights = token_weights if isinstance(token_weights, Tensor) else token_weights(losses.detach())
    return (losses * weights).sum()


def _losses(head: Head, states: Tensor, targets: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield each part of the states, with its losses, which have no gradients."""
    for part in _parts(len(states), rows):
        logits, losses = head(states[part]), []
        for few in _parts(len(logits), ROWS):
            losses.append(F.cross_entropy(logits[few].float(), targets[part][few], reduction="none"))
        yield part, torch.cat(losses)


def _losses_and_gradient(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, (n,), and the gradient of their weighted sum by the logits, in their type."""
    losses, gradient = [], torch.empty_like(logits)
    for few in _parts(len(logits), ROWS):
        with torch.enable_grad():
            exact = logits[few].float().requires_grad_()
            loss = F.cross_entropy(exact, targets[few], reduction="none")
        (by_exact,) = torch.autograd.grad(loss, exact, weights[few].to(loss))
        gradient[few] = by_exact
        losses.append(loss.detach())
    return torch.cat(losses), gradient


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, begin + size) for begin in range(0, count, size))


def _added(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    if total is None or new is None:
        return new if total is None else total
    return total.add_(new)


class _Decoder:
    """The output of a model's decoder, and the states that it pretends to return from then on."""

    def __init__(self) -> None:
        self.output: Any = None
        self.states: Tensor | None = None


@contextmanager
def _decoder(model: Any, asked: Mapping[str, bool]) -> Iterator[_Decoder]:
    """Inside: the model's decoder runs the first time it is called, and then returns the states that are set.

    asked: Further arguments, for the decoder alone.
    """
    module = model.base_model
    seen, forward = _Decoder(), module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if seen.output is None:
            seen.output = forward(*args, **{**kwargs, **asked})
            return seen.output
        return type(seen.output)(**{**seen.output, "last_hidden_state": seen.states})

    own = vars(module).get("forward")
    module.forward = run
    try:
        yield seen
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _head_modules(model: Any) -> list[nn.Module]:
    inside = {id(module) for module in model.base_model.modules()}
    return [module for module in model.modules() if id(module) not in inside]
