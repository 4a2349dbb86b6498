"""Who may import whom, and how long a file may be, read from the sources."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "grpo_jax"


def name_of(path):
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(p): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}


def imports(tree, deep=True):
  """Full names that a module imports; `deep`: inside functions as well."""
  nodes = list(ast.walk(tree)) if deep else tree.body
  found = set()
  for node in nodes:
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, "imports are absolute"
      full = {f"{node.module}.{alias.name}" for alias in node.names}
      modules = full & TREES.keys()
      found |= modules or {node.module}
  return found


ALL = {name: imports(tree) for name, tree in TREES.items()}
OURS = {
  name: {x for x in found if x.split(".")[0] == "grpo_jax"}
  for name, found in ALL.items()
}
ROOTS = {name: {x.split(".")[0] for x in found} for name, found in ALL.items()}


def short(names):
  return {name.removeprefix("grpo_jax.") for name in names}


MODELS = {"models.architecture", "models.kv", "models.layers"}
MODELS |= {"models.projection", "models.rope", "models.transformer"}
MODELS |= {"models.block", "models.decoders", "models.experts"}
MODELS |= {"models.lora", "models.weight_table"}
PARTS = {"advantages", "losses", "corrections", "kl", "returns", "selection"}
PARTS |= {"token_weights", "critic"}
ROWS = {"algorithm", "algorithms", "variants", "baselines"}
# What each module of the pure core may import of the package; nothing else.
CORE = {
  "types": set(),
  "errors": set(),
  "curriculum": {"errors"},
  "advantages": {"types"},
  "losses": {"types"},
  "token_weights": set(),
  "kl": {"losses"},
  "corrections": {"losses", "types"},
  "selection": {"types"},
  "returns": {"advantages", "types"},
  "critic": {"returns", "types"},
  "algorithm": PARTS | {"errors", "types"},
  "variants": PARTS | {"algorithm"},
  "baselines": PARTS | {"algorithm"},
  "algorithms": PARTS | ROWS - {"algorithms"},
  "sharding": {"errors"},
  "models.architecture": set(),
  "models.layers": {"types"},
  "models.projection": {"types"},
  "models.rope": {"models.architecture", "types"},
  "models.kv": {"models.architecture", "sharding", "types"},
  "models.weight_table": {"models.architecture", "types"},
  "models.lora": {
    "models.architecture",
    "models.projection",
    "models.weight_table",
    "types",
  },
  "models.experts": {
    "models.architecture",
    "models.layers",
    "sharding",
    "types",
  },
  "models.block": MODELS
  - {"models.block", "models.decoders", "models.transformer"}
  | {"sharding", "types"},
  "models.transformer": (MODELS | {"sharding", "types"})
  - {"models.decoders", "models.transformer"},
  "models.decoders": {"models.architecture", "models.transformer", "types"},
  "models.flax_module": {
    "errors",
    "models.architecture",
    "models.decoders",
    "types",
  },
  "logprobs": MODELS | {"sharding", "types"},
  "draws": {"logprobs", "models.layers", "types"},
  "compaction": {"sharding", "types"},
  "sampling": MODELS | {"compaction", "draws", "logprobs", "sharding", "types"},
  "values": MODELS | {"logprobs", "types"},
  "metrics": {"types"},
  "optimizer": set(),
  "shaping": {"algorithm", "returns", "types"},
  "tokens": {"algorithm", "logprobs", "models.architecture", "types"},
  "apply": {"algorithm", "critic", "metrics", "optimizer", "types"},
  "grpo": {
    "algorithm",
    "apply",
    "logprobs",
    "metrics",
    "models.architecture",
    "optimizer",
    "sampling",
    "shaping",
    "tokens",
    "types",
    "values",
  },
}


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_the_core(name):
  assert short(OURS[f"grpo_jax.{name}"]) <= CORE[name]


# Files that read and write models: they know files, and the core's own facts.
FOREIGN = {"models.names", "models.families", "models.rope_config"}
FOREIGN |= {"models.hf", "models.hf_names", "models.gguf", "models.peft"}
FOREIGN |= {"models.gguf_file"}
FOREIGN |= {"models.pretrained", "models.remote"}


def test_every_model_file_is_of_the_core_or_reads_models():
  files = {n for n in short(OURS) if n.startswith("models.")}
  assert files <= CORE.keys() | FOREIGN
  for name in FOREIGN:
    core = {"models.architecture", "models.weight_table", "types", "errors"}
    core |= {"models.lora"}
    assert short(OURS[f"grpo_jax.{name}"]) <= FOREIGN | core


def test_the_formulas_need_nothing_but_jax():
  for name in PARTS | ROWS:
    allowed = {
      "jax",
      "collections",
      "dataclasses",
      "functools",
      "grpo_jax",
      "typing",
    }
    assert ROOTS[f"grpo_jax.{name}"] <= allowed


def reach(name):
  """Modules that importing one module runs, packages on the way included."""
  seen, todo = set(), {name}
  while todo:
    name = todo.pop()
    if name in seen:
      continue
    seen.add(name)
    todo |= OURS.get(name, set())
    if "." in name:
      todo.add(name.rpartition(".")[0])
  return seen


HOST = sorted(
  name
  for name in TREES
  if name.startswith(("grpo_jax.tasks", "grpo_jax.rewards"))
  or name in ("grpo_jax.tokenizer", "grpo_jax.data", "grpo_jax.curriculum")
  or name in ("grpo_jax.estimates", "grpo_jax.results")
)
DEVICE = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}


@pytest.mark.parametrize("name", HOST)
def test_tasks_rewards_and_tokenizers_know_no_jax(name):
  for module in reach(name):
    assert not ROOTS.get(module, set()) & DEVICE, module


def test_python_agrees_that_they_know_no_jax():
  code = f"import sys, {', '.join(HOST)}\n"
  code += "print(sorted(m for m in sys.modules if m == 'jax'))"
  out = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    check=True,
    cwd=ROOT,
  )
  assert out.stdout.strip() == "[]"


def test_every_host_module_can_be_the_first_to_be_imported():
  code = f"""import importlib, sys
