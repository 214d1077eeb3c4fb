"""The rules of the code base that no reader should have to check: who imports whom, and what the style counts.

A rule is a function from a module to what is wrong with it. The code keeps each of them, and each is shown to find
what it forbids.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from tests.rooms import (
    MOST_ARROWS,
    MOST_MODULES,
    MOST_ROOMS,
    ROOMS,
    ROOT,
    Module,
    arrows,
    circle,
    folders,
    functions,
    read_modules,
)
from trainer.adapters.kinds import KINDS
from trainer.config.fields import all_names, slot
from trainer.config.schema import RunConfig
from trainer.config.sections import ADAPTERS, Section, TrackersConfig
from trainer.models import families

# What takes no torch, whatever it comes to import: a command and the page start in a fraction of a second.
FREE_OF_TORCH = ("system", "config", "run", "view", "launcher", "app")
HOLDS_TENSORS = {"trainer.system.pinned"}  # it is what tensors are pinned with
# See DECISIONS 3.
NEVER = frozenset({"accelerate", "deepspeed", "lightning", "pytorch_lightning", "torchvision"})
# What takes seconds to import, or belongs to the page: a command that only checks and starts must not pay for it.
HEAVY = frozenset({"diffusers", "gradio", "ipywidgets", "numpy", "peft", "safetensors", "torch", "transformers"})
READS_ENVIRONMENT = frozenset(
    {
        "app.web.access",
        "app.web.server",
        "trainer.train.rank",
        "trainer.system.installation",
        "trainer.system.gpus.load",
        "trainer.system.gpus.visible",
        "trainer.launcher.network",
        "trainer.launcher.notices",
        "trainer.run.allocator",
        "trainer.run.compiler",
        "trainer.run.process",
        "trainer.distributed.world",
    }
)
MAX_LINES = 90
MOST_SMALL, MOST_WITHOUT_REASON, LEAST_COMMENTED = 60, 8, 0.60
"""Reached so far, and never given up again: small private functions with one caller, those of them that do not say why
they have a name, and the share of long functions that hold a comment."""
# Who may ask for the number of processes. The others ask for `data_size`, the number of shares of a step's samples.
COUNTS_PROCESSES = {
    "app.form.model_choices": "a preset's ranks, each a GPU",
    "app.runs.film": "GPUs, each with its price",
    "app.runs.run_screen": "a preset's ranks, each a GPU",
    "app.web.pages.drop": "GPUs, each with its price",
    "trainer.launcher.jobs.variants": "variants on equally many GPUs",
    "trainer.benchmark.worker": "bytes that each rank sends",
    "trainer.captioning.work": "captions, an image per process",
    "trainer.checkpoint.restore": "files read by each process",
    "trainer.checkpoint.save": "files written by each process",
    "trainer.config.schema": "strategies and groups of GPUs",
    "trainer.config.sections": "it declares both",
    "trainer.data.encode": "files encoded by each process",
    "trainer.distributed.watchdog": "processes that it watches",
    "trainer.distributed.world": "it declares both",
    "trainer.launcher.commands": "a log of each process",
    "trainer.launcher.torchrun": "a log of each process",
    "trainer.metrics.step_time": "whether there are others to wait for",
    "trainer.models.build": "whether the model is sharded",
    "trainer.models.pissa": "layers factorized by each process",
    "trainer.models.sharding": "whether the model is sharded",
    "trainer.models.vision_language": "whether the model is sharded",
    "trainer.parallel.load": "rows read by each process",
    "trainer.parallel.mesh": "a mesh of all processes",
    "trainer.parallel.replicas": "copies on each process",
    "trainer.plan.search.decide": "whether NCCL holds memory",
    "trainer.plan.record.encoders": "whether the encoder is sharded",
    "trainer.plan.search.fit": "whether NCCL holds memory",
    "trainer.plan.search.ladder": "whether there are ranks to shard over",
    "trainer.plan.memory": "GPUs",
    "trainer.plan.simulate.phases": "whether NCCL holds memory",
    "trainer.plan.simulate.sizes": "shards and replicas",
    "trainer.plan.record.trace": "a mesh of all processes",
    "trainer.view.report": "memory of each process",
    "trainer.train.log": "GPUs",
    "trainer.train.loop": "flags of each process",
    "trainer.train.step_log": "whether there are others to wait for",
}
# Who may name an adapter besides its own file: the lists and sections, and what belongs to one adapter.
NAMES_ADAPTERS = {
    "trainer.adapters.kinds": "it lists the files",
    **dict.fromkeys(
        (f"trainer.config.foreign.{tool}" for tool in ("ai_toolkit", "kohya", "onetrainer", "simpletuner")),
        "words of other trainers",
    ),
    "trainer.config.schema": "the default method",
    "trainer.config.sections": "it declares the sections",
    "trainer.export.extract": "what it extracts is a lora",
    "trainer.models.families.flux2": "diffusers reads lokr for this model",
    "trainer.models.families.z_image": "diffusers reads lokr for this model",
    "trainer.models.pissa": "a way to start a lora",
}
OF_ADAPTERS = frozenset(type(kind).__module__ for kind in KINDS.values())
NEVER_ASKS = {
    "trainer.adapters.formats.writer": {"Reader", "READERS"},
    "trainer.adapters.formats.reader": {"Kind", "KINDS"},
}
STARTS_THREADS = {
    "trainer.distributed.threads": "it is what all others start threads with",
    "trainer.weights.download": "has no torch",
    "trainer.weights.identity": "has no torch",
    "trainer.run.manifest": "has no torch",
}
# Who may write or rename files by itself: what is lost or torn there is made again, or is flushed as a whole.
WRITES_BY_ITSELF = {
    "trainer.system.files": "it is what all others write with",
    "trainer.export": "files of a draft folder, which `export.drafts` flushes one by one before it gets its name",
    "trainer.models": "files of a draft folder, which `folder.write_once` flushes before it gets its name",
    "trainer.checkpoint": "puts checkpoints aside and takes their names from those it removes; it writes none so",
    "trainer.distributed.watchdog": "a hung rank's last words, read by a person",
    "trainer.data.cache": "writes parts that get their names by `files.rename`, which flushes them",
    "trainer.plan.store": "the question to a process of its own, in a temporary folder",
}


def without_type_checking(module: Module) -> Module:
    """The module as it runs: without what only a type checker imports."""
    lines = module.text.splitlines()
    for node in module.nodes(ast.If):
        if ast.unparse(node.test) == "TYPE_CHECKING":
            lines[node.lineno - 1 : node.end_lineno] = ["pass"] + [""] * (node.end_lineno - node.lineno)
    return Module(module.name, "\n".join(lines))


def third_parties(module: Module) -> Iterator[tuple[int, str]]:
    for line, name in module.imports():
        root = name.partition(".")[0]
        if root not in sys.stdlib_module_names and root not in ("trainer", "app"):
            yield line, root


def imports_another_room(module: Module) -> Iterator[str]:
    for line, room in module.imported_rooms():
        if room not in ROOMS[module.room].split():
            yield f"{line}: {module.room} imports {room}"


def reaches_data(module: Module) -> Iterator[str]:
    """The page reads data in one room of its own."""
    for line, room in module.imported_rooms():
        if room == "data" and module.room == "app" and not module.name.startswith("app.data."):
            yield f"{line}: imports data outside of app/data"


def needs_too_much(module: Module) -> Iterator[str]:
    for line, root in third_parties(module):
        if root in NEVER:
            yield f"{line}: imports {root}"


def names_a_family(module: Module) -> Iterator[str]:
    # The family of models that have none is called by a word that is also a value of many fields.
    names = "|".join(name for name in families.names() if name != "auto")
    for number, line in enumerate(module.text.splitlines(), 1):
        found = re.search(rf"(?i)(?<![a-z])({names})", line)
        own = module.name.rpartition(".")[2].removeprefix("_")
        if found and not f"{own}_".startswith(f"{found[0].lower()}_"):
            yield f"{number}: names {found[0]}"


def names_an_adapter(module: Module) -> Iterator[str]:
    """What differs between adapters is asked of `Kind`, `Reader` or the section, so that one more is one more file."""
    if module.name in NAMES_ADAPTERS or module.name in OF_ADAPTERS:
        return
    names = ADAPTERS.keys() - {"none"} | KINDS.keys()
    classes = {ADAPTERS[name].__name__ for name in ADAPTERS if name != "none"}
    for node in module.nodes(ast.Constant):
        if isinstance(node.value, str) and node.value in names:
            yield f"{node.lineno}: names {node.value}"
    for node in module.nodes(ast.Name, ast.Attribute):
        if (name := node.id if isinstance(node, ast.Name) else node.attr) in classes:
            yield f"{node.lineno}: names {name}"
    for line, name in module.imports():
        if any(f"{name}.".startswith(f"{own}.") for own in OF_ADAPTERS):
            yield f"{line}: imports {name}"


def writer_and_reader_share(module: Module) -> Iterator[str]:
    """A file is verified by reading it, so that no name and no formula of the writer may be the reader's too."""
    for node in module.nodes(ast.alias, ast.Name):
        name = node.name if isinstance(node, ast.alias) else node.id
        if name in NEVER_ASKS.get(module.name, ()):
            yield f"{node.lineno}: uses {name}"
    if module.name not in OF_ADAPTERS:
        return
    own = {name for node in module.tree.body for name in bound(node)}
    for node in module.nodes(ast.ClassDef):
        is_reader = node.name.endswith("Reader")
        for used in ast.walk(node):
            if isinstance(used, ast.Name) and used.id in own and used.id.endswith("Reader") != is_reader:
                yield f"{used.lineno}: {node.name} uses {used.id}"


def bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of an adapter's module makes, and those it takes from another adapter's."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("trainer.adapters."):
        yield from (alias.name for alias in node.names if node.module != "trainer.adapters.base")


def is_too_long(module: Module) -> Iterator[str]:
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        lines = node.end_lineno - node.lineno + 1
        if lines > MAX_LINES:
            yield f"{node.lineno}: {node.name} has {lines} lines"


def has_no_reason(module: Module) -> Iterator[str]:
    """A small private function with one caller is written where it is called, or says in its docstring why not."""
    for function in functions(module):
        if function.is_small_for_one and function.is_silent:
            yield f"{function.node.lineno}: {function.node.name} has {function.body} lines, one caller and no docstring"


def says_nothing(module: Module) -> Iterator[str]:
    """A long function says in a comment why, where that is not obvious."""
    for function in functions(module):
        if function.is_long and not function.has_comment:
            yield f"{function.node.lineno}: {function.node.name} has {function.lines} lines without a comment"


def silences_errors(module: Module) -> Iterator[str]:
    for node in module.nodes(ast.ExceptHandler):
        caught = ast.unparse(node.type) if node.type else "everything"
        is_broad = caught in ("everything", "Exception", "BaseException")
        is_empty = all(ast.unparse(statement) in ("pass", "...") for statement in node.body)
        is_told = node.name and any(name.id == node.name for name in ast.walk(node) if isinstance(name, ast.Name))
        if is_empty or (is_broad and not is_told and not isinstance(node.body[-1], ast.Raise)):
            yield f"{node.lineno}: catches {caught}"
    for node in module.nodes(ast.Call):
        if ast.unparse(node.func).endswith("suppress") and "Exception" in {ast.unparse(kind) for kind in node.args}:
            yield f"{node.lineno}: suppresses Exception"


