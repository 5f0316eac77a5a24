"""Imports point one way, BMTrain stays in the files that own it, and `import bmburst` needs none of it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for package in ("bmburst", "bmburst_ops", "model_center_ext", "benchmarks")
    for path in (ROOT / package).rglob("*.py")
)
PURE = {
    *("torch", "triton", "bmtrain", "model_center_ext", "bmburst_ops.flash", "bmburst_ops.merge"),
    *(f"bmburst.{part}" for part in ("attention", "comm", "data", "mesh", "launch", "host", "sequence", "train")),
}
BEYOND_HOST = {
    *("model_center_ext", "bmburst.train", "bmburst.data", "bmburst.blocks", "bmburst.attention", "bmburst.launch")
}
# Where a package's files may not look. Longer prefixes first: the first that fits a file decides.
FORBIDDEN = {
    "bmburst_ops/fragments.py": {"torch", "bmburst"},
    "bmburst_ops/pattern.py": {"torch", "bmburst"},
    "bmburst_ops": {"bmburst", "model_center_ext", "bmtrain", "torch.distributed"},
    "bmburst/plan/rates.py": {"bmtrain", "bmburst.comm", "bmburst.attention", "bmburst.mesh"},
    "bmburst/plan": PURE,
    "bmburst/schedule": PURE | {"bmburst.plan"},
    "bmburst/schedule/parallelism.py": PURE | {"numpy", "bmburst_ops"},
    "bmburst/errors.py": {"torch", "bmtrain", "bmburst"},
    "bmburst/config": {"torch", "bmtrain"},
    "bmburst/blocks/config.py": {"torch", "bmtrain"},
    "bmburst/blocks/presets.py": {"torch", "bmtrain"},
    "bmburst/blocks/seq2seq_config.py": {"torch", "bmtrain"},
    "bmburst/checkpoint/model_center.py": {"torch", "bmtrain"},
    "bmburst/train/config.py": {"torch", "bmtrain"},
    "bmburst/data": {"bmtrain", "torch.distributed", "bmburst.comm", "bmburst.mesh", "bmburst.train"},
    "bmburst/comm": {"model_center_ext", "bmburst.attention", "bmburst.blocks", "bmburst.train"},
    "bmburst/attention": {"model_center_ext", "bmburst.blocks", "bmburst.train", "bmburst.data", "bmburst.launch"},
    "bmburst/blocks": {"model_center_ext", "bmburst.train", "bmburst.data", "bmburst.launch"},
    "bmburst/launch": {"model_center_ext", "bmburst.train", "bmburst.data", "bmburst.blocks", "bmburst.attention"},
    "bmburst/host": BEYOND_HOST,
    "bmburst/setup": BEYOND_HOST,
    "benchmarks/engine": {"model_center_ext", "benchmarks.attention", "benchmarks.training", "benchmarks.inference"},
    "benchmarks/attention/cells.py": {"torch", "bmtrain", "bmburst.attention", "bmburst_ops.flash"},
    "benchmarks/attention": {
        "model_center_ext",
        "benchmarks.training",
        "benchmarks.inference",
        "bmburst.train",
        "bmburst.data",
        "bmburst.blocks",
    },
    "benchmarks/training/cells.py": {"torch", "bmtrain", "bmburst.attention", "bmburst_ops.flash", "bmburst.cli"},
    "benchmarks/inference/cells.py": {"torch", "bmtrain", "bmburst.attention", "bmburst_ops.flash", "bmburst.cli"},
    "bmburst/cli": {"model_center_ext"},
    "bmburst": {"model_center_ext"},
}
BMTRAIN_AT_TOP = {
    *("bmburst/attention/module.py", "bmburst/integrations/cpm_live.py", "bmburst/zero.py", "bmburst/zero_group.py"),
    *(f"bmburst/blocks/{name}.py" for name in ("gathering", "layers", "model", "seq2seq", "sharded", "stages")),
    *("bmburst/blocks/streamed.py", "bmburst/optim/adamw.py", "bmburst/optim/sums.py"),
    *("benchmarks/training/tensor_v1.py", "model_center_ext/llama.py"),
}


def names(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path):
    name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
    banned = next((FORBIDDEN[key] for key in sorted(FORBIDDEN, key=len, reverse=True) if name.startswith(key)), set())
    if not name.startswith("benchmarks/"):
        banned = banned | {"benchmarks"}  # they are of the clone, and not installed
    found = {module for module in names(ast.walk(tree)) for b in banned if module == b or module.startswith(f"{b}.")}
    assert not found, f"{name} may not import {sorted(found)}"
    if name not in BMTRAIN_AT_TOP:
        top = set(names(tree.body))
        assert not {module for module in top if module.split(".")[0] == "bmtrain"}, f"{name} imports bmtrain at its top"


def test_importing_the_package_starts_nothing():
    code = (
        "import sys, torch; before = torch.cuda.Stream; from bmburst import *; import bmburst; "
        "assert {*dir(bmburst)} - {*globals()} == {'BurstAttention'}; "
        "assert 'bmtrain' not in sys.modules and torch.cuda.Stream is before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "does",
    [
        "import bmburst.schedule",
        "import pkgutil, bmburst.schedule as s\n"
        "for each in pkgutil.iter_modules(s.__path__): __import__(f'bmburst.schedule.{each.name}')\n"
        "for name in s.__all__: getattr(s, name)",
        "from bmburst.cli import main; "
        "assert main('plan --preset llama-3-8b --sequence-length 64K --nproc 8'.split()) == 0",
        "from bmburst.schedule.hardware import hardware_like; assert hardware_like('an H100').name == 'NVIDIA H100'",
    ],
    ids=["package", "every module", "plan", "hardware"],
)
def test_schedules_and_plans_need_no_torch(does):
    refusing = (
        "import sys\n"
        "class Refusing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'bmtrain', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Refusing())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", refusing + does], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("package", "name"), [("bmburst", "BurstAttention"), ("model_center_ext", "Llama")])
def test_a_name_that_needs_bmtrain_says_how_to_start_it(package, name):
    code = f"import sys; sys.modules['bmtrain'] = None; from {package} import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert f"UserError: {package}.{name} needs BMTrain" in done.stderr
    assert "bmburst.start() before this import" in done.stderr.splitlines()[-1]


def test_files_hold_one_idea():
    long = {path.name: n for path in FILES if (n := len(path.read_text().splitlines())) > 500}
    assert not long, f"a file of more than 500 lines needs a reason: {long}"


def test_packages_export_names_and_hold_no_program():
    """An `__init__` of bmburst and benchmarks defines what imports its names when they are used, and nothing else."""
    exports = {"__getattr__", "__dir__", "public_name"}
    for path in FILES:
        if path.name == "__init__.py" and path.parts[len(ROOT.parts)] in ("bmburst", "benchmarks"):
            defined = [node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")]
            assert set(defined) <= exports, f"{path}: {defined} in a module with a name"


def test_few_modules_lie_straight_under_the_package():
    found = sorted(path.name for path in (ROOT / "bmburst").glob("*.py"))
    assert len(found) <= 12, f"more than 12 modules straight under bmburst: {found}"


def test_imports_have_no_cycles():
    """Modules that are imported at another one's top, directly or on the way, do not import that one at theirs."""
    stem = lambda path: path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__")  # noqa: E731
    modules = {stem(path).replace("/", "."): path for path in FILES}
    imported = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.parse(path.read_text()).body:
            found = set(names([node])) & modules.keys()
            if isinstance(node, ast.ImportFrom) and found > {node.module}:
                found.discard(node.module)  # a package's module, not a name of the package
            imported[name] |= found - {name}
    done = set()

    def visit(name, on_the_way):
        assert name not in on_the_way, " -> ".join([*on_the_way[on_the_way.index(name) :], name])
        if name in done:
            return
        for found in sorted(imported[name]):
            visit(found, [*on_the_way, name])
        done.add(name)

    for name in sorted(modules):
        visit(name, [])


