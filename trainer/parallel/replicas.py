"""Two faults that must never be silent: a gradient that is not reduced, and replicas that diverge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from trainer.distributed.world import World
from trainer.parallel.load import tensor_digest
from trainer.parallel.mesh import REPLICATE


def check_reduced(trainables: Mapping[str, nn.Parameter], optimized: Iterable[nn.Parameter], world: World) -> None:
    """Raise RuntimeError if, on several ranks, an optimized parameter is neither sharded nor reduced by FSDP.

    Every rank would train such a parameter by itself, and the copy of rank 0 would be saved.
    """
    if world.size == 1:
        return
    names = {id(parameter): name for name, parameter in trainables.items()}
    for parameter in optimized:
        name = names.get(id(parameter))
        if name is None:
            raise RuntimeError("the optimizer holds a parameter that the model does not train; make it after sharding")
        if not isinstance(parameter, DTensor):
            raise RuntimeError(  # noqa: TRY004 - not a wrong type of the caller, but a model that must not be trained
                f"{name} is neither sharded nor reduced across the {world.size} ranks; "
                "inject it into a block before the block is sharded"
            )


def diverged(trainables: Mapping[str, nn.Parameter], world: World) -> str | None:
    """Find the first parameter whose copies differ between ranks; None if all are equal. Collective."""
    replicated = {name: p for name, p in trainables.items() if isinstance(p, DTensor) and _is_replicated(p)}
    if not replicated:
        return None
    digests = {name: tensor_digest(p.to_local()) for name, p in replicated.items()}
    shard = next(iter(replicated.values())).device_mesh.get_local_rank(-1)
    everyone = world.gather((shard, digests))
    copies = [other for other_shard, other in everyone if other_shard == shard]
    differing = [name for name in digests if any(copy[name] != digests[name] for copy in copies)]
    found: list[str | None] = world.gather(differing[0] if differing else None)
    return next((name for name in found if name is not None), None)


def _is_replicated(parameter: DTensor) -> bool:
    mesh = parameter.device_mesh
    return REPLICATE in (mesh.mesh_dim_names or ()) and mesh[REPLICATE].size() > 1