def guesses_attributes(module: Module) -> Iterator[str]:
    for node in module.nodes(ast.Call):
        if ast.unparse(node.func) == "getattr" and len(node.args) == 3:
            yield f"{node.lineno}: {ast.unparse(node)}"


HTML_TAG = re.compile(
    r"(?<!\?P)</?(?:a|b|br|button|code|dd|del|details|div|dl|dt|figcaption|figure|form|h[1-6]|i|img|input|label|li|main|meta|p"
    r"|path|pre|script|section|small|span|style|summary|svg|table|tbody|td|text|th|thead|title|tr|ul)[ >/]"
)


def writes_html(module: Module) -> Iterator[str]:
    """HTML is in templates, which escape all that they are filled with. A string that holds a tag is not a template."""
    allowed = {id(node.value) for node in module.nodes(ast.Expr)}  # docstrings
    for node in module.nodes(ast.Constant):
        if isinstance(node.value, str) and id(node) not in allowed and HTML_TAG.search(node.value):
            yield f"{node.lineno}: writes HTML"
    for node in module.nodes(ast.Call):
        if ast.unparse(node.func) == "Markup" and not all(ast.unparse(arg).isupper() for arg in node.args):
            yield f"{node.lineno}: takes a value for markup"


def reads_environment(module: Module) -> Iterator[str]:
    for node in module.nodes(ast.Attribute):
        if ast.unparse(node) in ("os.environ", "os.getenv") and module.name not in READS_ENVIRONMENT:
            yield f"{node.lineno}: reads {ast.unparse(node)}"