def test_packages_have_no_circles():
    """If a package imports another one, at a file's top or in a function, that one does not import it, on no way."""
    imports = {}
    for path in FILES:
        if path.parts[len(ROOT.parts)] != "bmburst" or path.parent == ROOT / "bmburst":
            continue
        room = path.relative_to(ROOT / "bmburst").parts[0]
        modules = (module.split(".") for module in names(ast.walk(ast.parse(path.read_text()))))
        found = {parts[1] for parts in modules if parts[0] == "bmburst" and len(parts) > 1}
        imports.setdefault(room, set()).update(other for other in found - {room} if (ROOT / "bmburst" / other).is_dir())
    left = dict(imports)
    while free := [room for room in left if not left[room] & left.keys()]:
        for room in free:
            del left[room]
    assert not left, f"circles: { ({room: sorted(left[room] & left.keys()) for room in left}) }"


def test_no_command_imports_another():
    from bmburst.cli.program import COMMANDS, TOGETHER

    commands = {f"bmburst.cli.{TOGETHER.get(name, name.replace('-', '_'))}" for name in COMMANDS}
    for module in commands:
        path = ROOT / f"{module.replace('.', '/')}.py"
        found = set(names(ast.walk(ast.parse(path.read_text())))) & (commands - {module})
        assert not found, f"{module} imports {sorted(found)}: put what both need into a module of its own"


def test_the_trainer_has_few_attributes():
    tree = ast.parse((ROOT / "bmburst/train/trainer.py").read_text())
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    stored = (node for node in ast.walk(trainer) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    found = {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    assert len(found) <= 16, f"one more reader of a step must know {sorted(found)}: give it to what belongs together"
