# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reach an LXC container through its host: lxc-attach or pct exec, here or over ssh."""

from __future__ import annotations

import shlex
import subprocess
from typing import Any, Optional

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.connection import ConnectionBase
from ansible.utils.display import Display

DOCUMENTATION = """
name: lxc_host
short_description: Reach an LXC container through its host
description:
  - Runs commands in a container with C(lxc-attach) (plain LXC) or C(pct exec) (Proxmox VE), on the controller
    itself or, with O(ssh_host), on the container's host over ssh. The container needs nothing but a shell.
  - The user on the LXC host must be root, or O(enter_command) must begin with what makes it root.
author: the project contributors
version_added: 0.1.0
options:
  container:
    description: Name of the container, or its number for C(pct).
    default: inventory_hostname
    vars:
      - name: inventory_hostname
      - name: ansible_lxc_container
  ssh_host:
    description: Where the container runs, as ssh knows it; empty for this machine.
    default: ""
    vars:
      - name: ansible_lxc_ssh_host
  ssh_args:
    description: Arguments of ssh.
    type: list
    elements: str
    default:
      - -oBatchMode=yes
      - -oControlMaster=auto
      - -oControlPersist=10m
      - -oControlPath=~/.ssh/lxc-%C
    vars:
      - name: ansible_lxc_ssh_args
  enter_command:
    description: The command that runs another one in the container; C({container}) stands for its name.
    type: list
    elements: str
    default: [lxc-attach, --clear-env, -n, "{container}", --]
    vars:
      - name: ansible_lxc_enter_command
"""

display = Display()
SSH_FAILED = 255


class Connection(ConnectionBase):
    """One command per call; lxc-attach keeps no session."""

    transport = "lxc_host"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def _command(self, command: list[str]) -> list[str]:
        name = self.get_option("container")
        enter = [part.replace("{container}", name) for part in self.get_option("enter_command")]
        whole = [*enter, *command]
        if not self.get_option("ssh_host"):
            return whole
        return ["ssh", *self.get_option("ssh_args"), self.get_option("ssh_host"), shlex.join(whole)]

    def _run(self, command: list[str], data: Optional[bytes]) -> tuple[int, bytes, bytes]:
        argv = self._command(command)
        display.vvv(f"LXC {shlex.join(argv)}", host=self.get_option("container"))
        try:
            done = subprocess.run(argv, input=data or b"", capture_output=True, check=False)
        except FileNotFoundError as error:
            raise AnsibleConnectionFailure(f"{argv[0]} is not installed on this machine") from error
        remote = bool(self.get_option("ssh_host"))
        if (remote and done.returncode == SSH_FAILED) or b"is not running" in done.stderr.lower():
            said = done.stderr.decode(errors="replace").strip() or "no reason given"
            raise AnsibleConnectionFailure(f"Container {self.get_option('container')} is not reached: {said}")
        return done.returncode, done.stdout, done.stderr

    def exec_command(self, cmd: str, in_data: Any = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Run a shell command in the container."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        return self._run(["/bin/sh", "-c", cmd], in_data)

    def put_file(self, in_path: str, out_path: str) -> None:
        """Write a local file into the container."""
        super().put_file(in_path, out_path)
        with open(in_path, "rb") as file:
            code, _, said = self._run(["/bin/sh", "-c", f"cat > {shlex.quote(out_path)}"], file.read())
        if code:
            raise AnsibleError(
                f"{out_path} cannot be written in the container: {said.decode(errors='replace')}"
            )

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Copy a file of the container here."""
        super().fetch_file(in_path, out_path)
        code, data, said = self._run(["cat", in_path], None)
        if code:
            raise AnsibleError(f"{in_path} cannot be read in the container: {said.decode(errors='replace')}")
        with open(out_path, "wb") as file:
            file.write(data)

    def close(self) -> None:
        """Nothing is kept open."""
        self._connected = False