def opens_any_picture(module: Module) -> Iterator[str]:
    """Pillow tries all its formats on a file otherwise, and one of them starts a program."""
    for node in module.nodes(ast.Call):
        if ast.unparse(node.func) == "Image.open" and "formats" not in {keyword.arg for keyword in node.keywords}:
            yield f"{node.lineno}: opens a picture of any format"


def prints(module: Module) -> Iterator[str]:
    """Names and texts of strangers reach a terminal by one way, which takes commands to it out."""
    for node in module.nodes(ast.Name):
        if node.id == "print" and module.name != "trainer.system.terminal":
            yield f"{node.lineno}: prints past trainer.system.terminal"
    for node in module.nodes(ast.Attribute):
        if ast.unparse(node) in ("sys.stdout.write", "sys.stderr.write"):
            yield f"{node.lineno}: prints past trainer.system.terminal"


def writes_by_itself(module: Module) -> Iterator[str]:
    """What is kept is written and renamed by `trainer.system.files`: a power cut leaves the former or the new file."""
    if any(f"{module.name}.".startswith(f"{name}.") for name in WRITES_BY_ITSELF):
        return
    for node in module.nodes(ast.Call):
        if not isinstance(node.func, ast.Attribute):
            continue
        call = ast.unparse(node.func)
        is_path_method = node.func.attr in ("write_text", "write_bytes", "rename") and not call.startswith("files.")
        # str.replace takes two texts, Path.replace one path.
        is_path_replace = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
        if call in ("os.replace", "os.rename") or is_path_method or is_path_replace:
            yield f"{node.lineno}: {call}"


def starts_threads(module: Module) -> Iterator[str]:
    """A rank's threads use its GPU (`trainer.distributed.threads`): those of any other pool begin on the first."""
    if module.name.startswith("trainer.") and module.name not in STARTS_THREADS:
        for node in module.nodes(ast.Call):
            if ast.unparse(node.func).rpartition(".")[2] == "ThreadPoolExecutor":
                yield f"{node.lineno}: starts threads by itself"


def counts_processes(module: Module) -> Iterator[str]:
    """What follows from the samples of a step asks for `data_rank` and `data_size`: ranks may share their samples."""
    if module.name not in COUNTS_PROCESSES:
        for node in module.nodes(ast.Attribute):
            if re.search(r"world\.size$|\.world_size$", ast.unparse(node)):
                yield f"{node.lineno}: reads {ast.unparse(node)}"


RULES: tuple[Callable[[Module], Iterator[str]], ...] = (
    imports_another_room,
    reaches_data,
    needs_too_much,
    names_a_family,
    names_an_adapter,
    writer_and_reader_share,
    is_too_long,
    silences_errors,
    guesses_attributes,
    writes_html,
    reads_environment,
    prints,
    opens_any_picture,
    writes_by_itself,
    starts_threads,
    counts_processes,
)


MODULES = read_modules("trainer", "app")
TEMPLATES = sorted(file for room in ("app", "trainer") for file in (ROOT / room).glob("*/templates/*"))


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_no_template_fills_a_value_unescaped_or_where_escaping_does_not_help(file: Path):
    """Escaping does not help in a script, in an attribute without quotes, and in one whose value is a script."""
    found = re.findall(
        r"\|\s*safe\b|\bautoescape\b|<script(?![^>]* src=\"|[^>{]*>[^{]*</script>)|=\s*\{\{|\bon\w+=|\bhref=",
        file.read_text(encoding="utf-8"),
    )
    assert found == []


def test_what_a_rule_excepts_is_there():
    excepted = (
        *READS_ENVIRONMENT,
        *COUNTS_PROCESSES,
        *NAMES_ADAPTERS,
        *NEVER_ASKS,
        *STARTS_THREADS,
        *WRITES_BY_ITSELF,
    )
    assert [name for name in excepted if name not in MODULES] == []


@pytest.mark.parametrize(("name", "asks"), [("formats.writer", "KINDS"), ("formats.reader", "READERS")])
def test_the_writer_asks_kinds_and_the_reader_asks_readers(name, asks):
    assert f"trainer.adapters.kinds.{asks}" in {found for _, found in MODULES[f"trainer.adapters.{name}"].imports()}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule):
    assert [f"{module.name}:{finding}" for module in MODULES.values() for finding in rule(module)] == []


