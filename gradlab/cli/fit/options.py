"""Options that the commands of `gradlab fit` share, how their texts are read, and how a command ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from gradlab.cli.console import OUT, print_json
from gradlab.cli.setting_texts import parse_settings, split_settings
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.ddp.optimizers import OptimizerSettings
    from gradlab.plan import Wrap
    from gradlab.trace import Trace

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")]
Target = Annotated[Path, typer.Option("--out", metavar="ARTIFACT", help="The file to write (.safetensors).")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Layers of this role only, such as linear or embedding; repeatable; by default the codec's own roles. "
        "`gradlab trace info` lists the layers with their roles.",
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the codec; repeatable. `gradlab methods CODEC` lists them with their ranges.",
    ),
]
Warmup = Annotated[int, typer.Option(help="Dense steps of training before the first compressed one.")]
Seed = Annotated[int, typer.Option(help="Of the random streams that ranks share.")]
Overwrite = Annotated[bool, typer.Option(help="Replace a file that is there.")]
TrainedWith = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME[:KEY=VALUE,...]",
        help="Of torch.optim, that training will use, such as AdamW or SGD:momentum=0.9; by default the recorded one.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_OF_SETTING = "@"  # begins the help of an option that is a codec's setting


def setting_help(codec: str, name: str, more: str = "") -> str:
    """The help of an option that is the setting `name` of a codec, for a command of class `CodecCommand`.

    more: what the option adds to the setting's own words.
    """
    return f"{_OF_SETTING}{codec}.{name} {more}"


class CodecCommand(TyperCommand):
    """A command some of whose options are settings of a codec: what these say of themselves is the options' help.

    It is looked up when help is asked for, as a codec takes longer to import than all else here.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            text = getattr(option, "help", None) or ""
            if text.startswith(_OF_SETTING):
                setattr(option, "help", _help_of(text))  # noqa: B010
        super().format_help(ctx, formatter)


def _help_of(reference: str) -> str:
    from gradlab import codecs
    from gradlab.codec.settings import fields_of

    path, _, more = reference.removeprefix(_OF_SETTING).partition(" ")
    codec, name = path.split(".")
    [field] = [field for field in fields_of(codecs.get(codec).Settings) if field.name == name]
    words = f"{field.about.unit} {field.about.help}".strip()
    words = words if words[1] == " " else f"{words[0].upper()}{words[1:]}"  # a symbol stays as it is
    return f"{words}. Allowed: {field.values.removesuffix(', or None')}. {more}".strip()


def print_fit(
    provenance: dict[str, Any], as_json: bool, show: Callable[[], None], *paths: Path | None, note: str | None = None
) -> None:
    """Print an artifact's metadata as JSON; or call `show` for its tables, then print the note and files written.

    The first path is the artifact's. Up to how many ranks its plan pays is said, where there is such a number.
    """
    from gradlab.artifact import Artifact
    from gradlab.plan import pays_up_to

    if as_json:
        print_json(provenance)
        return
    show()
    if paths[0] is not None and (limit := pays_up_to(Artifact.load(paths[0]).plan)):
        OUT.print(f"this plan {limit}", markup=False)
    if note:
        OUT.print(note, markup=False)
    for path in paths:
        if path is not None:
            OUT.print(str(path), markup=False)


def optimizer_of_training(trace: Trace, text: str | None) -> OptimizerSettings | None:
    """Find the optimizer that a plan is to train with: the one given, or the one that the recording names.

    Args:
        trace: the recording.
        text: NAME[:KEY=VALUE,...] of torch.optim, or None.

    Returns:
        The optimizer; None if neither says.

    Raises:
        GradlabError: for an unknown name or setting.
    """
    from gradlab.ddp.optimizers import OptimizerSettings, describe_optimizer

    if text is None:
        return OptimizerSettings.from_metadata(trace.metadata)
    import torch

    name, _, rest = text.partition(":")
    made = {kind.lower(): kind for kind in torch.optim.__all__ if kind not in ("Optimizer", "lr_scheduler")}
    if name.lower() not in made:
        raise GradlabError(f"--optimizer {name}: no optimizer of torch.optim, expected one such as AdamW or SGD")
    settings = parse_settings(split_settings(rest), f"--optimizer {name}:")
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    try:
        built = getattr(torch.optim, made[name.lower()])(
            [torch.zeros(1, 1, requires_grad=True)], **{"lr": 1e-3, **settings}
        )
    except (TypeError, ValueError) as error:
        raise GradlabError(f"--optimizer {text}: {str(error).splitlines()[0]}") from None
    return describe_optimizer(built)


def require_trainable(
    optimizer: OptimizerSettings | None, momentum: str | None, weight_decay: bool = False, remedy: str = ""
) -> str | None:
    """Refuse, before the work, a plan that training would refuse after it.

    Args:
        optimizer: that the plan is to train with; None if it is not known.
        momentum: the plan's wrapper that applies momentum, or None.
        weight_decay: whether the plan applies weight decay.
        remedy: the command's options that make another plan.

    Returns:
        What has to be set in the optimizer, as a sentence to print; None if nothing has.

    Raises:
        GradlabError: if the plan and the optimizer both apply momentum or weight decay, and the optimizer's cannot be
            set to 0.
    """
    from gradlab.plan.optimizer_rules import conflict_between

    conflict = None if optimizer is None else conflict_between(momentum, weight_decay, optimizer)
    if optimizer is None or conflict is None:
        return None
    if conflict.by_setting:
        return f"to train with it, {conflict.remedy}: {conflict.message}"
    options = f"{remedy}, or --optimizer SGD if training will use that"
    raise GradlabError(f"{conflict}; {options.removeprefix(', ')}")


def known_roles(roles: list[str] | None) -> tuple[str, ...] | None:
    """Check the names of roles; None stands for no option given.

    Raises:
        GradlabError: for an unknown role.
    """
    from gradlab.plan.coverage import known_roles as checked

    try:
        return checked(roles) if roles else None
    except GradlabError as error:
        raise GradlabError(f"--{error}") from None


def parse_wrapper(text: str) -> Wrap:
    """Read NAME[:KEY=VALUE,...] as a wrapper of a plan.

    Raises:
        GradlabError: for an unknown name or setting.
    """
    from gradlab import wrappers
    from gradlab.codec.settings import build_settings
    from gradlab.plan import Wrap

    name, _, rest = text.partition(":")
    texts = split_settings(rest)
    settings = parse_settings(texts, f"--wrap {name}")
    build_settings(wrappers.get(name), settings)
    return Wrap(name, settings)


def parse_layer_settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Read LAYER:NAME=VALUE texts as settings by layer name.

    Raises:
        GradlabError: for a text without ":" or "=".
    """
    by_layer: dict[str, dict[str, Any]] = {}
    for text in texts:
        layer, colon, setting = text.partition(":")
        if not colon:
            raise GradlabError(f"--layer-set {text}: expected LAYER:NAME=VALUE, such as stem.weight:on_loss=dense")
        by_layer.setdefault(layer, {}).update(parse_settings([setting], f"--layer-set {layer}:"))
    return by_layer
