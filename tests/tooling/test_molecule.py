# SPDX-License-Identifier: GPL-3.0-or-later
"""Molecule calls a step whose playbook is missing a success: ours must all be there."""

from __future__ import annotations

import pathlib

import pytest
import yaml

SCENARIOS = sorted(pathlib.Path(__file__).parents[2].glob("molecule/*/molecule.yml"))
WITHOUT_PLAYBOOK = {"syntax": "converge", "check": "converge", "idempotence": "converge"}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.parent.name)
def test_every_step_has_its_playbook(scenario):
    for step in yaml.safe_load(scenario.read_text())["scenario"]["test_sequence"]:
        action, *playbooks = step.split()
        # Molecule wants the default playbook even where another one is named.
        for name in [f"{WITHOUT_PLAYBOOK.get(action, action)}.yml", *playbooks]:
            assert (scenario.parent / name).is_file(), f"{step} needs {name}"