@pytest.mark.parametrize(
    ("rule", "name", "text", "findings"),
    [
        (
            imports_another_room,
            "trainer.models.base",
            "import os\nfrom trainer.config import A\nfrom trainer.models import b\nfrom trainer.data.cache import C",
            ["4: models imports data"],
        ),
        (
            imports_another_room,
            "trainer.run.events",
            "def f():\n    from trainer import config, launcher",
            ["2: run imports launcher"],
        ),
        (imports_another_room, "trainer.launcher.torchrun", "import app.runs.monitor", ["1: launcher imports app"]),
        (imports_another_room, "app.form.draft", "from trainer.train.loop import Trainer", ["1: app imports train"]),
        (reaches_data, "app.form.draft", "from trainer.data import cache", ["1: imports data outside of app/data"]),
        (reaches_data, "app.data.scans", "from trainer.data import cache", []),
        (needs_too_much, "trainer.train.loop", "import torch\nfrom accelerate import A", ["2: imports accelerate"]),
        (names_a_family, "trainer.train.loop", "x = 1\nif f == 'flux2':\n    ...", ["2: names flux2"]),
        (names_a_family, "trainer.export", "from d import Flux2Pipeline", ["1: names Flux2"]),
        (names_a_family, "trainer.config.schema", 'path = "flux2"', ["1: names flux2"]),
        (names_a_family, "trainer.models.families.flux2", "FLUX2 = 1", []),
        (names_an_adapter, "trainer.adapters.formats.writer", "if kind == 'dora':\n    ...", ["1: names dora"]),
        (names_an_adapter, "trainer.plan.simulate.sizes", "isinstance(cfg, LokrAdapter)", ["1: names LokrAdapter"]),
        (names_an_adapter, "app.form.draft", "sections.BoftAdapter", ["1: names BoftAdapter"]),
        (
            names_an_adapter,
            "trainer.export.model",
            "from trainer.adapters.lora import A\nfrom trainer.adapters import boft",
            ["1: imports trainer.adapters.lora.A", "2: imports trainer.adapters.boft"],
        ),
        (names_an_adapter, "trainer.adapters.loha", "x = 'loha'", []),
        (names_an_adapter, "trainer.run.events", "'Of a lora.'\nf'a lora of rank {r}'", []),
        (
            writer_and_reader_share,
            "trainer.adapters.lora",
            "UP = 1\nclass A:\n    x = UP, AReader\nclass AReader(Reader):\n    x = UP\n    y = A, BReader, torch",
            ["3: A uses AReader", "5: AReader uses UP", "6: AReader uses A"],
        ),
        (
            writer_and_reader_share,
            "trainer.adapters.dora",
            "from trainer.adapters.lora import up\nclass AReader(BReader):\n    x = up()",
            ["3: AReader uses up"],
        ),
        (writer_and_reader_share, "trainer.adapters.formats.writer", "import READERS", ["1: uses READERS"]),
        (writer_and_reader_share, "trainer.adapters.formats.reader", "x = KINDS", ["1: uses KINDS"]),
        (is_too_long, "trainer.train.loop", "def f():\n" + "    x = 1\n" * MAX_LINES, ["1: f has 91 lines"]),
        (
            has_no_reason,
            "trainer.train.loop",
            "def f():\n    return _g(1)\ndef _g(x):\n    y = x\n    return y",
            ["3: _g has 2 lines, one caller and no docstring"],
        ),
        (has_no_reason, "trainer.train.loop", "def f():\n    _g(1)\ndef _g(x):\n    'Said.'\n    return x", []),
        (has_no_reason, "trainer.train.loop", "def f():\n    _g(_g(1))\ndef _g(x):\n    return x", []),
        (has_no_reason, "trainer.train.loop", "def f():\n    return map(_g, a)\ndef _g(x):\n    return x", []),
        (has_no_reason, "trainer.train.loop", "def f():\n    return _g(1)\ndef _g(x):\n" + "    x += 1\n" * 5, []),
        (has_no_reason, "trainer.train.loop", "[_g(x) for x in y]\ndef _g(x):\n    x += 1\n    return x", []),
        (has_no_reason, "trainer.train.loop", "_g(1)\ndef _g(x):\n    if x:\n        return 1\n    return 2", []),
        (
            has_no_reason,
            "trainer.train.loop",
            "class A(B):\n    def f(self):\n        self._g()\n    def _g(self): ...",
            [],
        ),
        (
            says_nothing,
            "trainer.train.loop",
            "def f():  # noqa: E501\n" + "    x = 1\n" * 24,
            ["1: f has 25 lines without a comment"],
        ),
        (says_nothing, "trainer.train.loop", "def f():\n" + "    x = 1\n" * 24 + "    x = 2  # for a reason", []),
        (says_nothing, "trainer.train.loop", "def f():\n" + "    x = 1\n" * 23, []),
        (silences_errors, "trainer.train.loop", "try:\n    f()\nexcept OSError:\n    pass", ["3: catches OSError"]),
        (silences_errors, "trainer.train.loop", "try:\n    f()\nexcept:\n    g()", ["3: catches everything"]),
        (silences_errors, "trainer.train.loop", "try:\n    f()\nexcept Exception:\n    g()\n    raise", []),
        (silences_errors, "trainer.train.loop", "try:\n    f()\nexcept Exception as error:\n    say(error)", []),
        (
            silences_errors,
            "trainer.train.loop",
            "with contextlib.suppress(Exception): f()",
            ["1: suppresses Exception"],
        ),
        (guesses_attributes, "trainer.train.loop", "getattr(a, b)\ngetattr(a, b, 0)", ["2: getattr(a, b, 0)"]),
        (writes_html, "app.notebook.panels", "f'<p>{x}'", ["1: writes HTML"]),
        (writes_html, "app.notebook.panels", "'<img alt=\"{}\">'.format(x)", ["1: writes HTML"]),
        (
            writes_html,
            "app.notebook.panels",
            "Markup(x)\nMarkup(f(x))\nMarkup('x')",
            ["1: takes a value for markup", "2: takes a value for markup", "3: takes a value for markup"],
        ),
        (
            writes_html,
            "app.notebook.panels",
            "def f():\n    'Return <p>.'\n    return Markup(COLORS) + f'{a} < {b}'",
            [],
        ),
        (writes_html, "app.web.server", "'<p>ShardStudio is loading.</p>'", []),
        (writes_html, "trainer.run.failure", "r'(?P<code>-?)'", []),
        (reads_environment, "trainer.optim", "import os\nos.environ['A']", ["2: reads os.environ"]),
        (
            writes_by_itself,
            "trainer.launcher.queue",
            "file.write_text(t)\na.b.write_bytes(b)",
            ["1: file.write_text", "2: a.b.write_bytes"],
        ),
        (
            writes_by_itself,
            "app.runs.run_table",
            "os.replace(a, b)\ndraft.replace(b)\na.rename(b)",
            ["1: os.replace", "2: draft.replace", "3: a.rename"],
        ),
        (
            writes_by_itself,
            "app.runs.run_table",
            "'a'.replace('b', 'c')\nreplace(a, b=1)\nfiles.replace(a, 'b')\nfiles.rename(a, b)",
            [],
        ),
        (writes_by_itself, "trainer.export.model", "file.write_text(t)", []),
        (reads_environment, "trainer.distributed.world", "import os\nos.getenv('A')", []),
        (prints, "trainer.launcher.doctor", "say(1)\nprint(1)", ["2: prints past trainer.system.terminal"]),
        (prints, "app.notebook", "plan(cfg, print)", ["1: prints past trainer.system.terminal"]),
        (prints, "trainer.train.loop", "sys.stderr.write(a)", ["1: prints past trainer.system.terminal"]),
        (prints, "trainer.system.terminal", "print(1)", []),
        (opens_any_picture, "app.notebook.lessons", "Image.open(file)", ["1: opens a picture of any format"]),
        (opens_any_picture, "app.notebook.lessons", "Image.open(file, formats=('PNG',))", []),
        (counts_processes, "trainer.data.loader", "self._world.size\nworld.data_size", ["1: reads self._world.size"]),
        (
            counts_processes,
            "trainer.plan.search.choices",
            "cfg.parallel.world_size",
            ["1: reads cfg.parallel.world_size"],
        ),
        (counts_processes, "trainer.parallel.mesh", "world.size", []),
        (starts_threads, "trainer.data.loader", "with ThreadPoolExecutor(2): ...", ["1: starts threads by itself"]),
    ],
)
def test_each_rule_finds_what_it_forbids(rule, name, text, findings):
    assert list(rule(Module(name, text))) == findings


