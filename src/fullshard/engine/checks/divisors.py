"""A warning for units that divide gradients by fewer ranks than see different data."""

import warnings
from collections.abc import Sequence

from fullshard.engine.unit import Unit


def warn_of_divisors(units: Sequence[Unit]) -> None:
    """Warn of a unit whose mesh is smaller than that of others, if nobody said by what to divide.

    With expert parallel, an expert's gradient is a sum over the tokens of all data-parallel ranks, but its
    unit knows of its own mesh only:

        4 ranks, 2 of them share an expert    dense layers: sum / 4    the expert: sum / 2, twice as large
    """
    num_ranks = max((unit.mesh.plan.data_parallel_size for unit in units), default=1)
    found = [unit for unit in units if _divides_by_fewer(unit, num_ranks)]
    if found:
        more = f" and {len(found) - 1} more units" if len(found) > 1 else ""
        own = found[0].mesh.plan.data_parallel_size
        warnings.warn(
            f"{found[0].label}{more}: gradients are divided by {own}, the ranks that the unit is sharded over, "
            f"while other units of the model divide by {num_ranks}. If its tokens come from all of these ranks, as "
            f"with expert parallel, its gradients are {num_ranks / own:g} times too large: call "
            f"set_gradient_divide_factor({num_ranks}) on its module. If not, set_gradient_divide_factor({own}) "
            "says so.",
            stacklevel=2,
        )


def _divides_by_fewer(unit: Unit, num_ranks: int) -> bool:
    config = unit.config
    is_said = config.gradient_divide_factor is not None or config.comm_hook is not None
    is_trained = any(param.requires_grad for param in unit.params)
    return is_trained and not is_said and unit.mesh.plan.data_parallel_size < num_ranks
