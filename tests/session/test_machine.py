"""What is recorded of the machine."""

import platform
import subprocess
import sys
from importlib.metadata import version

import torch

from nanstop.session import machine as module
from nanstop.session.machine import environment


def test_versions_are_those_installed():
    found = environment()
    assert found.python == platform.python_version()
    assert found.nanstop == version("nanstop")
    assert found.torch == version("torch")
    assert torch.__version__.startswith(found.torch)  # a build of its own says more of itself
    assert dict(found.packages)["transformers"] == version("transformers")


def test_nothing_is_imported_to_ask():
    code = (
        "import sys; from nanstop.session.machine import environment; e = environment();"
        "assert e.torch and e.packages and not e.flags;"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_listed_variables_are_read(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = environment()
    assert ("CUBLAS_WORKSPACE_CONFIG", ":4096:8") in found.env_vars
    assert "hf_secret" not in str(found)


def test_flags_follow_torch():
    assert dict(environment().flags)["deterministic_algorithms"] == "False"
    torch.use_deterministic_algorithms(True)
    try:
        assert dict(environment().flags)["deterministic_algorithms"] == "True"
    finally:
        torch.use_deterministic_algorithms(False)


def test_driver_version_is_found_in_the_kernel_modules_own_words(tmp_path, monkeypatch):
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    monkeypatch.setattr(module, "DRIVER_FILE", file)
    assert environment().driver == "570.124.06"
    monkeypatch.setattr(module, "DRIVER_FILE", tmp_path / "none")
    assert environment().driver is None