def test_code_is_cut_into_chapters_rather_than_dust():
    """Ratchets: a change that is better may lower the two counts and raise the share."""
    found = [function for module in MODULES.values() for function in functions(module)]
    small = [function for function in found if function.is_small_for_one]
    silent = [finding for module in MODULES.values() for finding in has_no_reason(module)]
    long = [function for function in found if function.is_long]
    assert len(small) <= MOST_SMALL and len(silent) <= MOST_WITHOUT_REASON, [*map(str, small), *silent]
    commented = len(long) - sum(1 for module in MODULES.values() for _ in says_nothing(module))
    assert commented >= LEAST_COMMENTED * len(long), f"{commented} of {len(long)}: python -m tests.rooms --functions"


def third_parties_behind(start: str, modules: Mapping[str, Module]) -> set[str]:
    """What `start` can come to import besides the standard library: by any function, through any module of ours."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in modules and name not in seen:
            seen.add(name)
            others, ours = imports_when_run(modules[name])
            found |= others
            waiting += ours
    return found


@cache
def imports_when_run(module: Module) -> tuple[frozenset[str], frozenset[str]]:
    """(packages of others, modules and packages of ours) that a module imports, by any of its functions."""
    running = without_type_checking(module)
    names = [imported.split(".") for _, imported in running.imports()]
    ours = {".".join(keys[:end]) for keys in names for end in range(1, len(keys) + 1)}
    return frozenset(root for _, root in third_parties(running)), frozenset(ours)


def test_the_command_line_never_comes_to_import_torch():
    assert third_parties_behind("launch", MODULES) & HEAVY == {"gradio", "numpy"}, "which the page alone asks for"
    assert third_parties_behind("trainer.launcher.commands", MODULES) & HEAVY == set()
    assert third_parties_behind("trainer.__main__", MODULES) >= {"torch", "peft"}


@pytest.mark.parametrize("room", FREE_OF_TORCH)
def test_the_room_never_comes_to_import_torch(room):
    own = [module.name for module in MODULES.values() if module.room == room and module.name not in HOLDS_TENSORS]
    assert own and [name for name in own if "torch" in third_parties_behind(name, MODULES)] == []


def test_a_room_imports_only_rooms_above_it_and_no_arrow_is_out_of_date():
    above: set[str] = set()
    for room, others in ROOMS.items():
        assert set(others.split()) <= above, room
        above.add(room)
    found = arrows(read_modules("trainer", "app", "notebooks").values())
    assert {room: " ".join(sorted(others)) for room, others in found.items()} == ROOMS
    assert len(ROOMS) <= MOST_ROOMS and sum(map(len, found.values())) <= MOST_ARROWS


def test_no_folder_has_too_many_modules():
    crowded = {folder: count for folder, count in folders(MODULES.values()).items() if count > MOST_MODULES}
    assert crowded == {}
    packages = [Module(name, "") for name in ("trainer.a", "trainer.a.b", "trainer.a.c.d", "trainer.a.c")]
    assert folders(packages) == {"trainer.a": 1, "trainer.a.c": 1}


def test_no_modules_import_each_other_in_a_circle():
    assert circle({name: without_type_checking(module) for name, module in MODULES.items()}) == []
    planted = {
        "trainer.a": Module("trainer.a", "def f():\n    from trainer.b import c"),
        "trainer.b": Module("trainer.b", "import importlib\nimportlib.import_module('trainer.a')"),
    }
    assert set(circle(planted)) == {"trainer.a", "trainer.b"}


def test_a_lazy_import_two_modules_away_is_seen_but_not_one_for_type_checking():
    modules = {
        "launch": Module("launch", "def f():\n    from trainer import a"),
        "trainer": Module("trainer", ""),
        "trainer.a": Module("trainer.a", "def f():\n    import torch\nif TYPE_CHECKING:\n    import numpy"),
    }
    assert third_parties_behind("launch", modules) == {"torch"}


# Counts and ratios. Every other number of a config has a unit.
WITHOUT_UNIT = [
    "model.options.text_layers",
    "model.options.text_windows",
    "adapter.rank",
    "adapter.alpha",
    "adapter.dropout",
    "adapter.conv_rank",
    "adapter.factor",
    "adapter.num_stages",
    "data.most_cropped",
    "data.max_aspect",
    "data.repeats",
    "data.caption_dropout",
    "data.latents_dropout",
    "data.vision_dropout",
    "data.validation",
    "data.mask_background",
    "data.regularization_weight",
    "data.reference_dropout",
    "data.question_share",
    "objective.logit_mean",
    "objective.logit_std",
    "objective.mode_scale",
    "objective.shift_factor",
    "objective.min_snr_gamma",
    "objective.guidance",
    "objective.mse_weight",
    "objective.text_weight",
    "objective.router_weight",
    "objective.dpo_beta",
    "optim.lr",
    "optim.beta1",
    "optim.beta2",
    "optim.eps",
    "optim.weight_decay",
    "optim.clip_norm",
    "optim.ema",
    "train.seed",
    "train.checkpointing",
    "train.neftune_alpha",
    "parallel.nodes",
    "parallel.offload_blocks",
    "parallel.reshard_after_forward",
    "parallel.max_restarts",
    "sample.steps",
    "sample.guidance",
    "sample.image_guidance",
    "sample.seed",
    "sample.temperature",
    "checkpoint.keep",
    "checkpoint.keep_best",
]


def test_every_number_of_the_config_has_a_unit_but_counts_and_ratios():
    unitless = []
    for name in all_names():
        field = slot(tuple(name.split(".")))
        item = field.child(0) or field
        if {int, float} & set(item.options) and not field.unit:
            unitless.append(name)
    assert unitless == WITHOUT_UNIT


def is_section(annotation: object) -> bool:
    """A section is described by its fields, and needs no sentence of its own."""
    kinds = get_args(annotation) or (annotation,)
    return all(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds)


def sections(above: type[Section]) -> Iterator[type[Section]]:
    for section in above.__subclasses__():
        yield section
        yield from sections(section)


def test_every_field_of_the_config_says_what_it_is():
    silent = [
        f"{section.__name__}.{name}"
        for section in sections(Section)
        for name, field in section.model_fields.items()
        if not field.description and not is_section(field.annotation) and name not in section.__base__.model_fields
    ]
    assert silent == []


DECLARES_THE_CONFIG = ("trainer.config.schema", "trainer.config.sections")


def attributes(module: Module) -> Iterator[str]:
    """What a module reads as `owner.attribute`, methods aside. Of the schema only properties; its rules just judge."""
    roots: list[ast.AST] = [module.tree]
    if module.name in DECLARES_THE_CONFIG:
        roots = [node for node in module.nodes(ast.FunctionDef) if "property" in map(ast.unparse, node.decorator_list)]
    nodes = [node for root in roots for node in ast.walk(root)]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and id(node) not in called:
            owner = ast.unparse(node.value).rpartition(".")[2]
            is_section = owner == "config" or (owner == "self" and module.name in DECLARES_THE_CONFIG)
            yield f"{'cfg' if is_section else owner}.{node.attr}"


def is_read(field: str, read: Set[str]) -> bool:
    """Whether a field of the config is used: as `section.field`, or as `cfg.field` of a section that was passed on."""
    above, _, leaf = f"cfg.{field}".rpartition(".")
    is_a_sections_name = leaf in RunConfig.model_fields
    return f"{above.rpartition('.')[2]}.{leaf}" in read or (f"cfg.{leaf}" in read and not is_a_sections_name)


def test_every_field_of_the_config_is_read():
    read = {attribute for module in MODULES.values() for attribute in attributes(module)}
    read |= {f"trackers.{name}" for name in TrackersConfig.packages}  # `TrackersConfig.wanted` reads them by name
    assert [name for name in all_names() if not is_read(name, read)] == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("trainer.train.loop", "self.cfg.train.steps", True),
        ("trainer.optim", "cfg.steps", True),
        ("trainer.train.loop", "self.step.steps", False),
        ("trainer.train.loop", "cfg.train.steps()", False),
        ("trainer.config.schema", "def rule(cfg):\n    cfg.train.steps", False),
        ("trainer.config.schema", "class A:\n    @property\n    def b(self):\n        return self.steps", True),
    ],
)
def test_a_field_is_read_where_its_section_or_config_is_asked_for_it(name, text, expected):
    assert is_read("train.steps", set(attributes(Module(name, text)))) is expected
