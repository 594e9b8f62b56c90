# SPDX-License-Identifier: GPL-3.0-or-later
"""The audit's controller side: rules, evaluation and reports. Needs jinja2 and PyYAML, which Ansible has."""
