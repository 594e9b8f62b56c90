# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep a measurement on the controller, compare it with a baseline, write the record and the report."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import re
import sys
from typing import Any, Optional

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

ROOT = pathlib.Path(__file__).resolve().parents[1]
for _folder in (str(ROOT), str(ROOT / "module_utils"), str(ROOT / "plugin_utils")):
    if _folder not in sys.path:
        sys.path.append(_folder)

from gpu_tuning.benchmark.documents import write_json, write_text
from system_record import newest, put_section

display = Display()

ARGUMENTS = {
    "measurement": {"type": "dict", "required": True},
    "directory": {"type": "path", "required": True},
    "records": {"type": "path"},
    "baseline": {"type": "str", "required": True},
    "keep_baseline": {"type": "bool", "default": False},
    "compare_with": {"type": "path"},
    "findings_file": {"type": "path"},
    "model_config": {"type": "path"},
    "model_quant_config": {"type": "path"},
    "expected_changes": {"type": "list", "elements": "str", "default": ["settings"]},
    "on_difference": {"type": "str", "choices": ["refuse", "show"], "default": "refuse"},
}
OWNER = "gpu_benchmark"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def read_json(path: Optional[str]) -> Any:
    """Return a JSON file's content, None where there is no such file; raises AnsibleActionFail if broken."""
    if not path or not os.path.exists(path):
        return None
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AnsibleActionFail(f"{path} cannot be used: {error}") from None


def settings_of(result: Any) -> Optional[dict[str, Any]]:
    """Return {row id: value now} from a tuning record with setting rows, None where there is none."""
    rows = result.get("rows") if isinstance(result, dict) else result
    if not isinstance(rows, list):
        return None
    return {
        row["id"]: row.get("after") if row.get("after") is not None else row.get("before") for row in rows
    }


class ActionModule(ActionBase):
    """Runs on the controller alone; the host is not touched."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Return summary, verdicts, refused and the paths of what was written."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        if not NAME.fullmatch(arguments["baseline"]):
            raise AnsibleActionFail(f"The baseline's name {arguments['baseline']!r} is no plain file name")
        if self._task.check_mode:
            return {**result, "skipped": True, "msg": "check mode: nothing was measured, nothing is recorded"}
        try:
            from benchmark_report import conclude, page
        except ImportError as error:
            raise AnsibleActionFail(
                f"The controller lacks {error.name}: install requirements/benchmark.txt"
            ) from None
        measurement = self._complete(arguments)
        try:
            result.update(self._record(arguments, measurement, conclude, page))
        except (OSError, ValueError) as error:
            raise AnsibleActionFail(f"The benchmark's record cannot be written: {error}") from error
        return result

    def _complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the measurement with what only the controller knows: settings, model, date."""
        measurement = dict(arguments["measurement"])
        now = datetime.datetime.now(datetime.timezone.utc)
        measurement.update(schema="gpu_benchmark/measurement/1", date=now.isoformat(timespec="seconds"))
        settings = settings_of(read_json(newest(arguments["records"], "result.json")))
        for part in ("fabric", "inference"):
            measurement[part] = measurement.get(part) or None
        measurement["fingerprint"] = {**(measurement.get("fingerprint") or {}), "settings": settings}
        # ansible-core 2.16 hands numbers over as text
        model: dict[str, Any] = {key: float(value) for key, value in (measurement.get("model") or {}).items()}
        for name, option in (("config", "model_config"), ("quant_config", "model_quant_config")):
            found = read_json(arguments[option])
            if found is not None:
                model[name] = found
        measurement["model"] = model
        return measurement

    def _record(
        self, arguments: dict[str, Any], measurement: dict[str, Any], conclude: Any, page: Any
    ) -> dict[str, Any]:
        base = pathlib.Path(arguments["directory"])
        stamp = measurement["date"].replace(":", "").replace("+0000", "Z")
        folder = base / f"{stamp}-{re.sub(r'[^A-Za-z0-9._-]+', '-', measurement['name'])}"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(str(folder / "measurement.json"), measurement)
        kept = base / "baselines" / f"{arguments['baseline']}.json"
        before = None if arguments["keep_baseline"] else self._baseline(arguments, kept, conclude)
        report = conclude.conclude(
            before,
            measurement,
            arguments["expected_changes"],
            arguments["on_difference"],
            self._findings(arguments["findings_file"] or newest(arguments["records"], "audit.json")),
        )
        write_json(str(folder / "report.json"), report)
        write_text(str(folder / "report.html"), page.html(report))
        section = page.markdown(report)
        put_section(str(folder / "system-improve.md"), OWNER, section)
        record = newest(arguments["records"])
        if record:
            put_section(record, OWNER, section)
        if arguments["keep_baseline"] and self._whole(measurement):
            kept.parent.mkdir(exist_ok=True)
            write_json(str(kept), measurement)
        summary = conclude.summary(report)
        display.display(f"benchmark of {measurement['host']}: {summary}")
        verdicts = {one["id"]: one["verdict"] for one in report["comparison"] if one["headline"]}
        return {
            "changed": True, "summary": summary, "verdicts": verdicts, "refused": report["refused"],
            "report": str(folder / "report.html"), "record": record or str(folder / "system-improve.md"),
            "report_json": str(folder / "report.json"),
            "measurement": str(folder / "measurement.json"), "baseline": str(kept),
        }  # fmt: skip

    def _baseline(self, arguments: dict[str, Any], kept: pathlib.Path, conclude: Any) -> Any:
        path = arguments["compare_with"] or str(kept)
        if not arguments["compare_with"] and not kept.exists():
            return None
        return conclude.load(path)

    @staticmethod
    def _whole(measurement: dict[str, Any]) -> bool:
        """A baseline is kept only of whole measurements: a later run would be compared with a torso."""
        parts = [measurement.get("fabric"), measurement.get("inference")]
        return any(parts) and all(part["status"] == "complete" for part in parts if part)

    @staticmethod
    def _findings(path: Optional[str]) -> list[dict[str, Any]]:
        found = read_json(path)
        rows = found.get("rows", []) if isinstance(found, dict) else found
        return [row for row in rows or [] if row.get("outcome", "finding") == "finding"]
