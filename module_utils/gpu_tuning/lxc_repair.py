# SPDX-License-Identifier: GPL-3.0-or-later
"""One run over any number of containers: read, diagnose, repair, record. Used by the module and at boot."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from . import lxc_config as grammar
from . import lxc_devices as logic
from . import lxc_host, lxc_modes
from . import lxc_write as files
from . import rows as status
from .lxc_devices import DeviceRow, Plan
from .lxc_readings import MOVED, Container, Host
from .lxc_rules import V1, V2, Includes
from .lxc_state import load_record, save_record, state_path
from .lxc_write import ConfigError, Source, WriteRefused
from .proc_devices import Majors, RecordError, parse_proc_devices, parse_recorded

DIAGNOSED, REPAIRED = "diagnosed", "repaired"
BACKUP_DIRECTORY = "lxc-backups"
_LOCK_NAME = "lxc.lock"
_MAX_RECORDED_SIZE = 16 << 20


class BadInput(Exception):
    """Something asked for that cannot be used: one sentence; nothing was changed."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What one run is to do.

    ``paths`` are config files or names of containers, empty to find them all; ``load`` loads drivers and
    creates nodes first; ``live`` changes running containers; ``verify`` looks at them from inside;
    ``record`` keeps the map of majors also when only diagnosing. ``check`` writes nothing anywhere.
    """

    state: str = DIAGNOSED
    paths: Sequence[str] = ()
    config_format: str = "auto"
    mode: str = lxc_modes.REPAIR
    recorded_devices: Optional[str] = None
    procfs_root: str = "/proc"
    dev_root: str = "/dev"
    state_root: str = "/var/lib/gpu-tuning"
    pve_root: str = "/etc/pve"
    lxc_root: str = "/var/lib/lxc"
    lock_root: str = "/run/lock/lxc"
    load: bool = False
    live: bool = False
    verify: bool = False
    record: bool = False
    check: bool = False


@dataclasses.dataclass
class Outcome:
    """What a run found and did. ``errors`` are sentences about configs that could not be read or written."""

    rows: list[DeviceRow]
    changed: bool
    diff: list[dict[str, str]]
    containers: list[dict[str, Any]]
    errors: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return rows, diff and containers as JSON-ready data."""
        return {
            "changed": self.changed,
            "rows": [row.as_dict() for row in self.rows],
            "diff": self.diff,
            "containers": self.containers,
        }


@dataclasses.dataclass
class _Job:
    """One container on its way through a run."""

    source: Source
    plan: Plan
    refusal: Optional[WriteRefused] = None
    written: bool = False
    live: str = lxc_host.NOT_ASKED
    running: Optional[bool] = None


def run(request: Request) -> Outcome:
    """Do what is asked. Raises :class:`BadInput` before anything was changed."""
    repairing = request.state == REPAIRED and not request.check
    with _only_run(request.state_root) if repairing else contextlib.nullcontext():
        return _Run(request).outcome()


@contextlib.contextmanager
def _only_run(state_root: str) -> Iterator[None]:
    """Hold this tool's own lock: two runs (one of them at boot) must not write one config."""
    try:
        path = state_path(state_root, _LOCK_NAME)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput(f"{state_root} cannot be used for backups and the record: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BadInput(
            f"another run repairs containers now and holds {path}; nothing was changed, run again"
        ) from None
    finally:
        os.close(handle)


# --- finding configs ------------------------------------------------------------------------------------


def find_configs(request: Request) -> list[str]:
    """Return the config paths: those named (a name or vmid is looked up), else all of this host."""
    if request.paths:
        found = [_named(request, name) for name in request.paths]
    else:
        found = [*_proxmox_configs(request.pve_root), *_plain_configs(request)]
    unique = {os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path): path for path in found}
    return list(unique.values())


def _named(request: Request, name: str) -> str:
    if "/" in name:
        return os.path.abspath(name)
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in (".", ".."):
        raise BadInput(f"{name!r} is neither a path nor a container's name")
    candidates = [
        os.path.join(request.pve_root, "lxc", f"{name}.conf"),
        os.path.join(request.lxc_root, name, "config"),
    ]
    for path in candidates:
        if os.path.lexists(path):
            return path
    raise BadInput(
        f"there is no container {name} on this host: neither {candidates[0]} nor {candidates[1]} exists"
    )