for name in {HOST}:
  for other in [m for m in sys.modules if m.split(".")[0] == "grpo_jax"]:
    del sys.modules[other]
  importlib.import_module(name)
"""
  subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_package_knows_no_experiment_and_no_test():
  for name, roots in ROOTS.items():
    assert not roots & {"experiments", "tests", "launch"}, name


def test_modules_do_not_import_in_circles():
  graph = {
    name: {x for x in imports(tree, deep=False) if x in TREES}
    for name, tree in TREES.items()
  }
  graphlib.TopologicalSorter(graph).prepare()


OWNERS = {
  "orbax": {"checkpoint", "checkpoint_io"},
  "tensorboardX": {"records"},
  "matplotlib": {"plots"},
  "rich": {"console"},
  "scipy": {"bands", "estimates"},
  "optax": {"apply", "optimizer"},
}


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_has_its_place(library):
  users = {name for name, roots in ROOTS.items() if library in roots}
  assert short(users) <= OWNERS[library]


def test_only_compile_compiles():
  for name, tree in TREES.items():
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom):
        used |= {alias.name for alias in node.names}
    assert "pjit" not in used and "pmap" not in used, name
    assert name == "grpo_jax.compile" or "jit" not in used, name


def test_files_fit():
  folders = (PACKAGE, ROOT / "experiments", ROOT / "tests", ROOT / "launch")
  for path in (p for folder in folders for p in folder.rglob("*.py")):
    lines = len(path.read_text().splitlines())
    assert lines < 400, f"{path}: {lines} lines"
    assert path.stem not in ("utils", "helpers", "manager", "common")
  assert len((PACKAGE / "grpo.py").read_text().splitlines()) <= 250
