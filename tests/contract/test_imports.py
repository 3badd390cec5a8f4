"""Who may import whom, and what nobody may do: read from the installed files, and seen in a fresh interpreter."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.prose import nodes_of
from support.warm_python import torch_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SIDES = ("capture", "analysis", "runtime", "datasets")
# They stand on all of the sides: the commands, and the reference training program.
TOP = ("cli", "training")
# Each is imported by the modules of its name alone, which the user imports by choice.
EXTRAS = {"lightning", "accelerate", "transformers"}
HEAVY = {"h5py", "scipy", "sklearn", "matplotlib", "typer", "rich", "jinja2"}


@functools.cache
def declared() -> dict[str, Path]:
    """Packages that pyproject.toml installs, with the folder each comes from."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders: dict[str, str] = tools["package-dir"]

    def folder(package: str) -> Path:
        if package in folders:
            return ROOT / folders[package]
        parent, _, last = package.rpartition(".")
        return folder(parent) / last

    return {package: folder(package) for package in tools["packages"]}


def modules(package: str) -> dict[str, Path]:
    """Modules of an installed package by name, without those of packages inside it."""
    (place,) = importlib.import_module(package).__path__
    files = {path.stem: path for path in Path(place).glob("*.py")}
    return {package if stem == "__init__" else f"{package}.{stem}": path for stem, path in files.items()}