def _listdir(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadInput(f"{directory} cannot be listed: {error.strerror}") from error


def _proxmox_configs(pve_root: str) -> list[str]:
    directory = os.path.join(pve_root, "lxc")
    names = [name for name in _listdir(directory) if re.fullmatch(r"[0-9]+\.conf", name)]
    return [os.path.join(directory, name) for name in sorted(names, key=lambda name: int(name[:-5]))]


def _plain_configs(request: Request) -> list[str]:
    # Proxmox makes /var/lib/lxc/<vmid>/config anew at every start: an edit there would be lost.
    proxmox = os.path.isdir(os.path.join(request.pve_root, "lxc"))
    names = [name for name in _listdir(request.lxc_root) if not (proxmox and name.isdigit())]
    paths = [os.path.join(request.lxc_root, name, "config") for name in names]
    return [path for path in paths if os.path.lexists(path)]


def container_name(path: str, config_format: str) -> str:
    """Return a container's id: the vmid, or the directory of a plain config, or the file's name."""
    directory, base = os.path.split(path)
    if config_format == grammar.LXC and base == "config":
        return os.path.basename(directory)
    return base[: -len(".conf")] if base.endswith(".conf") and len(base) > len(".conf") else base


# --- the host -------------------------------------------------------------------------------------------


def read_majors(procfs_root: str) -> Majors:
    """Return the majors of now. Raises :class:`BadInput` when /proc/devices cannot be read."""
    path = os.path.join(procfs_root, "devices")
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return parse_proc_devices(stream.read())
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): without it no major is known") from error


def cgroup_family(procfs_root: str) -> str:
    """Return which version of the device cgroup is in force (/proc/cgroups: a hierarchy means version 1)."""
    try:
        with open(os.path.join(procfs_root, "cgroups"), encoding="utf-8", errors="replace") as stream:
            match = re.search(r"^devices\s+([0-9]+)\s", stream.read(), re.MULTILINE)
    except OSError:
        return V2
    return V1 if match and match.group(1) != "0" else V2


def _recorded(request: Request) -> Optional[Majors]:
    path = request.recorded_devices
    if not path or os.path.realpath(path) == os.path.realpath(state_path(request.state_root, make=False)):
        return None  # the record is read as what it is
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return parse_recorded(stream.read(_MAX_RECORDED_SIZE), path)
    except OSError as error:
        raise BadInput(f"recorded_devices {path} cannot be read: {error.strerror}") from error
    except RecordError as error:
        raise BadInput(str(error)) from error


