# SPDX-License-Identifier: GPL-3.0-or-later
"""The scripts behind make: the one line they say when something is missing, and that the checks catch."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).parents[2]
MODULE = '''\
# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: sample
short_description: A sample
description: A sample, as M(sample) is.
version_added: 0.0.0
author: The project contributors (!UNKNOWN)
options:
  root:
    description: Where to look.
    type: path
    default: /sys
"""

EXAMPLES = r"""
- name: Look
  sample:
"""

RETURN = r"""
found:
  description: What was found.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning.sample import DEFAULT_ROOT


def main():
    module = AnsibleModule(argument_spec={"root": {"type": "path", "default": DEFAULT_ROOT}})
    module.exit_json(found="")


if __name__ == "__main__":
    main()
'''


def stub(folder: pathlib.Path, name: str, body: str) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def run(*argv: object, cwd: pathlib.Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run with the stubs in cwd/stubs first in PATH, and outside CI unless env says so."""
    path = f"{cwd / 'stubs'}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [str(arg) for arg in argv],
        cwd=cwd,
        env={**os.environ, "CI": "", "PATH": path, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def repo(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkout with nothing in it but the scripts, a lock of no packages and a role-less layout."""
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/run.txt").write_text("# nothing\n")
    (tmp_path / "requirements/test.txt").write_text("# nothing\n")
    return tmp_path


class TestVenv:
    def test_without_ensurepip_one_line_names_the_package(self, repo):
        stub(
            repo / "stubs", "python3", f'case "$*" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"'
        )
        result = run("scripts/venv", ".venv", "requirements/run.txt", cwd=repo)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert "apt-get install python3-venv" in result.stderr
        assert not (repo / ".venv").exists()

    def test_an_old_python_is_named_with_what_is_needed(self, repo):
        stub(
            repo / "stubs",
            "python3",
            'case "$*" in *version_info*) exit 1 ;; -V) echo Python 3.9.2 ;; esac',
        )
        result = run("scripts/venv", ".venv", "requirements/run.txt", cwd=repo)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert "Python 3.11 or newer is needed, python3 is Python 3.9.2" in result.stderr

    def test_no_python_at_all(self, repo):
        result = run("scripts/venv", ".venv", "requirements/run.txt", cwd=repo, PYTHON="python3.99")
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert "apt-get install python3 python3-venv" in result.stderr

    def test_set_up_again_only_when_the_lock_changes(self, repo):
        lock = repo / "requirements/run.txt"
        said = [run("scripts/venv", ".venv", "requirements/run.txt", cwd=repo).stderr for _ in range(2)]
        lock.write_text("# changed\n")
        said.append(run("scripts/venv", ".venv", "requirements/run.txt", cwd=repo).stderr)
        assert ["Setting up" in text for text in said] == [True, False, True]

    def test_a_package_with_another_hash_is_refused(self, repo):
        wheel = repo / "wheels/none-1.0-py3-none-any.whl"
        wheel.parent.mkdir()
        wheel.write_bytes(b"not what was locked")
        (repo / "requirements/run.txt").write_text(f"none==1.0 --hash=sha256:{'0' * 64}\n")
        result = run(
            "scripts/venv",
            ".venv",
            "requirements/run.txt",
            cwd=repo,
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS=str(wheel.parent),
        )
        assert result.returncode == 1
        assert "DO NOT MATCH THE HASHES" in result.stderr
        assert not (repo / ".venv/.run.stamp").exists()


class TestNeed:
    def test_without_root_it_says_what_to_install(self, repo):
        stub(repo / "stubs", "id", "echo 1000")
        stub(repo / "stubs", "apt-get", "touch called")
        result = run("scripts/need", "no-such-package-a", "no-such-package-b", cwd=repo)
        assert result.returncode == 77
        assert result.stdout == "install as root: apt-get install no-such-package-a no-such-package-b\n"
        assert not (repo / "called").exists()

    def test_what_is_there_is_not_installed(self, repo):
        stub(repo / "stubs", "dpkg-query", "printf installed")
        stub(repo / "stubs", "apt-get", "touch called")
        assert run("scripts/need", "there", cwd=repo).returncode == 0
        assert not (repo / "called").exists()

    @pytest.mark.parametrize(
        ("lists_do", "calls"), [("true", ["install"]), ("false", ["install", "update", "install"])]
    )
    def test_lists_are_fetched_only_when_those_at_hand_do_not_do(self, repo, lists_do, calls):
        stub(repo / "stubs", "id", "echo 0")
        log = 'for word; do case $word in install|update) echo "$word" >>called ;; esac; done'
        stub(repo / "stubs", "apt-get", f"{log}\n{lists_do} || grep -q update called")
        assert run("scripts/need", "no-such-package", cwd=repo).returncode == 0
        assert (repo / "called").read_text().split() == calls


class TestTune:
    @pytest.fixture
    def repo(self, repo):
        body = 'case "$*" in *--list-hosts*) echo "      ${HOST:-localhost}" ;; *) echo "$@" ;; esac'
        stub(repo / ".venv/bin", "ansible-playbook", body)
        stub(repo / "stubs", "id", "echo 1000")
        stub(repo / "stubs", "sudo", "exit 1")
        return repo

    def test_it_is_a_check_and_needs_no_root(self, repo):
        result = run("scripts/tune", "-v", cwd=repo)
        assert result.stdout == "tune.yml --tags runtime --diff --check -v\n"

    def test_apply_without_root_is_one_line_of_what_to_type(self, repo):
        result = run("scripts/tune", cwd=repo, APPLY="1")
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == (
            "Changing this host needs root: make tune APPLY=1 ARGS='--become --ask-become-pass'\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "env", "sudo", "expected"),
        [
            (["--become", "-K"], {}, "exit 1", "--become -K"),
            ([], {}, "exit 0", "--become"),
            ([], {"HOST": "gpu1"}, "exit 1", ""),
        ],
        ids=["become asked for", "passwordless sudo", "another host"],
    )
    def test_apply_without_root_goes_on(self, repo, arguments, env, sudo, expected):
        stub(repo / "stubs", "sudo", sudo)
        result = run("scripts/tune", *arguments, cwd=repo, APPLY="1", **env)
        assert result.stdout == f"tune.yml --tags runtime --diff {expected}".rstrip() + "\n"

    def test_an_unclear_apply_changes_nothing(self, repo):
        result = run("scripts/tune", cwd=repo, APPLY="yes")
        assert (result.returncode, result.stdout) == (2, "")
        assert "APPLY=1 applies" in result.stderr


class TestRunner:
    @pytest.fixture
    def repo(self, repo):
        stub(repo / "scripts", "venv", "exit 0")
        stub(repo / "scripts", "lint", "echo all clean")
        stub(repo / "stubs", "id", "echo 1000")
        (repo / "tests/lxc").mkdir(parents=True)
        return repo

    def test_a_part_that_cannot_run_is_named_with_its_reason(self, repo):
        result = run("scripts/test", "lxc", "lint", cwd=repo)
        assert result.returncode == 0
        assert result.stdout.splitlines()[-3:] == [
            "skipped  lxc          SKIPPED, run as root: real LXC containers",
            "passed   lint         all clean",
            "parts: 1 passed, 0 failed, 1 skipped",
        ]

    def test_in_ci_it_is_a_failure(self, repo):
        result = run("scripts/test", "lxc", "lint", cwd=repo, CI="true")
        assert result.returncode == 1
        assert result.stdout.endswith("parts: 1 passed, 1 failed, 0 skipped\n")

    def test_a_failed_part_does_not_stop_the_next_one(self, repo):
        stub(repo / "scripts", "lint", "echo not clean; exit 1")
        result = run("scripts/test", "lint", "integration", cwd=repo)
        assert result.returncode == 1
        assert "FAILED   lint         not clean" in result.stdout
        assert result.stdout.endswith("parts: 1 passed, 1 failed, 0 skipped\n")


class TestModuleChecks:
    @pytest.fixture
    def repo(self, repo):
        (repo / "library").mkdir()
        (repo / "module_utils/gpu_tuning").mkdir(parents=True)
        (repo / "module_utils/gpu_tuning/__init__.py").touch()
        (repo / "module_utils/gpu_tuning/sample.py").write_text('DEFAULT_ROOT = "/sys"\n')
        (repo / "library/sample.py").write_text(MODULE)
        return repo

    def test_a_sound_module_passes(self, repo):
        result = run("scripts/validate-modules", cwd=repo)
        assert (result.returncode, result.stdout) == (0, "1 modules validated\n")
        assert run("scripts/module-docs", cwd=repo).stdout == "1 modules rendered\n"

    def test_a_default_that_comes_from_module_utils_is_compared(self, repo):
        (repo / "module_utils/gpu_tuning/sample.py").write_text('DEFAULT_ROOT = "/elsewhere"\n')
        result = run("scripts/validate-modules", cwd=repo)
        assert result.returncode != 0
        assert "doc-default-does-not-match-spec" in result.stdout

    def test_a_module_that_cannot_be_imported_fails(self, repo):
        (repo / "module_utils/gpu_tuning/sample.py").unlink()
        assert run("scripts/validate-modules", cwd=repo).returncode != 0

    @pytest.mark.parametrize("part", ["EXAMPLES", "RETURN", "DOCUMENTATION"])
    def test_a_part_that_does_not_render_fails(self, repo, part):
        (repo / "library/sample.py").write_text(MODULE.replace(part, f"NO_{part}"))
        result = run("scripts/module-docs", cwd=repo)
        assert result.returncode == 1
        assert "library/sample.py does not render whole" in result.stdout

    def test_documentation_that_is_not_yaml_fails(self, repo):
        (repo / "library/sample.py").write_text(MODULE.replace("options:", "options: ["))
        assert run("scripts/module-docs", cwd=repo).returncode == 1


class TestRoleReadme:
    SPECS = """\
argument_specs:
  main:
    short_description: Does a thing
    options:
      thing_mode: {type: str, default: soft, choices: [soft, hard], description: "How C(hard) | soft."}
"""

    @pytest.fixture
    def role(self, repo):
        role = repo / "roles/thing"
        for folder in ("tasks", "defaults", "meta"):
            (role / folder).mkdir(parents=True)
        (role / "meta/argument_specs.yml").write_text(self.SPECS)
        (role / "defaults/main.yml").write_text("thing_mode: soft\n__thing_private: 1\n")
        return role

    def test_what_is_written_is_up_to_date_until_the_specs_change(self, repo, role):
        assert run("scripts/role-readme", "--check", cwd=repo).returncode == 1
        assert run("scripts/role-readme", cwd=repo).returncode == 0
        assert (
            "| `thing_mode` | str | `soft` | How `hard` \\| soft. One of `soft`, `hard`. |"
            in (role / "README.md").read_text()
        )
        assert run("scripts/role-readme", "--check", cwd=repo).returncode == 0
        (role / "meta/argument_specs.yml").write_text(self.SPECS.replace("a thing", "another"))
        stale = run("scripts/role-readme", "--check", cwd=repo)
        assert stale.returncode == 1
        assert "README.md is not up to date: run make docs" in stale.stdout

    @pytest.mark.parametrize(
        ("defaults", "said"),
        [
            ("thing_mode: hard\n", "thing_mode is hard in defaults/main.yml, soft in meta/argument_specs"),
            ("thing_extra: 1\n", "sets thing_extra, which meta/argument_specs.yml does not describe"),
        ],
    )
    def test_defaults_that_the_specs_do_not_tell_are_refused(self, repo, role, defaults, said):
        (role / "defaults/main.yml").write_text(defaults)
        result = run("scripts/role-readme", cwd=repo)
        assert result.returncode == 1
        assert said in result.stdout

    def test_a_policy_gets_a_section_for_each_entry(self, repo, role):
        (role / "defaults/main.yml").write_text(
            "thing_mode: soft\n__thing_policy:\n  numa: {title: NUMA, sysctl: {a.b: 0}, why: Less to do}\n"
        )
        run("scripts/role-readme", cwd=repo)
        text = (role / "README.md").read_text()
        assert "### `numa`\n\nNUMA\n\n- sysctl: `{a.b: 0}`\n- why: Less to do\n" in text


class TestPython:
    @pytest.fixture
    def repo(self, repo):
        for minor in (11, 12, 13):
            stub(repo / "stubs", f"python3.{minor}", f'echo "3.{minor} the-3.{minor}"')
        for name in ("python3", "python3.12"):
            stub(repo / "stubs", name, "exit 127")  # as a version manager's shim
        return repo

    @pytest.mark.parametrize(
        ("limits", "expected"),
        [(["3.11", "3.13"], "the-3.13"), (["3.11", "3.12"], "the-3.11"), (["3.13", "3.13"], "the-3.13")],
    )
    def test_the_newest_that_starts_within_the_limits(self, repo, limits, expected):
        result = run("scripts/python", *limits, cwd=repo, PYENV_ROOT="/nonexistent")
        assert result.stdout == f"{expected}\n"

    def test_none_within_the_limits(self, repo):
        assert run("scripts/python", "3.12", "3.12", cwd=repo, PYENV_ROOT="/nonexistent").returncode == 1
