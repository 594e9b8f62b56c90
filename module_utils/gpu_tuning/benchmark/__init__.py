# SPDX-License-Identifier: GPL-3.0-or-later
"""Benchmarks: what runs on the measured host and what reads the tools' output; standard library only."""
