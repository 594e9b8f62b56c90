# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's side: following a job over a bad connection, and what is kept of a measurement."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from benchmark_samples import ROOT, measurement

pytest.importorskip("scipy", reason="SciPy is missing: pip install -r requirements/benchmark.txt")
from benchmark_report import conclude, page


def load(folder: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN, RECORD, LXC = (
    load("action_plugins", "gpu_benchmark_run"),
    load("action_plugins", "gpu_benchmark_record"),
    load("connection_plugins", "lxc_host"),
)


def follower(answers: list[Any]) -> Any:
    """An action whose polls give these answers in turn, exceptions raised."""
    action = RUN.ActionModule.__new__(RUN.ActionModule)
    action._host = "box"

    def call(*_: str) -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    action._call = call
    return action


RUNNING = {"state": "running", "outcome": None, "text": "", "offset": 0}
NO_GPU = {"state": "ended", "outcome": {"exit_code": 3, "reason": None}, "text": "", "offset": 0}
ENDED = {"state": "ended", "outcome": {"exit_code": 0, "reason": None}, "text": "", "offset": 0}


def test_a_connection_that_comes_back_is_forgiven() -> None:
    action = follower([RUNNING, AnsibleConnectionFailure("reset"), AnsibleConnectionFailure("reset"), ENDED])
    assert action._follow("/d", {"lease": 60.0, "interval": 0.0})["state"] == "ended"


def test_a_connection_that_stays_away_names_the_folder() -> None:
    action = follower([RUNNING, *[AnsibleConnectionFailure("reset")] * 50])
    with pytest.raises(AnsibleActionFail, match=r"is lost .* what it measured is in /d there"):
        action._follow("/d", {"lease": 0.0, "interval": 0.001})


@pytest.mark.parametrize(
    ("ended", "found", "sentence"),
    [
        (ENDED, {"status": "complete", "error": None}, "^$"),
        ({**ENDED, "state": "lost", "outcome": None}, None, "ended from outside"),
        ({**ENDED, "outcome": {"exit_code": 1, "reason": "stopped by SIGTERM"}}, None, "stopped by SIGTERM"),
        (ENDED, None, "left no result"),
        (NO_GPU, {"status": "failed", "error": "No GPU."}, "No GPU"),
        (ENDED, {"status": "partial", "error": "2 of 4 runs do not count"}, "2 of 4 runs"),
    ],
)  # fmt: skip
def test_every_way_to_end_has_its_sentence(ended: Any, found: Any, sentence: str) -> None:
    message = follower([])._message(ended, found)
    if sentence == "^$":
        assert message == ""
    else:
        assert sentence in message


def recorded(folder: pathlib.Path, part: Any, **options: Any) -> dict[str, Any]:
    action = RECORD.ActionModule.__new__(RECORD.ActionModule)
    arguments = {
        "measurement": part, "directory": str(folder / "benchmarks"), "records": str(folder / "pve1"),
        "baseline": "before", "keep_baseline": False, "compare_with": None, "findings_file": None,
        "model_config": None, "model_quant_config": None, "expected_changes": ["settings"],
        "on_difference": "refuse", **options,
    }  # fmt: skip
    return dict(action._record(arguments, action._complete(arguments), conclude, page))


def bare(name: str, seed: int) -> dict[str, Any]:
    made = measurement(name, seed)
    made["model"] = {"tensor_parallel": "4", "active_parameters_b": "40.83", "bytes_per_weight": "0.5625"}
    return made


def record_of(folder: pathlib.Path, stamp: str, value: str) -> pathlib.Path:
    record = folder / "pve1" / stamp
    record.mkdir(parents=True)
    rows = [{"id": "sysctl:vm.swappiness", "before": "60", "after": value}]
    (record / "result.json").write_text(json.dumps({"rows": rows}))
    (record / "system-improve.md").write_text("# Tuned\n")
    return record


def test_the_newest_records_rows_are_the_settings_and_its_document_gets_the_section(
    tmp_path: pathlib.Path,
) -> None:
    first = record_of(tmp_path, "2026-01-01T000000Z", "60")
    recorded(tmp_path, bare("old", 1), keep_baseline=True)
    second = record_of(tmp_path, "2026-01-02T000000Z", "10")
    rows = [
        {
            "outcome": "finding",
            "severity": "P1",
            "title": "ACS redirects",
            "remedy": "Clear it.",
            "effect": "50 GB/s",
        },
        {"outcome": "clear", "severity": "P0", "title": "fine", "remedy": "nothing", "effect": ""},
    ]
    (second / "audit.json").write_text(json.dumps({"rows": rows}))
    found = recorded(tmp_path, bare("new", 2))
    assert set(found["verdicts"]) >= {"fabric.push.same", "inference.throughput.c10"}
    report = json.loads(pathlib.Path(found["report_json"]).read_text())
    assert report["differences"] == [
        {"part": "settings", "name": "sysctl:vm.swappiness", "before": "60", "after": "10", "expected": True}
    ]
    assert report["next_steps"][0] == "[P1] ACS redirects: Clear it. 50 GB/s"
    assert not any("fine" in step for step in report["next_steps"])
    assert "## Benchmark: new" in (second / "system-improve.md").read_text()
    assert "## Benchmark: old" in (first / "system-improve.md").read_text()
    assert (second / "system-improve.md").read_text().startswith("# Tuned\n")


def test_a_torso_never_becomes_the_baseline(tmp_path: pathlib.Path) -> None:
    torso = bare("torso", 1)
    torso["inference"]["status"] = "partial"
    found = recorded(tmp_path, torso, keep_baseline=True)
    assert not pathlib.Path(found["baseline"]).exists()
    assert pathlib.Path(found["measurement"]).exists()


def test_numbers_that_arrive_as_text_make_the_same_roofline(tmp_path: pathlib.Path) -> None:
    found = recorded(tmp_path, bare("x", 1))
    roofs = json.loads(pathlib.Path(found["report_json"]).read_text())["roofline"]
    assert roofs[0]["tokens_per_s"] == pytest.approx(312, abs=0.5)


def test_an_empty_part_of_ansible_core_2_16_is_none(tmp_path: pathlib.Path) -> None:
    half = bare("half", 1)
    half["fabric"] = ""
    kept = json.loads(pathlib.Path(recorded(tmp_path, half)["measurement"]).read_text())
    assert kept["fabric"] is None


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ["lxc-attach", "--clear-env", "-n", "ct", "--", "/bin/sh", "-c", "echo 'a b'"]),
        (
            {"ssh_host": "root@192.0.2.10", "enter_command": ["pct", "exec", "{container}", "--"]},
            ["ssh", "root@192.0.2.10", "pct exec ct -- /bin/sh -c 'echo '\"'\"'a b'\"'\"''"],
        ),
    ],
)
def test_the_lxc_connection_quotes_for_each_shell_on_the_way(
    options: dict[str, Any], wanted: list[str]
) -> None:
    connection = LXC.Connection.__new__(LXC.Connection)
    enter = ["lxc-attach", "--clear-env", "-n", "{container}", "--"]
    defaults = {"container": "ct", "ssh_host": "", "ssh_args": [], "enter_command": enter, **options}
    connection.get_option = defaults.get
    assert connection._command(["/bin/sh", "-c", "echo 'a b'"]) == wanted