class _Run:
    """The steps of one run, in order; every config is read and judged before the first is written."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.rows: list[DeviceRow] = []
        self.errors: list[str] = []
        self.includes = Includes()
        self.changed = False
        try:
            record = load_record(request.state_root)
        except RecordError as error:
            raise BadInput(str(error)) from error
        self.host = Host(
            read_majors(request.procfs_root),
            record,
            _recorded(request),
            request.recorded_devices or "recorded_devices",
            request.dev_root,
            cgroup_family(request.procfs_root),
            os.path.isdir(request.dev_root),
        )
        self.jobs = self._jobs(self._containers())
        if not self.host.nodes_known:
            self.rows.append(self._no_nodes())

    def outcome(self) -> Outcome:
        if self.request.load and self.request.state == REPAIRED:
            self._load()
        if self.request.state == REPAIRED:
            self._repair()
        rows = [row for job in self.jobs for row in job.plan.rows]
        if self.request.verify:
            rows += [row for job in self.jobs for row in self._verify(job)]
        if (self.request.state == REPAIRED or self.request.record) and not self.request.check:
            self._record()
        return Outcome([*self.rows, *rows], self.changed, self._diff(), self._summaries(), self.errors)

    # --- reading

    def _containers(self) -> list[tuple[Source, Container]]:
        found = []
        for path in find_configs(self.request):
            try:
                source = files.read_config(path)
                self._check_node(path)
            except ConfigError as error:
                self._unreadable(path, str(error))
                continue
            config_format = self.request.config_format
            if config_format == "auto":
                config_format = grammar.detect_format(path, source.text)
            config = grammar.parse(source.text, config_format)
            found.append((source, Container(container_name(path, config_format), path, config)))
        if self.errors and self.request.paths:
            raise BadInput("; ".join(self.errors))
        return _unique_names(found)

    def _no_nodes(self) -> DeviceRow:
        reason = f"no node was looked at: {self.request.dev_root} is no directory"
        return DeviceRow(
            f"{lxc_host.DRIVER_KIND}:dev",
            lxc_host.DRIVER_KIND,
            "dev",
            status=status.NOT_APPLICABLE,
            reason=reason,
            finding=logic.NODE_MISSING,
        )

    def _unreadable(self, path: str, sentence: str) -> None:
        """Report a config of a discovery that cannot be read; the others go on."""
        self.errors.append(sentence)
        target = path.lstrip("/")
        self.rows.append(
            DeviceRow(
                f"{logic.KIND}:{target}",
                logic.KIND,
                target,
                status=status.FAILED,
                reason=sentence,
                finding=logic.DEAD,
                path=path,
            )
        )

    def _check_node(self, path: str) -> None:
        """Refuse a config of another node of the cluster: its majors are that host's."""
        match = re.search(r"/nodes/([^/]+)/lxc/[0-9]+\.conf$", os.path.realpath(path))
        local = os.path.join(self.request.pve_root, "local")
        if match and os.path.islink(local):
            node = os.path.basename(os.readlink(local))
            if match.group(1) != node:
                raise ConfigError(
                    f"{path} belongs to node {match.group(1)} and this host is {node}: majors differ "
                    "between hosts, run there"
                )

    def _jobs(self, containers: list[tuple[Source, Container]]) -> list[_Job]:
        return [_Job(source, self._plan(container)) for source, container in containers]

    def _plan(self, container: Container) -> Plan:
        plan = logic.diagnose(container, self.host, self.includes)
        return lxc_modes.convert(plan, self.host, self.request.mode)

    # --- drivers

    def _load(self) -> None:
        """Load drivers and create nodes, then diagnose anew with the majors that came of it."""
        request, plans = self.request, [job.plan for job in self.jobs]
        gpu_found = bool(self.host.now.majors("nvidia"))
        for name in lxc_host.missing_drivers(plans, self.host.now):
            self.rows.append(lxc_host.load_driver(name, request.check, gpu_found))
            gpu_found = gpu_found or self.rows[-1].status == status.CHANGED
        missing = lxc_host.missing_nodes(plans, request.dev_root)
        if missing:
            self.rows += lxc_host.create_nodes(missing, request.dev_root, request.check)
        if not self.rows:
            return
        self.changed = any(row.status in (status.CHANGED, status.WOULD_CHANGE) for row in self.rows)
        if not request.check:
            self.host = dataclasses.replace(self.host, now=read_majors(request.procfs_root))
            self.jobs = [_Job(job.source, self._plan(job.plan.container)) for job in self.jobs]

    # --- writing

    def _repair(self) -> None:
        edited = [job for job in self.jobs if job.plan.edits]
        for job in edited:
            try:
                files.preflight(job.source, job.plan.container.config)
            except WriteRefused as refusal:
                self._refused(job, refusal)
        for job in edited:
            if job.refusal is None and not self.request.check:
                self._write(job)
        self.changed = self.changed or any(job.written for job in edited)
        if self.request.check:
            self.changed = self.changed or any(job.refusal is None for job in edited)

    def _write(self, job: _Job) -> None:
        request, config, path = self.request, job.plan.container.config, job.source.path
        new = job.plan.new_text.encode("latin-1")
        try:
            with files.proxmox_lock(request.lock_root, files.vmid(config, path)):
                files.backup(os.path.join(request.state_root, BACKUP_DIRECTORY), job.source)
                found = files.replace_config(job.source, new, config.format)
        except WriteRefused as refusal:
            self._refused(job, refusal)
            return
        job.written = True
        if found != new:
            sentence = f"{path} was written but reads back differently: something else writes it, run again"
            self._refused(job, WriteRefused(status.OVERRIDDEN, sentence))
            return
        job.plan.rows = [
            row.replaced(status=status.CHANGED, after=row.desired)
            if row.status == status.WOULD_CHANGE
            else row
            for row in job.plan.rows
        ]
        if request.live:
            self._apply_live(job)

    def _refused(self, job: _Job, refusal: WriteRefused) -> None:
        job.refusal = refusal
        self.errors.append(str(refusal))
        job.plan.rows = [
            row.replaced(status=refusal.row_status, reason=f"{refusal}; {row.reason}")
            if row.status == status.WOULD_CHANGE
            else row
            for row in job.plan.rows
        ]

    def _apply_live(self, job: _Job) -> None:
        if not self._is_running(job):
            job.live = lxc_host.NOT_RUNNING
            return
        job.live, why = lxc_host.apply_live(job.plan)
        if job.live == lxc_host.NOT_APPLIED:
            told = f"the running container keeps its old rules until it is restarted: {why}"
            job.plan.rows = [
                row.replaced(reason="; ".join(part for part in (row.reason, told) if part))
                if row.status == status.CHANGED
                else row
                for row in job.plan.rows
            ]

    def _is_running(self, job: _Job) -> bool:
        if job.running is None:
            job.running = lxc_host.is_running(job.plan.container)
        return job.running

    # --- after the writing

    def _verify(self, job: _Job) -> list[DeviceRow]:
        if not lxc_host.expected_inside(job.plan) or not job.plan.classes:
            return []
        if self._is_running(job):
            return lxc_host.verify_inside(job.plan, self.request.dev_root)
        name = job.plan.container.name
        return [
            lxc_host.inside_row(
                job.plan, "open", logic.FINDING_OK, status.NOT_APPLICABLE, f"{name} is not running"
            )
        ]

    def _record(self) -> None:
        """Keep the map and what each rule means, so that the next repair is certain."""
        record, explicit = self.host.record, self.host.explicit
        for job in self.jobs:
            meanings = job.plan.remembered(repaired=job.written)
            record.remember(job.source.path, meanings, explicit.digest() if explicit else None)
        record.add_map(self.host.now)
        try:
            save_record(self.request.state_root, record)
        except OSError as error:
            self.errors.append(
                f"the record of device majors in {self.request.state_root} cannot be written: "
                f"{error.strerror}; the next repair may lack its evidence"
            )

    def _diff(self) -> list[dict[str, str]]:
        if self.request.state != REPAIRED:
            return []
        return [
            {
                "before_header": job.source.path,
                "after_header": job.source.path,
                "before": job.source.text,
                "after": job.plan.new_text,
            }
            for job in self.jobs
            if job.plan.edits and job.refusal is None
        ]

    def _summaries(self) -> list[dict[str, Any]]:
        """Return what a caller needs to go on with each container, in their start order."""
        ordered = sorted(self.jobs, key=lambda job: grammar.start_order(job.plan.container.config))
        return [self._summary(job) for job in ordered]

    def _summary(self, job: _Job) -> dict[str, Any]:
        container = job.plan.container
        planned = self.request.state == REPAIRED and bool(job.plan.edits) and job.refusal is None
        moved = any(reading.verdict == MOVED for reading in job.plan.readings)
        devn = self.request.mode == lxc_modes.DEVN
        return {
            "name": container.name,
            "path": container.path,
            "format": container.config.format,
            "arguments": lxc_host.lxc_arguments(container),
            "changed": planned,
            "rules_changed": planned and ((moved and job.plan.enforced) or devn),
            "live": job.live,
            "has_devices": bool(job.plan.classes),
        }


def _unique_names(found: list[tuple[Source, Container]]) -> list[tuple[Source, Container]]:
    """Give containers of one name their path as the name: row ids must be unique on a host."""
    names = [container.name for _source, container in found]
    return [
        (source, dataclasses.replace(container, name=container.path.lstrip("/")))
        if names.count(container.name) > 1
        else (source, container)
        for source, container in found
    ]
