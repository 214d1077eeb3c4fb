"""Words of the page that a newcomer may not know, each in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

GLOSSARY: Mapping[str, str] = {
    "adapter": "A small set of new weights that is trained while the model itself stays as it is.",
    "rank": "Directions that an adapter can change in each layer. More capture finer detail and make a larger file.",
    "checkpoint": "A saved state of the run, from which it can be continued exactly.",
    "held out": "Images that are not trained on; their loss shows whether the model learns or memorizes.",
    "validation": "The loss of the held-out images. It falls while the run learns and rises when it memorizes.",
    "guidance": "Strength with which a sample follows its prompt. Higher is more literal and less varied.",
    "gathered blocks": "Layers whose weights are unsharded at a moment, gathered from the shards of all GPUs.",
    "activations": "Intermediate results that are kept from the forward pass for the backward pass.",
    "offloaded blocks": "Layers kept in host memory and copied to the GPU shortly before they are used.",
    "optimizer": "The optimizer's own state, for example Adam's two running means for each trained weight.",
    "reserve": "Memory that CUDA, NCCL and the allocator take on top; an estimate.",
    "sharding": "Splitting of weights over the GPUs, so that a model larger than one of them fits.",
    "base": "The published model that the adapter is trained on top of.",
    "trigger": "A word that means nothing yet and will stand for the subject or style that is trained.",
    "bucket": "A shape, such as 832 x 1216, that images of similar proportions are scaled and cropped to.",
    "epoch": "One pass over the data: each image as often as its folder says, or each row of text.",
    "gradient norm": "Size of the gradient before clipping; spikes point to unstable training.",
    "quantized": "Stored in fewer bits, 4 or 8 instead of 16, so that it takes less memory.",
}
"""{word in lower case: sentence}"""