@functools.cache
def everything() -> dict[str, Path]:
    """Every installed module."""
    return {name: path for package in declared() for name, path in modules(package).items()}


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The imports and calls in a file's syntax tree."""
    every = nodes_of(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in every if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


@functools.cache
def imported(module: str, path: Path) -> frozenset[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else ""
            source = base or str(node.module)
            names |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return frozenset(names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def importers(package: str) -> set[str]:
    """Installed modules that import a package or anything in it."""
    return {
        module for module, path in everything().items() if any(within(name, package) for name in imported(module, path))
    }


def floor(module: str) -> str:
    """Which part of the house a module stands in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in (*SIDES, *TOP) else "ground"


# --- the rules ------------------------------------------------------------------------------------------------------


def test_a_side_package_is_imported_by_itself_and_the_top_alone() -> None:
    """The front door names what lies in the rooms; it imports a name when it is asked for."""
    for side in SIDES:
        others = {module for module in importers(f"gradlab.{side}") if floor(module) not in (side, *TOP)}
        assert others <= {"gradlab"}, side


def test_the_ground_floor_stands_by_itself() -> None:
    """Only the commands import commands, of which `python -m gradlab` is the door, and the training program."""
    doors = {"gradlab.__main__", "gradlab.start"}
    assert {module for module in importers("gradlab.cli") if floor(module) != "cli"} <= doors
    assert {floor(module) for module in importers("gradlab.training") - {"gradlab"}} == {*TOP}


def test_nobody_imports_the_side_folders_by_their_bare_names() -> None:
    """`import datasets` would find another project's package, or the source folder."""
    for side in (*SIDES, *TOP, "tests", "support", "jobs", "campaigns"):
        assert importers(side) == set()


def test_only_the_trace_and_its_recorder_know_hdf5() -> None:
    outside = {module for module in importers("h5py") if floor(module) != "capture"}
    assert outside
    assert all(module.startswith("gradlab.trace") for module in outside)


def test_only_the_artifact_knows_safetensors() -> None:
    assert importers("safetensors") == {"gradlab.artifact"}


def test_the_ground_floor_and_the_runtime_need_torch_and_numpy_only() -> None:
    """Beside the two format files; none of the heavy libraries, not even inside a function."""
    for library in HEAVY - {"h5py"}:
        assert {module for module in importers(library) if floor(module) in ("ground", "runtime")} == set()
    assert {module for module in importers("h5py") if floor(module) == "runtime"} == set()
    for library in EXTRAS:
        assert importers(library) == {f"gradlab.{side}.{library}" for side in ("runtime", "capture")}


def test_nothing_is_evaluated_or_unpickled() -> None:
    """No pickle and its relatives, no eval, exec or compile, no torch.load of objects."""
    for library in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"):
        assert importers(library) == set()
    for module, path in everything().items():
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else None
            assert name not in ("eval", "exec", "compile", "__import__"), f"{module}:{node.lineno} calls {name}"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                assert (keyword.arg, value) not in (("weights_only", False), ("allow_pickle", True)), (
                    f"{module}:{node.lineno}"
                )


# They hold modules that stand by themselves, and their `__init__` gathers what rooms offer.
FRONTS = {"gradlab", *(f"gradlab.{side}" for side in (*SIDES, "cli"))}


def room(module: str) -> str:
    """The package a module stands in; a module directly in one of the fronts is a room of its own."""
    package = module if module in declared() else module.rpartition(".")[0]
    return module if package in FRONTS else package


def rooms_imported() -> dict[str, set[str]]:
    """Which rooms import which, anywhere in their files."""
    graph: dict[str, set[str]] = {room(module): set() for module in everything() if module not in FRONTS}
    for module in {*everything()} - FRONTS:
        known = {name for name in imported(module, everything()[module]) if name in everything()} - FRONTS
        graph[room(module)] |= {room(name) for name in known} - {room(module)}
    return graph


def test_packages_have_no_circles() -> None:
    graph = rooms_imported()
    assert len(graph) > 30
    while free := {name for name, others in graph.items() if not others & set(graph)}:
        graph = {name: others for name, others in graph.items() if name not in free}
    assert {name: sorted(others & set(graph)) for name, others in graph.items()} == {}


# --- what an import loads -------------------------------------------------------------------------------------------


def loaded_by(statement: str, interpreter: str = sys.executable) -> set[str]:
    """Top-level names of the modules in a fresh interpreter after a statement; it runs outside the source root.

    interpreter: where torch is loaded in any case, one that has it already takes two seconds less.
    """
    code = f"import sys; {statement}; print(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    result = subprocess.run(
        [interpreter, "-c", code], capture_output=True, text=True, check=True, cwd=Path(sys.executable).parent
    )
    return set(result.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import gradlab") & (HEAVY | {"torch", "numpy", "safetensors"}) == set()


def test_importing_the_analysis_loads_a_name_when_it_is_asked_for() -> None:
    assert loaded_by("import gradlab.analysis as a; dir(a)") & (HEAVY | {"torch", "numpy", "safetensors"}) == set()
    statement = "from gradlab.analysis import forecast; forecast.Network"
    assert loaded_by(statement, torch_python()) & {"h5py", "matplotlib", "jinja2"} == set()
    commands = "from gradlab.cli import analyze, compare, evaluate, fit, inspect, predict, recommend"
    assert loaded_by(commands, torch_python()) & {"matplotlib", "sklearn"} == set()
    with pytest.raises(ImportError, match="examin"):
        from gradlab.analysis import examin  # type: ignore[attr-defined]  # noqa: F401


FRONT_DOORS = {
    "gradlab": "Artifact GradlabError Layer Plan Trace Wrap __version__ codecs compress doctor wrappers",
    "gradlab.analysis": "examine fit_block_sizes fit_gradiveq fit_lgc fit_lgreco forecast replay "
    "replay_plans write_comparison write_trace_report",
    "gradlab.codec": "Codec Compressor Context Exchanged Sparsifier register setting",
    "gradlab.capture": "EmulatedNodes TraceRecorder TraceWriter repair",
    "gradlab.runtime": "CompressionState Exchange compression_hook drive",
}


def test_a_front_door_offers_its_names() -> None:
    for package, names in FRONT_DOORS.items():
        module = importlib.import_module(package)
        assert set(names.split()) <= set(module.__all__) <= set(dir(module))
        assert all(hasattr(module, name) for name in module.__all__)


def test_names_of_the_front_door_are_those_of_the_rooms_behind_it() -> None:
    from gradlab import Artifact, Layer, Plan, Trace, Wrap, codecs, wrappers
    from gradlab.codec import Codec

    homes = {"artifact": (Artifact,), "layout": (Layer,), "plan.plan": (Plan, Wrap), "trace.trace": (Trace,)}
    assert all(thing.__module__ == f"gradlab.{home}" for home, things in homes.items() for thing in things)
    assert issubclass(codecs.get("topk"), Codec)
    assert "error_feedback" in wrappers.names()
    with pytest.raises(ImportError, match="Plann"):
        from gradlab import Plann  # type: ignore[attr-defined]  # noqa: F401


def test_a_name_of_the_front_door_loads_its_own_room_alone() -> None:
    assert loaded_by("import gradlab; gradlab.GradlabError, gradlab.__version__") & {"torch", "numpy"} == set()
    statement = "import gradlab; gradlab.Plan, gradlab.Wrap, gradlab.Layer, gradlab.codecs, gradlab.wrappers"
    assert loaded_by(statement, torch_python()) & (HEAVY | {"safetensors"}) == set()
    assert "h5py" in loaded_by("from gradlab import Trace", torch_python())


def test_importing_the_runtime_loads_torch_only() -> None:
    """Safetensors comes with the first artifact that is read or written."""
    loaded = loaded_by("import gradlab.runtime", torch_python())
    assert {"torch", "gradlab"} <= loaded
    assert loaded & (HEAVY | EXTRAS | {"safetensors"}) == set()


def test_codecs_and_plans_load_no_more() -> None:
    statement = "import gradlab.artifact, gradlab.codecs as c; [c.get(name) for name in c.names()]"
    assert loaded_by(statement, torch_python()) & HEAVY == set()


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    jobs = ROOT / "tests" / "jobs" / "framework_jobs.py"
    subprocess.run([torch_python(), str(jobs), "missing", str(tmp_path)], check=True, cwd=Path(sys.executable).parent)
    assert json.loads((tmp_path / "missing-0.json").read_text())["missing_extras"] == {
        f"{side}.{name}": f"gradlab.{side}.{name} needs {title}: pip install 'gradlab[{name}]'"
        for side in ("runtime", "capture")
        for name, title in (("lightning", "Lightning"), ("accelerate", "Accelerate"), ("transformers", "transformers"))
    }


# --- what is installed ----------------------------------------------------------------------------------------------


def test_every_source_folder_is_a_package_that_is_installed() -> None:
    """A folder that pyproject.toml forgets would be missing from the wheel and seen in the source tree alone."""
    tops = [ROOT / name for name in ("gradlab", *SIDES)]
    sources = {path.parent for top in tops for path in top.rglob("*.py")}
    assert set(declared().values()) == sources
    assert all((folder / "__init__.py").exists() for folder in sources)


def test_every_source_file_is_installed() -> None:
    for package, folder in declared().items():
        sources = {path.name: path for path in folder.iterdir() if path.suffix in (".py", ".jinja", ".typed")}
        (place,) = importlib.import_module(package).__path__
        for name, source in sources.items():
            assert (Path(place) / name).read_text() == source.read_text(), f"{package}/{name} is not what is installed"


def test_the_side_packages_import_from_a_checkouts_root() -> None:
    """Where they lie beside the package, not in it: as the files there are, installed or not."""
    code = (
        "import sys; sys.dont_write_bytecode = True; import gradlab.analysis, gradlab.capture, gradlab.datasets, "
        "gradlab.runtime; print(gradlab.runtime.__file__)"
    )
    unset = ("PYTHONPATH", "PYTHONSAFEPATH")  # either may put another gradlab first
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [torch_python(), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).samefile(ROOT / "runtime" / "__init__.py")


def test_an_installed_package_looks_in_its_own_folder_alone() -> None:
    """Nothing that lies beside it in an environment becomes a part of it."""
    (place,) = importlib.import_module("gradlab").__path__
    assert all((Path(place) / side).is_dir() for side in SIDES)


def test_imports_are_read_as_python_reads_them(tmp_path: Path) -> None:
    """The walker itself: absolute, relative, aliased, inside functions, and names that only look alike."""
    path = tmp_path / "module.py"
    path.write_text(
        "import a.b as c\nfrom gradlab import capture\nfrom . import sibling\nfrom ..other import thing\n"
        "def f():\n    import h5py\n"
    )
    assert sorted(imported("gradlab.runtime.module", path)) == [
        "a.b",
        "gradlab",
        "gradlab.capture",
        "gradlab.other",
        "gradlab.other.thing",
        "gradlab.runtime",
        "gradlab.runtime.sibling",
        "h5py",
    ]
    assert not within("gradlab.captured", "gradlab.capture")
