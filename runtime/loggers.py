"""A run's numbers in the logger that a training has already: TensorBoard, W&B or Trackio.

None of these packages is imported here. A logger is known by its method: TensorBoard's writers have `add_scalar`, runs
of W&B and Trackio have `log`, which takes a dict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.runtime.exchange import Exchange


def log_scalars(logger: Any, state: Exchange | None, step: int, **values: float) -> None:
    """Log a step of a run: the state's `scalars()`, and other numbers such as the loss.

        log_scalars(writer, state, step, loss=loss.item())

    >>> from types import SimpleNamespace
    >>> from gradlab.runtime import log_scalars
    >>> writer = SimpleNamespace(add_scalar=lambda name, value, step: print(step, name, value))
    >>> log_scalars(writer, None, 7, loss=0.5)
    7 loss 0.5

    Call it on every rank, or on rank 0 alone: where there is no logger, nothing is done.

    Args:
        logger: TensorBoard's `SummaryWriter`; a run of W&B (what `wandb.init` returned) or of Trackio (`trackio.init`);
            anything else with `add_scalar(name, value, step)`, or with `log(numbers, step=step)`. None: this rank has
            none.
        state: result of `compress`, or any other `Exchange`; None: there are no numbers but those given.
        step: training step, from 0 or 1, ascending.
        values: more numbers, by name. Tensors must be read before.

    Raises:
        GradlabError: if the logger has neither method.
    """
    if logger is None:
        return
    numbers = ({} if state is None else state.scalars()) | values
    if callable(getattr(logger, "add_scalar", None)):
        for name, value in numbers.items():
            logger.add_scalar(name, value, step)
    elif callable(getattr(logger, "log", None)):
        logger.log(numbers, step=step)
    else:
        raise GradlabError(
            f"log_scalars: logger is a {type(logger).__name__}, expected TensorBoard's SummaryWriter, or a run of W&B "
            "or Trackio"
        )
